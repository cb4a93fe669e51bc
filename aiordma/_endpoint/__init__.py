"""A queue pair on an event loop: its lifecycle, its work queues, and the staging of buffers."""
