"""Byte streams over RDMA: anyio's ByteStream, on rsockets' protocol."""

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from socket import AF_INET, AF_INET6
from threading import get_ident
from typing import Any

import anyio
from anyio.abc import ByteStream, SocketAttribute
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

from aiordma._base.arguments import Buffer, whole_number
from aiordma._base.errors import ClosedError, DisconnectedError
from aiordma._base.socket_address import SocketAddress
from aiordma._connection.connection import Connection
from aiordma._loop.event_loop import Waiter
from aiordma.streams.rsocket import Rsocket
from aiordma.verbs.memory import MemoryRegion, MemorySlice, flat_view

__all__ = ("CLOSE_SECONDS", "Stream")

CLOSE_SECONDS = 5.0
"""How long `aclose` waits until the peer's device has everything that was sent."""
COPY_BYTES = 256 * 1024
"""Data of more bytes is registered and written from where it is. Below that, a copy is cheaper."""
PAUSE = 16


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
        self._endpoint = connection._endpoint
        self._reader: Waiter | None = None
        self._writer: Waiter | None = None
        self._is_receiving = self._is_sending = False
        self._eof_sent = False
        self._at_once = 0
        self._is_closed = False
        # Weak, so that a stream that was forgotten is collected, and says so.
        rsocket.changed = partial(_wake, weakref.ref(self))

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
            SocketAttribute.family: lambda: AF_INET6 if ":" in _host(local) else AF_INET,
            SocketAttribute.local_address: lambda: local,
            SocketAttribute.remote_address: lambda: peer,
            SocketAttribute.local_port: lambda: _port(local),
            SocketAttribute.remote_port: lambda: _port(peer),
        }

    @property
    def is_readable(self) -> bool:
        """Whether `receive` would return or raise at once: there is data, or the end."""
        rsocket = self._rsocket
        return rsocket.readable > 0 or rsocket.at_eof or rsocket.write_error() is not None

    # -- receiving --------------------------------------------------------------------------------

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Return bytes that have arrived, 1 to `max_bytes`.

        Raises:
            anyio.EndOfStream: the peer has ended its data, and everything was received.
            anyio.BusyResourceError: another task is receiving.
            DisconnectedError, WorkCompletionError, StreamProtocolError, ...: the connection ended
                without an end of the data; the error is its cause.
            ClosedError: this stream was closed.
            TypeError, ValueError: `max_bytes` is not a positive number.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: no byte is lost; the next call returns it.
        """
        max_bytes = whole_number(max_bytes, "max_bytes", 1, 1 << 62, "receive")
        await self._until_readable()
        return self._rsocket.read(max_bytes)

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
        return self._rsocket.read_into(view)

    async def _until_readable(self) -> None:
        self._require_here()
        if self._is_receiving:
            raise anyio.BusyResourceError("receiving from")
        rsocket, self._is_receiving = self._rsocket, True
        try:
            self._require_open()
            if rsocket.readable:
                await self._pause()
            while not rsocket.readable:
                if rsocket.at_eof:
                    await checkpoint()
                    raise anyio.EndOfStream
                error = rsocket.read_error()
                if error is not None:
                    await checkpoint()
                    raise error
                self._reader = self._endpoint.loop.waiter()
                await self._reader.wait()
                self._require_open()
        finally:
            self._reader = None
            self._is_receiving = False

    # -- sending ----------------------------------------------------------------------------------

    async def send(self, item: Buffer | MemorySlice | MemoryRegion) -> None:
        """Send bytes. The call returns when all are on the way, or, for data that is written from
        where it is, when the peer's device has it.

        Args:
            item: any object with a buffer, of any length, or registered memory. Up to 256 KiB are
                copied. Longer data is registered for the time of the call, and is not copied, as
                registered memory of any length.

        Raises:
            anyio.BusyResourceError: another task is sending.
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
        self._require_here()
        if self._is_sending:
            raise anyio.BusyResourceError("sending to")
        self._is_sending = True
        try:
            self._require_writable()
            await self._pause()
            self._require_writable()
            if isinstance(item, MemorySlice | MemoryRegion):
                await self._send_registered(item[:])
                return
            view = flat_view(item, "send(): item")
            if len(view) <= COPY_BYTES:
                await self._send_copy(view)
                return
            region = await self._connection.register_in_thread(view)
            try:
                await self._send_registered(region[:])
            finally:
                region._retire()
        finally:
            self._writer = None
            self._is_sending = False

    async def wait_writable(self) -> None:
        """Wait until a `send` of one byte would not wait.

        Raises: as `Stream.send`.

        Cancellation: has no effect on the stream.
        """
        self._require_here()
        if self._is_sending:
            raise anyio.BusyResourceError("sending to")
        self._is_sending = True
        try:
            self._require_writable()
            await self._pause()
            await self._until_writable()
        finally:
            self._writer = None
            self._is_sending = False

    async def _send_copy(self, view: memoryview) -> None:
        done = self._rsocket.write(view)
        while done < len(view):
            await self._until_writable()
            done += self._rsocket.write(view[done:])

    async def _send_registered(self, memory: MemorySlice) -> None:
        done = self._rsocket.write_registered(memory)
        while done < len(memory):
            await self._until_writable()
            done += self._rsocket.write_registered(memory[done:])
        while self._rsocket.has_data_in_flight:  # grants may be in flight without end
            await self._until_changed()

    async def _until_writable(self) -> None:
        while not self._rsocket.can_write:
            await self._until_changed()

    async def _until_changed(self) -> None:
        self._require_writable()
        self._writer = self._endpoint.loop.waiter()
        await self._writer.wait()
        self._require_writable()

    async def send_eof(self) -> None:
        """End the data of this side. The peer receives the end after everything that was sent. This
        side can still receive. If the peer has ended both directions, nothing is sent. Idempotent.

        Raises:
            anyio.BusyResourceError: another task is sending.
            ClosedError: this stream was closed.
            DisconnectedError, WorkCompletionError, StreamProtocolError, ...: the connection has
                ended; the error is its cause.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: if it takes effect, nothing was sent.
        """
        self._require_here()
        self._require_open()
        if self._is_sending:
            raise anyio.BusyResourceError("sending to")
        await checkpoint()
        if self._eof_sent:
            return
        error = self._rsocket.write_error()
        if error is not None and not self._rsocket.at_eof:
            raise error
        self._eof_sent = True
        self._rsocket.close_write()

    # -- the end ----------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """End both directions, wait at most 5 s until the peer's device has everything that was
        sent, and release everything. Data that was not received is dropped. Idempotent.

        Raises:
            EventLoopError: called outside of its event loop.

        Cancellation: nothing more is waited for, and the peer may miss the end of the data. The
        stream is closed when the call returns.
        """
        if self._is_closed:
            await self._connection.aclose()
            await checkpoint()
            return
        try:
            if not self._endpoint.is_inherited:
                self._require_here()
                self._is_closed = True
                self._wake()
                self._rsocket.close_write(both=True)
                with anyio.move_on_after(CLOSE_SECONDS):
                    await self._rsocket.drained()
        finally:
            await self._connection.aclose()

    # -- checks -----------------------------------------------------------------------------------

    async def _pause(self) -> None:
        """Let other tasks run before a call that does not wait: on trio each time, which is trio's
        rule; on asyncio, where it costs as much as a short message, each 16th time."""
        self._at_once += 1
        if self._endpoint.loop.asyncio_loop is None or not self._at_once % PAUSE:
            await checkpoint()
        else:
            await checkpoint_if_cancelled()

    def _wake(self) -> None:
        for waiter in (self._reader, self._writer):
            if waiter is not None:
                waiter.wake()

    def _require_here(self) -> None:
        self._endpoint.require_same_process()
        if self._endpoint.loop.thread != get_ident():
            self._endpoint.require_own_loop()

    def _require_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this stream is closed")

    def _require_writable(self) -> None:
        self._require_open()
        if self._eof_sent:
            raise ClosedError("this stream cannot send any more: send_eof() was called")
        error = self._rsocket.write_error()
        if error is not None:
            raise error


def _wake(reference: "weakref.ref[Stream]") -> None:
    stream = reference()
    if stream is not None:
        stream._wake()


def _host(address: SocketAddress | None) -> str:
    return "" if address is None else address[0]


def _port(address: SocketAddress | None) -> int:
    if address is None:
        raise DisconnectedError("the connection has no address any more")
    return address[1]
