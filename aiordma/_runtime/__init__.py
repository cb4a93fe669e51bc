"""Objects that exist once per event loop: the reactor, a hub for each device; address lookup."""

__all__ = ()
