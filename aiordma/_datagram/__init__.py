"""Datagram sockets: peers, groups, and address handles."""
