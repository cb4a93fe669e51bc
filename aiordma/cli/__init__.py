"""The command line."""

__all__ = ()
