"""The capabilities that devices lack: each is explained to users, and some test needs it."""

import re

import pytest

from tests.devices import LACKS
from tests.unit.sources import ROOT

CAPABILITIES = sorted({name for table in LACKS.values() for name in table})
TESTS = "".join(
    path.read_text() for path in sorted((ROOT / "tests").rglob("*.py")) if path.name != "devices.py"
)


@pytest.mark.parametrize("name", CAPABILITIES)
def test_a_capability_stands_on_the_page(name: str) -> None:
    assert f"`{name}`" in (ROOT / "docs" / "devices.md").read_text()


@pytest.mark.parametrize("name", CAPABILITIES)
def test_a_capability_is_needed_by_a_test(name: str) -> None:
    assert f'"{name}"' in TESTS


def test_no_test_needs_what_no_device_lacks() -> None:
    assert set(re.findall(r'(?:capability|lacks)\(\s*"([^"]+)"', TESTS)) <= set(CAPABILITIES)
