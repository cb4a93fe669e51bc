"""One queue pair on an event loop: its life, its work queues, and what is staged for them."""

__all__ = ()
