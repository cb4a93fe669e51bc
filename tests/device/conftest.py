"""Tests against a device; the fixtures apply here because they are imported here."""

from tests.devices import (
    ADDRESS,
    DeviceUnderTest,
    device,
    kernel_objects,
    nothing_is_left,
    required_capabilities,
)

__all__ = (
    "ADDRESS",
    "DeviceUnderTest",
    "device",
    "kernel_objects",
    "nothing_is_left",
    "required_capabilities",
)
