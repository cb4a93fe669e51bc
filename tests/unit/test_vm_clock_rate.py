"""The rate of the processor's clock, which the test bed tells an emulated guest."""

import platform
from pathlib import Path

import pytest

from tests.vm import clock_rate, qemu

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="this machine is no x86-64")


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_rate_is_measured_once() -> None:
    first = clock_rate.kilohertz()
    assert first is not None
    assert 100_000 < int(first) < 10_000_000
    assert clock_rate.kilohertz() == first


def test_two_measures_agree(tmp_path: Path) -> None:
    found = []
    for name in ("one", "other"):
        directory = tmp_path / name
        directory.mkdir()
        clock_rate.measure(directory)
        found.append(int((directory / "kilohertz").read_text()))
    assert found[0] == pytest.approx(found[1], rel=0.001)


@pytest.mark.parametrize(("accelerator", "told"), [(qemu.EMULATION, True), (qemu.KVM, False)])
def test_only_an_emulated_guest_is_told(
    accelerator: tuple[str, ...], told: bool, tmp_path: Path
) -> None:
    guest = qemu.Guest(Path("image"), Path("initramfs"), tmp_path)
    words = " ".join(guest.command_line(accelerator)).split()
    assert (f"tsc_early_khz={clock_rate.kilohertz()}" in words) == told
