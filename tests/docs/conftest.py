"""The documentation's programs run on a device, and leave nothing."""

from tests.devices import device, nothing_is_left, required_capabilities

__all__ = ("device", "nothing_is_left", "required_capabilities")
