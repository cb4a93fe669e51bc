"""Datagram sockets: peers, groups, and address handles."""

__all__ = ()
