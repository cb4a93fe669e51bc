"""Connections: connect, listen, messages, posts and chains, shared receive queues."""
