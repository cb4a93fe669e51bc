"""Attacks run on the software device only: it is what parses a peer's bytes in our own code."""

from tests.devices import device, nothing_is_left

__all__ = ("device", "nothing_is_left")
