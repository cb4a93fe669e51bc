"""A queue of peers' requests, first come, first served, that counts the requests of each source
(pure)."""

import socket
from collections.abc import Callable
from typing import TypeVar

from aiordma._base.socket_address import SocketAddress

Item = TypeVar("Item")

_NETWORK = 8  # bytes of an IPv6 address: a host can use all addresses of its /64
_LINK_LOCAL = 0x3FA  # the first 10 bits
_MAPPED = bytes(10) + b"\xff\xff"  # ::ffff:a.b.c.d


def source_of(address: SocketAddress | None) -> bytes:
    """Return the source that requests of an address count for: the IPv4 address, or the /64 of an
    IPv6 address. Each link-local or IPv4-mapped IPv6 address is a source of its own."""
    host = address[0].partition("%")[0] if address else ""
    if ":" not in host:
        return host.encode()
    packed = socket.inet_pton(socket.AF_INET6, host)
    is_whole = packed.startswith(_MAPPED) or packed[0] << 2 | packed[1] >> 6 == _LINK_LOCAL
    return packed if is_whole else packed[:_NETWORK]


class FairQueue(dict[Item, bytes]):
    """Items in the order of their arrival, each with its source."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[bytes, int] = {}

    def append(self, item: Item, source: bytes) -> None:
        """Append an item, which must not be in the queue."""
        self[item] = source
        self._counts[source] = self._counts.get(source, 0) + 1

    def remove(self, item: Item) -> None:
        """Remove an item, which must be in the queue."""
        source = self.pop(item)
        self._counts[source] -= 1
        if not self._counts[source]:
            del self._counts[source]

    def popleft(self) -> tuple[Item, bytes]:
        """Remove and return the oldest item, and its source. The queue must not be empty."""
        oldest = next(iter(self.items()))
        self.remove(oldest[0])
        return oldest

    def count(self, source: bytes) -> int:
        """Return the number of items of a source."""
        return self._counts.get(source, 0)

    def greediest(self, is_eligible: Callable[[Item], bool] = lambda _: True) -> Item | None:
        """Return the oldest eligible item of the source with the most items, or None."""
        most = max(self._counts.values(), default=0)
        found = (item for item, source in self.items() if self.count(source) == most)
        return next(filter(is_eligible, found), None)

    def displaced_by(self, source: bytes) -> Item | None:
        """Return the item to remove from a full queue for a new item of a source: the `greediest`,
        if its source then still has at least as many items as the new item's. None: refuse the new
        item."""
        if not self:
            return None
        item = self.greediest()
        assert item is not None
        has_more = self.count(self[item]) > self.count(source) + 1
        return item if has_more else None
