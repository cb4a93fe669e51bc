"""asyncio, uvloop and trio behind one face; the polling loop; worker threads."""

__all__ = ()
