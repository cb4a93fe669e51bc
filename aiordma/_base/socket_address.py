"""Python's socket addresses as C's struct sockaddr bytes, and back (pure; man 7 ip, ipv6)."""

import socket
import struct

from aiordma._base.arguments import whole_number, wrong_type

SocketAddress = tuple[str, int]
"""A numeric host (an IPv6 address with %scope if it has one) and a port."""

_IPV4 = struct.Struct("=H2s4s8x")
_IPV6 = struct.Struct("=H2sI16sI")


def address_text(address: SocketAddress | None) -> str:
    """Return "host:port" for messages, with an IPv6 host in brackets; "(unknown)" for None."""
    if address is None:
        return "(unknown)"
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(address: str) -> bool:
    """Return whether a numeric address is one that reaches this machine only."""
    return address.startswith("127.") or address == "::1"


def pack_address(host: str, port: int) -> bytes:
    """Return a struct sockaddr_in or sockaddr_in6.

    Raises:
        TypeError: the host is not a str, or the port is not a whole number.
        ValueError: the host is not a numeric address, or the port is out of range.
    """
    if type(port) is not int or not 0 <= port <= 0xFFFF:
        port = whole_number(port, "port", 0, 0xFFFF)
    if not isinstance(host, str):
        raise wrong_type(host, "host", "a numeric address such as '192.0.2.1'")
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
        raise ValueError(f"host={host!r} is not a numeric IP address: {error}") from None


def unpack_address(raw: bytes) -> SocketAddress | None:
    """Return (host, port) of a struct sockaddr; None if its family is not IPv4 or IPv6."""
    (family,) = struct.unpack_from("=H", raw)
    if family == socket.AF_INET:
        _, port, packed = _IPV4.unpack_from(raw)
        return socket.inet_ntop(socket.AF_INET, packed), int.from_bytes(port, "big")
    if family == socket.AF_INET6:
        _, port, _, packed, index = _IPV6.unpack_from(raw)
        host = socket.inet_ntop(socket.AF_INET6, packed)
        return (f"{host}%{index}" if index else host), int.from_bytes(port, "big")
    return None
