"""One rsocket over one connection: the handshake, the errors and the end of a stream. `path` moves
its data. Nothing waits in these two modules (except `drained`), so that streams and asyncio
transports can both be built on them.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from aiordma._base.enums import WorkCompletionOpcode
from aiordma._base.errors import (
    DisconnectedError,
    RdmaError,
    StreamProtocolError,
    detached,
)
from aiordma._base.states import ConnectionState
from aiordma._connection.connection import Connection
from aiordma._endpoint.capabilities import has_immediate
from aiordma._endpoint.domain_state import wrong_domain
from aiordma._endpoint.registration import register
from aiordma._loop.threads import Once
from aiordma.streams.channel import Channel
from aiordma.streams.path import LENT, WORD_BYTES, Memory, StreamPath
from aiordma.streams.protocol import GRANT_BYTES, Hello
from aiordma.verbs.completion import WorkCompletion
from aiordma.verbs.memory import MemorySlice

__all__ = ("CLOSE_TIMEOUT", "Rsocket")

logger: logging.Logger = logging.getLogger("aiordma")

GROWN_BYTES = 2 << 20
CLOSE_TIMEOUT = 5.0
"""How many seconds a close waits, unless the program says otherwise."""

_RECEIVED_WORD = int(WorkCompletionOpcode.RECV)


class Rsocket(Channel):
    """See the module. The connection is a prepared one, with `receive_buffers=0`.

    Args:
        connection: see above.
        memory: the memory of the data path.
        path: the data path.
        close_timeout: how many seconds a close waits for `drained`.

    Raises:
        VerbsCallError: a receive could not be posted.
    """

    def __init__(
        self, connection: Connection, memory: Memory, path: StreamPath, close_timeout: float
    ) -> None:
        super().__init__(connection, close_timeout, (memory.ring_bytes, memory.ring_bytes))
        self._is_iwarp = self._endpoint.hub.is_iwarp
        self._takes_immediate = self._is_iwarp and has_immediate(self._endpoint)
        self._credits = connection.options.max_recv_wr
        self._memory = memory
        self._path = path
        self.path.owner = self
        self.teardown.on_ended.append(self.path.end)
        self.teardown.on_closed.append(self._let_go)
        self.path.post_receives()
        if self._error is not None:
            raise detached(self._error)

    @property
    def path(self) -> StreamPath:
        """The data path."""
        return self._path

    # -- the handshake ----------------------------------------------------------------------------

    def hello(self) -> bytes:
        """Return the private data for the peer."""
        ring = self._memory.ring
        half = ring[: ring.length // 2]
        return Hello(
            self._credits, self._memory.table, half, takes_immediate=self._takes_immediate
        ).pack()

    def start(self, private_data: bytes) -> None:
        """Set the peer's private data.

        Raises:
            StreamProtocolError: the peer is no rsocket of this version.
        """
        hello = Hello.unpack(private_data)
        table, buffer = hello.table, hello.buffer
        self.path.start(
            hello.credits,
            table.address,
            table.rkey,
            table.length // GRANT_BYTES,
            buffer.address,
            buffer.rkey,
            buffer.length,
            hello.is_big_endian,
            self._is_iwarp and not (self._takes_immediate and hello.takes_immediate),
        )

    def begin(self, *, is_first: bool) -> None:
        """Begin to send, once the connection is established and `start` was called.

        Args:
            is_first: this side has connected. On iWARP the other side sends nothing before
                something has arrived (RFC 5044, 7.1); a side that connected sends a grant at once.
        """
        self.path.begin(is_first or not self._is_iwarp)

    # -- errors -----------------------------------------------------------------------------------

    def read_error(self) -> Exception | None:
        """As `Channel.read_error`."""
        if self.path.at_eof:
            return None
        if self._error is not None:
            return detached(self._error)
        if self.teardown.has_ended:
            return self._end_error()
        return None

    def write_error(self) -> Exception | None:
        """As `Channel.write_error`."""
        if self._error is not None:
            return detached(self._error)
        if self._endpoint.cause is not None:
            return self._end_error()
        if self.path.peer_disconnected:
            return DisconnectedError(f"{self.name}: the peer has closed the stream")
        return None

    def _end_error(self) -> Exception:
        cause = self._endpoint.cause
        assert cause is not None
        error = detached(cause)
        if isinstance(error, DisconnectedError) and not self.path.at_eof:
            return DisconnectedError(f"{cause}, without an end of its data")
        return error

    # -- sending ----------------------------------------------------------------------------------

    def write(self, data: bytes | memoryview) -> int:
        """As `Channel.write`."""
        done = self.path.write(data)
        if done < 0:
            self._raise()
        return done

    def write_registered(self, memory: MemorySlice) -> int:
        """Post as much of registered memory as there is room for, without a copy; returns the
        number of bytes. The memory must stay as it is while there is data in flight.

        Raises:
            RdmaError: a request could not be posted; the stream has ended.
            ClosedError, ValueError: the memory is closed, or belongs to another device.
        """
        done = self.path.write_registered(memory)
        if done is None:
            memory.region._require_open()
            raise wrong_domain(memory.region, self._endpoint.memory.domain)
        if done < 0:
            self._raise()
        return done

    def _raise(self) -> NoReturn:
        ended = f"{self.name}: the stream has ended"
        error = self.write_error()
        raise DisconnectedError(ended) if error is None else error

    async def drained(self) -> None:
        """Wait until the peer's device has everything that was written, or until the end.

        Cancellation: has no effect on the stream.
        """
        drained = Once(self.loop)
        if self.notify_drained(drained.set):
            await drained.wait()

    def notify_drained(self, callback: Callable[[], object], /) -> bool:
        """As `Channel.notify_drained`."""
        if self.path.is_drained or self.teardown.has_ended or self._error is not None:
            return False
        self.path.on_drained = callback
        return True

    def grow(self, outwards: bool) -> None:
        """Give the path a larger ring, which it asks for because its own was full several times: as
        TCP's buffers, rings grow with the traffic. Without memory for it, it keeps its own.

        Args:
            outwards: that for sending, and not that which the peer writes to.
        """
        memory = bytearray(GROWN_BYTES)
        try:
            region = register(self._endpoint, memory, None if outwards else LENT)
        except RdmaError as error:
            logger.debug("%s keeps its small buffer: %s", self.name, error)
            return
        self.path.grow(outwards, region, memory, region.lkey if outwards else region.rkey)

    # -- the end, by the path: the engine may call one of these twice ------------------------------

    def violated(self, text: str) -> None:
        """End the stream: the peer violated the protocol."""
        self.fail(StreamProtocolError(f"{self.name}: {text}"))

    def wrong_arrival(self, completion: WorkCompletion) -> None:
        """End the stream: the peer sent a message of another kind."""
        # The bytes of a SEND are in the receive's memory, and not in the ring.
        kind, length = completion.operation.name, completion.byte_len
        if not self.path.uses_words:
            self.violated(f"the peer sent a message that is no WRITE with immediate data ({kind})")
        elif completion.opcode == _RECEIVED_WORD:
            self.violated(f"the peer sent a word of {length} bytes, and rsockets has {WORD_BYTES}")
        else:
            self.violated(f"the peer sent a message that is no SEND of a word ({kind})")

    def refused(self, post: tuple[int, bool]) -> None:
        """End the stream: a request could not be posted.

        Args:
            post: the errno (0: the connection is not usable here), and whether it was a receive.
        """
        error, is_receive = post
        try:
            if error:
                self._endpoint.post_refused(error, is_receive)
            self._endpoint.require_usable()
            raise DisconnectedError(f"{self.name} cannot post requests")
        except RdmaError as found:
            self.fail(found)

    def fail(self, error: Exception) -> None:
        """End the stream and its connection with this error."""
        self.path.failed = True
        super().fail(error)
        self.path.end()

    def withdraw(self, connection: Connection) -> None:
        """End a stream whose connect was cancelled. Once the peer has accepted it, it gets an end
        of the data, as over TCP: there is no data, so none can be missing. See `limit_close`."""
        self._end_connect()
        if not self.teardown.has_ended:
            self.limit_close(connection)

    def _end_connect(self) -> None:
        handshake = self._endpoint.handshake
        if handshake.state is ConnectionState.CONNECTING:
            handshake.call_at_change(self._end_connect)
            return
        if handshake.state is ConnectionState.ESTABLISHED and handshake.event is not None:
            with suppress(StreamProtocolError):
                self.start(handshake.event.private_data)
                self.begin(is_first=True)
                self.path.close_write(True)
                if self.notify_drained(self.teardown.close):
                    return
        self.teardown.close()

    def _let_go(self) -> None:
        """End the path's references to this object and to the program's, once every request has
        completed: its memory is large, and is freed without a garbage collection."""
        path = self.path
        path.owner = path.on_readable = path.on_writable = path.on_drained = None
        path.is_cancelled = None
