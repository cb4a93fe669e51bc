"""The data path of a stream: rsockets' protocol, carried out by the engine
(`_native/engine/stream_path.c`). This module has its memory, and the interface of its owner.

Data to send is copied into a ring of registered memory, or written from the caller's registered
memory. Data that arrived lies in another ring, until it is read. On iWARP rsockets uses no
immediate data: each WRITE is followed by a SEND of the same 4 bytes, a word. Two sides of this
library whose iWARP devices have immediate data (RFC 7306) use it nevertheless.
"""

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, TypeVar, cast

from aiordma._base.enums import Access
from aiordma._base.ranges import RemoteMemory
from aiordma._connection.connection import Connection
from aiordma._native import StreamPath
from aiordma.streams.protocol import GRANT_BYTES, TABLE_ENTRIES
from aiordma.verbs.memory import MemoryRegion

__all__ = (
    "CONTROL_SLOTS",
    "LENT",
    "WORD_BYTES",
    "Memory",
    "StreamPath",
    "awaits_path",
    "stream_path",
)

LENT: Access = Access.LOCAL_WRITE | Access.REMOTE_WRITE
"""Of the ring that the peer writes to."""

CONTROL_SLOTS = 4
"""Requests of the send queue that are kept for grants and for the end. (On iWARP a grant takes
two.)"""
WORD_BYTES = 4
TRANSFER_BYTES = 256 * 1024
"""The most bytes of one message: the peer can read the first while others are on the way."""

_TABLE_BYTES = TABLE_ENTRIES * GRANT_BYTES

Method = TypeVar("Method", bound=Callable[..., Coroutine[Any, Any, Any]])


class Memory:
    """The registered memory of a stream: of bytearrays that live as long as it.

    Args:
        connection: registers it.
        ring_bytes: of each of the two rings.
        grows: the path may ask its owner for larger ones.
    """

    def __init__(self, connection: Connection, ring_bytes: int, grows: bool = False) -> None:
        options = connection.options
        words = options.max_recv_wr + options.max_send_wr
        self.ring_bytes: int = ring_bytes
        self.grows: bool = grows
        # The peer may write to the ring and the table. It cannot reach the rest.
        self.lent_bytes: bytearray = bytearray(ring_bytes + _TABLE_BYTES)
        self.our_bytes: bytearray = bytearray(
            ring_bytes + GRANT_BYTES * CONTROL_SLOTS + WORD_BYTES * words
        )
        self.lent: MemoryRegion = connection.register(self.lent_bytes, LENT)
        self.ours: MemoryRegion = connection.register(self.our_bytes)

    @property
    def ring(self) -> RemoteMemory:
        """The ring that the peer writes to."""
        return self.lent[: self.ring_bytes].remote()

    @property
    def table(self) -> RemoteMemory:
        """The table that the peer writes grants to."""
        return self.lent[self.ring_bytes :].remote()


def stream_path(connection: Connection, memory: Memory) -> StreamPath:
    """Return the data path of a stream."""
    options = connection.options
    return StreamPath(
        port=connection._port,
        lent=memory.lent,
        lent_memory=memory.lent_bytes,
        lent_rkey=memory.lent.rkey,
        ours=memory.ours,
        our_memory=memory.our_bytes,
        ring=memory.ring_bytes,
        receives=options.max_recv_wr,
        depth=options.max_send_wr,
        transfer=TRANSFER_BYTES,
        uses_words=connection._endpoint.hub.is_iwarp,  # `start` says whether it does
        grows=memory.grows,
    )


def awaits_path(name: str) -> Callable[[Method], Method]:
    """Decorate a coroutine method: the method `name` of `self._path` does what is usual, and awaits
    the decorated method for the rest."""

    def decorate(method: Method) -> Method:
        @wraps(method)
        async def run(self: Any, *arguments: Any, **keywords: Any) -> Any:
            return await getattr(self._path, name)(method, (self, *arguments), keywords)

        return cast(Method, run)

    return decorate
