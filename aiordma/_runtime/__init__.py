"""What there is once per event loop: the reactor, a hub for each device, addresses."""

__all__ = ()
