"""Python's socket addresses as C's struct sockaddr bytes, and back (pure; man 7 ip, ipv6)."""

import socket
import struct

__all__ = ("SocketAddress", "pack_address", "unpack_address")

SocketAddress = tuple[str, int]
"""A numeric host (IPv6 with %scope where it has one) and a port."""

_IPV4 = struct.Struct("=H2s4s8x")
_IPV6 = struct.Struct("=H2sI16sI")


def pack_address(host: str, port: int) -> bytes:
    """Return a struct sockaddr_in or sockaddr_in6.

    Raises:
        ValueError: the host is not a numeric address, or the port is out of range.
    """
    if not 0 <= port <= 0xFFFF:
        raise ValueError(f"port {port} is not in 0..65535")
    wire_port = port.to_bytes(2, "big")
    address, scoped, scope = host.partition("%")
    try:
        if ":" not in address and not scoped:
            return _IPV4.pack(socket.AF_INET, wire_port, socket.inet_pton(socket.AF_INET, address))
        packed = socket.inet_pton(socket.AF_INET6, address)
        index = 0
        if scoped:
            index = int(scope) if scope.isdecimal() else socket.if_nametoindex(scope)
        return _IPV6.pack(socket.AF_INET6, wire_port, 0, packed, index)
    except (OSError, ValueError, struct.error) as error:
        raise ValueError(f"{host!r} is not a numeric IP address: {error}") from None


def unpack_address(raw: bytes) -> SocketAddress | None:
    """Return (host, port) of a struct sockaddr; None for a family that has neither."""
    (family,) = struct.unpack_from("=H", raw)
    if family == socket.AF_INET:
        _, port, packed = _IPV4.unpack_from(raw)
        return socket.inet_ntop(socket.AF_INET, packed), int.from_bytes(port, "big")
    if family == socket.AF_INET6:
        _, port, _, packed, index = _IPV6.unpack_from(raw)
        host = socket.inet_ntop(socket.AF_INET6, packed)
        return (f"{host}%{index}" if index else host), int.from_bytes(port, "big")
    return None
