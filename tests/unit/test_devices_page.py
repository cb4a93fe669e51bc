"""docs/devices.md explains to users what devices and machines lack."""

from tests.devices import CAPABILITIES
from tests.unit.sources import ROOT


def test_page_explains_every_capability() -> None:
    page = (ROOT / "docs" / "devices.md").read_text()
    assert [name for name in sorted(CAPABILITIES) if f"`{name}`" not in page] == []
