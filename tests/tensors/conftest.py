"""The tests leave nothing on the device."""

from tests.devices import device, nothing_is_left, required_capabilities

__all__ = ("device", "nothing_is_left", "required_capabilities")
