"""The fixtures of the pytest plugin on the device under test, named by --rdma alone."""

from pathlib import Path

import pytest

from tests.devices import DeviceUnderTest
from tests.internals import SOFTWARE
from tests.plugin_project import ALL_FIXTURES, run

pytestmark = pytest.mark.one_kernel_device

WITHOUT = ("-p", "no:hypothesispytest", "-p", "no:valkey", "-p", "no:xdist", "--durations=0")
"""Plugins that these tests do not use take the VM ten seconds."""


def test_each_fixture_works_on_the_device(device: DeviceUnderTest, tmp_path: Path) -> None:
    source = ALL_FIXTURES.format(marks="@pytest.mark.asyncio")
    said = run(tmp_path, source, f"--rdma={device.name}", "-rs", *WITHOUT)
    has_faults = device.name == SOFTWARE
    assert ("5 passed" if has_faults else "4 passed, 1 skipped") in said, said
    assert has_faults or f"{device.name} has no fault injection" in said
