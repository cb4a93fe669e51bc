"""Byte streams over RDMA: anyio's ByteStream, on rsockets' protocol."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from socket import AF_INET, AF_INET6, AddressFamily
from typing import Any, TypeVar

import anyio
from anyio.abc import ByteStream, SocketAttribute
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

from aiordma._base.arguments import Buffer, whole_number
from aiordma._base.errors import BusyError, ClosedError, DisconnectedError
from aiordma._base.socket_address import SocketAddress
from aiordma._connection.connection import Connection
from aiordma._loop.threads import Once
from aiordma.streams.path import awaits_path
from aiordma.streams.rsocket import Rsocket
from aiordma.verbs.buffers import flat_view
from aiordma.verbs.memory import MemoryRegion, MemorySlice, retire_or_log

__all__ = ("Stream", "family_of")

COPY_BYTES = 4 * 1024 * 1024
"""Data of more bytes is registered and written from where it is. Below that, a copy is cheaper."""
PAUSE = 16

_Data = TypeVar("_Data", memoryview, MemorySlice)


class Stream(ByteStream):
    """A byte stream: `connect_stream` and `StreamListener` make them.

    It is an anyio ByteStream. Bytes arrive in order and without gaps, and the peer's pace holds the
    sender back. The peer can be any program that uses rsockets, for example a C program started
    with librspreload.

    Used with `async with`, it is closed at the block's end. Receiving and sending are independent:
    one task may do each.
    """

    def __init__(self, connection: Connection, rsocket: Rsocket) -> None:
        self._connection = connection
        self._rsocket = rsocket
        self._path = rsocket.path
        self._eof_sent = False
        self._is_cut_off = False  # a cancelled send had posted a part of its data
        self._closing: Once | None = None  # the close that waits has ended
        self._path.is_cancelled = _is_cancelled
        rsocket.teardown.above = self

    def __repr__(self) -> str:
        return f"<Stream over {self._connection!r}>"

    @property
    def connection(self) -> Connection:
        """The connection below, for its attributes (`query`, `cause`, ...). Do not post on it."""
        return self._connection

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """anyio's typed attributes: those of sockets (without `raw_socket`), and ConnectionInfo."""
        local, peer = self._connection.local_address, self._connection.peer_address
        return {
            **self._connection.extra_attributes,
            SocketAttribute.family: lambda: family_of(local),
            SocketAttribute.local_address: lambda: local,
            SocketAttribute.remote_address: lambda: peer,
            SocketAttribute.local_port: lambda: _port(local),
            SocketAttribute.remote_port: lambda: _port(peer),
        }

    @property
    def is_readable(self) -> bool:
        """Whether `receive` would return or raise at once: there is data, or the end."""
        path = self._path
        self._rsocket.poll()  # what has arrived since the event loop's last turn counts, too
        return path.readable > 0 or path.at_eof or self._rsocket.write_error() is not None

    # -- receiving --------------------------------------------------------------------------------

    @awaits_path("receive")
    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Return bytes that have arrived, 1 to `max_bytes`.

        Args:
            max_bytes: the largest number of bytes to return.

        Raises:
            anyio.EndOfStream: the peer has ended its data, and everything was received.
            BusyError: another task is receiving.
            DisconnectedError, WorkCompletionError, StreamProtocolError, ...: the connection ended
                without an end of the data; the error is its cause.
            ClosedError: this stream was closed.
            TypeError, ValueError: `max_bytes` is not a positive number.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: no byte is lost; the next call returns it.
        """
        max_bytes = whole_number(max_bytes, "max_bytes", 1, 1 << 62, "receive")
        await self._until_readable()
        return self._path.read(max_bytes)

    @awaits_path("receive_into")
    async def receive_into(self, buffer: Buffer) -> int:
        """Copy bytes that have arrived into a buffer, and return their number, at least 1.

        Args:
            buffer: a writable buffer, not empty.

        Raises:
            as `Stream.receive`.
            TypeError, ValueError: the buffer is read-only, not contiguous, or empty.

        Cancellation: as `Stream.receive`.
        """
        view = flat_view(buffer, "receive_into(): buffer")
        if view.readonly:
            raise TypeError("receive_into(): the buffer is read-only")
        if not len(view):
            raise ValueError("receive_into(): the buffer is empty")
        await self._until_readable()
        return self._path.read_into(view)

    def _busy(self, doing: str) -> BusyError:
        return BusyError(f"another task is already {doing} {self!r}: one task at a time")

    async def _until_readable(self) -> None:
        self._rsocket.require_here()
        path = self._path
        if path.receiving:
            raise self._busy("receiving from")
        path.receiving = True
        try:
            self._require_open()
            if path.readable:
                await self._pause()
            while not path.readable:
                if path.at_eof:
                    await checkpoint()
                    raise anyio.EndOfStream(f"{self._rsocket.name}: the peer has ended its data")
                error = self._rsocket.read_error()
                try:
                    if error is not None:
                        await checkpoint()
                        raise error
                finally:
                    del error  # its traceback holds this frame, and so the callers' buffers
                waiter = self._rsocket.loop.waiter()
                path.on_readable = waiter.wake
                await waiter.wait()
                self._require_open()
        finally:
            path.on_readable = None
            path.receiving = False

    # -- sending ----------------------------------------------------------------------------------

    @awaits_path("send")
    async def send(self, item: Buffer | MemorySlice | MemoryRegion) -> None:
        """Send bytes. The call returns when all are on the way, or, for data that is written from
        where it is, when the peer's device has it.

        Args:
            item: any object with a buffer, of any length, or registered memory. Up to 4 MiB are
                copied. Longer data is registered for the time of the call, and is not copied, as
                registered memory of any length.

        Raises:
            BusyError: another task is sending.
            DisconnectedError: the peer has closed the stream.
            ClosedError: this stream was closed, or `send_eof` was called.
            DisconnectedError, WorkCompletionError, StreamProtocolError, ...: the connection has
                ended; the error is its cause.
            TypeError, ValueError: the object has no buffer, or is not contiguous.
            VerbsCallError: the memory could not be registered; the message names the limit.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: a part of the data, from its beginning, may have been sent. Memory that is not
        copied is the device's until it has written it: `region.close()` raises BusyError before.
        """
        with self._sending():
            await self._pause()
            self._require_writable()
            if isinstance(item, MemorySlice | MemoryRegion):
                await self._send_registered(item[:])
                return
            view = flat_view(item, "send(): item")
            if len(view) <= COPY_BYTES:
                await self._post(self._rsocket.write, view)
                return
            region = await self._connection.register_in_thread(view)
            try:
                await self._send_registered(region[:])
            finally:
                retire_or_log(region)

    async def wait_writable(self) -> None:
        """Wait until a `send` of one byte would not wait.

        Raises: as `Stream.send`.

        Cancellation: has no effect on the stream.
        """
        with self._sending():
            await self._pause()
            await self._until_writable()

    @contextmanager
    def _sending(self) -> Iterator[None]:
        """Be the one task that sends, on a stream that can send."""
        self._rsocket.require_here()
        if self._path.sending:
            raise self._busy("sending to")
        self._path.sending = True
        try:
            self._require_writable()
            yield
        finally:
            self._path.sending = False

    async def _post(self, write: Callable[[_Data], int], data: _Data) -> None:
        """Post data at the peer's pace."""
        done = write(data)
        try:
            while done < len(data):
                await self._until_writable()
                done += write(data[done:])
        finally:
            if done < len(data):
                self._is_cut_off |= done > 0
                self._path.lacks_send = True
            elif done:
                self._path.lacks_send = False

    async def _send_registered(self, memory: MemorySlice) -> None:
        await self._post(self._rsocket.write_registered, memory)
        # Only for data: grants may be in flight without end. What the device of a peer has is sent,
        # even if the peer has closed the stream.
        while self._path.in_flight:
            await self._change()
        if self._path.lost_data:
            self._require_writable()

    async def _until_writable(self) -> None:
        while not self._path.can_write:
            self._require_writable()
            await self._change()
            self._require_writable()

    async def _change(self) -> None:
        """Wait until there may be room to send, or fewer messages are in flight, or the end."""
        waiter = self._rsocket.loop.waiter()
        self._path.on_writable = waiter.wake
        try:
            await waiter.wait()
        finally:
            self._path.on_writable = None
        self._require_open()

    async def send_eof(self) -> None:
        """End the data of this side. The peer receives the end after everything that was sent. This
        side can still receive. If the peer has ended both directions, nothing is sent. Idempotent.

        Raises:
            BusyError: another task is sending.
            ClosedError: this stream was closed.
            DisconnectedError, WorkCompletionError, StreamProtocolError, ...: the connection has
                ended; the error is its cause.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: if it takes effect, nothing was sent.
        """
        self._rsocket.require_here()
        self._require_open()
        if self._path.sending:
            raise self._busy("sending to")
        await checkpoint()
        if self._eof_sent:
            return
        if not self._path.at_eof:
            self._require_unbroken()
        self._eof_sent = True
        self._path.close_write(False)

    # -- the end ----------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """End both directions, wait at most `close_timeout` seconds until the peer's device has
        everything that was sent, and release everything. Data that was not received is dropped.
        Idempotent.

        Raises:
            EventLoopError: called outside of its event loop.

        Cancellation: nothing more is waited for, and the peer may miss the end of the data. The
        stream is closed when the call returns.
        """
        try:
            if self._rsocket.teardown.is_inherited:
                return
            self._rsocket.require_here()
            if self._closing is not None:
                await self._closing.wait()
                return
            self._closing = self._end_data()
            try:
                with anyio.move_on_after(self._rsocket.close_timeout):
                    await self._rsocket.drained()
            finally:
                self._closing.set()
        finally:
            await self._connection.aclose()

    @property
    def _is_ending(self) -> bool:
        return self._closing is not None

    def _end_soon(self) -> None:
        """End both directions in the background, because the event loop ends. If a send was cut
        off, or the last one posted nothing, the data has no end, and the connection is closed at
        once. (The end of the loop has cancelled the task that sends before.)"""
        path, teardown = self._path, self._rsocket.teardown
        is_over = self._closing or teardown.has_ended or teardown.is_closing
        if is_over or path.sending or path.lacks_send or self._is_cut_off:
            teardown.close()
            return
        self._closing = self._end_data()
        teardown.on_ended.append(self._closing.set)
        self._rsocket.close_once_drained(self._connection)

    def _end_data(self) -> Once:
        """End both directions. Return what is to be set at the end."""
        self._path.closed = True
        self._path.wake()
        self._path.close_write(True)
        return Once(self._rsocket.loop)

    # -- checks -----------------------------------------------------------------------------------

    async def _pause(self) -> None:
        """Let other tasks run before a call that does not wait: on trio each time, which is trio's
        rule; on asyncio, where it costs as much as a short message, each 16th time. A cancelled
        scope is noticed each time, as anyio promises."""
        path = self._path
        path.at_once += 1
        if self._rsocket.loop.asyncio_loop is None or path.at_once >= PAUSE:
            path.at_once = 0
            await checkpoint()
        else:
            await checkpoint_if_cancelled()

    def _require_open(self) -> None:
        if self._path.closed:
            raise ClosedError(f"{self._rsocket.name}: this stream is closed")

    def _require_writable(self) -> None:
        self._require_open()
        if self._eof_sent:
            raise ClosedError(
                f"{self._rsocket.name}: this stream cannot send any more: send_eof() was called"
            )
        self._require_unbroken()

    def _require_unbroken(self) -> None:
        error = self._rsocket.write_error()
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame, and so the callers' buffers


def _is_cancelled() -> bool:
    return anyio.current_effective_deadline() == -inf


def family_of(address: SocketAddress | None) -> AddressFamily:
    """Return the family of a local address."""
    return AF_INET6 if address is not None and ":" in address[0] else AF_INET


def _port(address: SocketAddress | None) -> int:
    if address is None:
        raise DisconnectedError("the connection has no address any more")
    return address[1]
