"""A queue of what peers ask for, first come, first served, which knows the address that has most of
it (pure)."""

import socket
from collections.abc import Iterator
from typing import Generic, TypeVar

from aiordma._base.socket_address import SocketAddress

__all__ = ("FairQueue", "source_of")

Item = TypeVar("Item")

_NETWORK = 8  # bytes of an IPv6 address: a host has all addresses of its /64
_LINK_LOCAL = 0x3FA  # the first 10 bits
_MAPPED = bytes(10) + b"\xff\xff"  # ::ffff:a.b.c.d


def source_of(address: SocketAddress | None) -> bytes:
    """Return what counts as one source of requests: an IPv4 address, or an IPv6 /64. Link-local
    and IPv4-mapped IPv6 addresses count one by one."""
    host = address[0].partition("%")[0] if address else ""
    if ":" not in host:
        return host.encode()
    packed = socket.inet_pton(socket.AF_INET6, host)
    is_whole = packed.startswith(_MAPPED) or packed[0] << 2 | packed[1] >> 6 == _LINK_LOCAL
    return packed if is_whole else packed[:_NETWORK]


class FairQueue(Generic[Item]):
    """Items in the order of their arrival, each with the source that it came from."""

    def __init__(self) -> None:
        self._sources: dict[Item, bytes] = {}
        self._counts: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._sources)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._sources)

    def __contains__(self, item: Item) -> bool:
        return item in self._sources

    def append(self, item: Item, source: bytes) -> None:
        """Add an item, which is not in the queue, at its end."""
        self._sources[item] = source
        self._counts[source] = self.count(source) + 1

    def remove(self, item: Item) -> None:
        """Remove an item, which is in the queue."""
        source = self._sources.pop(item)
        self._counts[source] -= 1
        if not self._counts[source]:
            del self._counts[source]

    def popleft(self) -> Item:
        """Remove and return the oldest item; the queue is not empty."""
        item = next(iter(self._sources))
        self.remove(item)
        return item

    def count(self, source: bytes) -> int:
        """Return how many items of a source there are."""
        return self._counts.get(source, 0)

    def greediest(self) -> Item:
        """Return the oldest item of the source that has the most; the queue is not empty."""
        most = max(self._counts.values())
        return next(item for item, source in self._sources.items() if self.count(source) == most)

    def displaced_by(self, source: bytes) -> Item | None:
        """Return what has to leave a full queue for one more item of a source: the `greediest`,
        where its source would still have as many as this one. None: the new item has no place."""
        if not self._sources:
            return None
        item = self.greediest()
        has_more = self.count(self._sources[item]) > self.count(source) + 1
        return item if has_more else None
