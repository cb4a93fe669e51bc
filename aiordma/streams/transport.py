"""asyncio's transport over a stream, for protocols that know nothing of RDMA."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import copy_context
from functools import partial
from typing import Any, Protocol, cast
from weakref import WeakMethod

from aiordma._base.arguments import Buffer
from aiordma._base.errors import ClosedError, RdmaError
from aiordma._base.origin import warn_unclosed, with_origin
from aiordma._connection.connection import Connection
from aiordma._loop.private import FALLBACK, FlowControlMixin, SSLProtocol, secured_transport
from aiordma.streams.ending import Drains, close_once_drained
from aiordma.streams.sockets import Readiness, StreamSocket, socket_name
from aiordma.verbs.buffers import flat_view

__all__ = ("StreamTransport", "TransportChannel", "TransportPath")

logger: logging.Logger = logging.getLogger("aiordma")

READ_BYTES = 256 * 1024
"""The most bytes of one data_received."""
READS_AT_ONCE = 16
"""After so many calls of the protocol, other callbacks run."""
UPGRADE_BYTES = 64 * 1024
"""The most bytes of one data_received, and of one turn of the loop, once the protocol was replaced,
as start_tls does. What comes with the handshake's end still goes to the old transport's reader. If
that is more than the reader's limit (twice 64 KiB), it pauses the old transport, and asyncio from
3.13 on resumes the new one only."""
JOIN_BYTES = 64 * 1024
"""Writes of the backlog are joined up to so many bytes, which is the most of one message."""
_WARN_AFTER = 5
"""Writes to a lost connection are logged after so many, as asyncio does."""

Release = Callable[["StreamTransport"], None]


class TransportPath(Protocol):
    """What moves a transport's bytes; a StreamPath, for instance. See there."""

    on_readable: Callable[[], object] | None
    on_writable: Callable[[], object] | None

    @property
    def readable(self) -> int:
        """How many bytes can be read now."""

    @property
    def at_eof(self) -> bool:
        """Whether the peer sends no more data; there may still be data to read."""

    @property
    def can_write(self) -> bool:
        """Whether a write can post anything now."""

    def read(self, limit: int, /) -> bytes:
        """Return bytes that have arrived, at most `limit`; b"" if there are none."""

    def read_into(self, buffer: memoryview, /) -> int:
        """Copy bytes that have arrived into the buffer; returns their number."""

    def close_write(self, both: bool, /) -> None:
        """End the data, or, with `both`, both directions."""


class TransportChannel(Drains, Protocol):
    """A path with its errors and its end; an Rsocket, for instance. See there."""

    @property
    def path(self) -> TransportPath:
        """Moves the bytes."""

    @property
    def buffer_sizes(self) -> tuple[int, int]:
        """The bytes that the peer can send before this side reads them, and those that this side
        can send before the peer's device has them."""

    def read_error(self) -> Exception | None:
        """Why nothing more can be read, once everything was read, or None."""

    def write_error(self) -> Exception | None:
        """Why nothing can be written, or None."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Copy and post as much as there is room for; returns the number of bytes."""


class StreamTransport(FlowControlMixin, asyncio.Transport):
    """A connected stream as an asyncio.Transport. `create_connection` and `create_server` make it.

    It behaves as asyncio's TCP transport does: flow control with `pause_writing`, `pause_reading`,
    `write_eof`, BufferedProtocol, `abort`, `loop.sendfile` by its fallback. `get_extra_info` knows
    "peername", "sockname", "connection" (the aiordma.Connection below), and "socket": a
    StreamSocket, which is none, but has the addresses.
    """

    # asyncio's start_tls and sendfile accept transports that say so.
    _start_tls_compatible = True
    _sendfile_compatible = FALLBACK

    # FlowControlMixin's, which typeshed leaves out.
    _loop: asyncio.AbstractEventLoop
    _maybe_pause_protocol: Callable[[], None]
    _maybe_resume_protocol: Callable[[], None]
    _extra: dict[str, Any]

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: Connection,
        channel: TransportChannel,
        protocol: asyncio.BaseProtocol,
        on_lost: Release = lambda _transport: None,
        waiter: "asyncio.Future[None] | None" = None,
    ) -> None:
        local, peer = connection.local_address, connection.peer_address
        self._below = local and StreamSocket(
            local, peer, _weakly(self._descriptor), channel.buffer_sizes
        )
        known = {
            "peername": peer and socket_name(peer),
            "sockname": local and socket_name(local),
            "socket": self._below,
            "connection": connection,
        }
        super().__init__(known, loop)
        self._readiness: Readiness | None = None  # for programs that poll
        self._connection = connection
        self._channel = channel
        self._path: TransportPath = channel.path
        self._on_lost = on_lost
        self._backlog: deque[bytearray | memoryview] = deque()
        self._backlog_bytes = 0
        # Data is being posted, in the middle of which a finalizer of the program can run.
        self._writing = False
        self._paused = False
        self._closing = False
        self._lost = False  # connection_lost was called, or will be
        self._losing = False  # its call is scheduled
        self._is_cut = False  # the peer gets no end of the data
        self._end_timer: asyncio.TimerHandle | None = None
        self._writes_after_loss = 0
        self._eof_written = self._eof_delivered = False
        self._scheduled = False
        self._failed_call = ""  # the method of the protocol that has raised an error
        self._context = copy_context()
        self._ends_soon = False  # the connection is closed within `close_timeout`
        teardown = connection._endpoint.teardown
        teardown.above, teardown.is_reported = self, False
        self.set_protocol(protocol)
        self._most_bytes, self._most_reads = READ_BYTES, READS_AT_ONCE
        # Separate callbacks, as in asyncio: the loop reports an error of connection_made, and the
        # transport goes on.
        loop.call_soon(protocol.connection_made, self)
        loop.call_soon(self._begin, waiter)

    def _begin(self, waiter: "asyncio.Future[None] | None") -> None:
        if not self._lost:
            self._path.on_readable = self._schedule
            self._watch_room()
            self._schedule()
        if waiter is not None and not waiter.cancelled():
            waiter.set_result(None)

    def __repr__(self) -> str:
        state = "closed" if self._lost else "closing" if self._closing else "open"
        return f"<StreamTransport over {self._connection!r}: {state}>"

    # -- the protocol -----------------------------------------------------------------------------

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """As asyncio.BaseTransport.set_protocol.

        Args:
            protocol: the new protocol.

        Raises: nothing.
        """
        self._protocol = protocol
        self._is_buffered = isinstance(protocol, asyncio.BufferedProtocol)
        self._most_bytes, self._most_reads = UPGRADE_BYTES, 1

    def get_protocol(self) -> asyncio.BaseProtocol:
        """As asyncio.BaseTransport.get_protocol.

        Raises: nothing.
        """
        return self._protocol

    # -- events -----------------------------------------------------------------------------------

    def _schedule(self) -> None:
        # A completion can be delivered inside a task or a protocol's call: asyncio's protocols
        # expect to be called from the loop.
        if not self._scheduled and not self._has_loop_ended():
            self._scheduled = True
            # A SIGINT is handled when the protocol has what was read. The protocol is called in
            # the context in which the transport was made, as by asyncio: the completion may be
            # delivered in any other.
            peer = self._extra["peername"]
            self._loop.call_soon(self._process, peer, context=self._context)

    def _watch_room(self) -> None:
        """Set the callback for free space in the ring if there is something to be written, else
        clear it."""
        path = self._path
        if not self._backlog or path.on_readable is None:
            path.on_writable = None
            return
        path.on_writable = path.on_readable
        if path.can_write:  # an object's end, which can run anywhere, may have made room
            self._schedule()

    def _process(self, _peer: object) -> None:
        """Write and read. asyncio's debug mode names this method, and the peer, if the protocol
        takes long."""
        self._scheduled = False
        if self._lost:
            return
        try:
            if self._backlog:
                self._flush()
            self._end_if_posted()
            self._deliver()
            self._end_if_stuck()
            self._show_readiness()
        except (SystemExit, KeyboardInterrupt):
            self._failed_call = ""
            self._schedule()  # the loop can run again: what is left is delivered then
            raise
        except BaseException as error:
            self._fatal(error)

    def _descriptor(self) -> int:
        if self._protocol is None:
            return -1
        is_new = self._readiness is None
        if self._readiness is None:
            self._readiness = Readiness()
        # What has arrived since the loop's last turn counts, too, as in the kernel's socket:
        # httpcore asks before it uses an idle connection, and the program may have computed for
        # long.
        if self._connection._endpoint.poll() or is_new:
            self._show_readiness()
        return self._readiness.descriptor

    def _show_readiness(self) -> None:
        if self._readiness is not None:
            path = self._path
            has_ended = path.at_eof or self._lost or self._channel.write_error() is not None
            self._readiness.show(has_ended or path.readable > 0)

    def _deliver(self) -> None:
        path = self._path
        for _ in range(self._most_reads):
            if self._paused or self._closing or not path.readable:
                break
            if self._is_buffered:
                self._fill_buffer(cast(asyncio.BufferedProtocol, self._protocol))
            else:
                data = path.read(self._most_bytes)
                try:
                    cast(asyncio.Protocol, self._protocol).data_received(data)
                except BaseException:
                    self._failed_call = "data_received"
                    raise
                del data
        if self._paused or self._closing:
            return
        if path.readable:
            self._schedule()
        elif path.at_eof:
            self._deliver_eof()
        else:
            error = self._channel.read_error()
            if error is not None:
                self._force_close(error)

    def _fill_buffer(self, protocol: asyncio.BufferedProtocol) -> None:
        # No view of the buffer is left when buffer_updated runs: it may resize the buffer.
        try:
            view = flat_view(protocol.get_buffer(-1), "get_buffer()")
            if not len(view):
                raise RuntimeError("get_buffer() returned an empty buffer")
        except BaseException:
            self._failed_call = "get_buffer"
            raise
        size = self._path.read_into(view[: self._most_bytes])
        del view
        try:
            protocol.buffer_updated(size)
        except BaseException:
            self._failed_call = "buffer_updated"
            raise

    def _deliver_eof(self) -> None:
        if self._eof_delivered:
            return
        self._eof_delivered = True
        protocol = cast(asyncio.Protocol, self._protocol)
        try:
            stays_open = protocol.eof_received()
        except BaseException:
            self._failed_call = "eof_received"
            raise
        if not stays_open:
            self.close()

    # -- reading ----------------------------------------------------------------------------------

    def is_reading(self) -> bool:
        """As asyncio.ReadTransport.is_reading.

        Raises: nothing.
        """
        return not self._paused and not self._closing

    def pause_reading(self) -> None:
        """As asyncio.ReadTransport.pause_reading. The peer is held back once the ring is full.

        Raises: nothing.
        """
        if not self._closing:
            self._paused = True

    def resume_reading(self) -> None:
        """As asyncio.ReadTransport.resume_reading.

        Raises: nothing.
        """
        if not self._closing and self._paused:
            self._paused = False
            self._schedule()

    # -- writing ----------------------------------------------------------------------------------

    def write(self, data: Buffer) -> None:
        """As asyncio.WriteTransport.write: returns at once.

        Args:
            data: bytes, a bytearray or a memoryview; it is copied.

        Raises:
            TypeError: it is something else, as of asyncio's transports.
            RuntimeError: `write_eof` was called.
            ForkError: called in a forked child.
        """
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise TypeError(
                "data argument must be a bytes-like object, not " + repr(type(data).__name__)
            )
        if self._eof_written:
            raise RuntimeError("Cannot call write() after write_eof()")
        self._connection._endpoint.require_same_process()
        if self._lost or (self._closing and self._channel.write_error() is not None):
            if self._writes_after_loss >= _WARN_AFTER:
                logger.warning("a stream that has ended is written to")
            self._writes_after_loss += 1
            return
        view = data if type(data) is bytes else flat_view(data, "write(): data")
        if self._backlog or self._writing:
            self._keep(view)
        else:
            self._post(view)
        del view  # pause_writing may resize the program's buffer
        if self._backlog:
            self._watch_room()
            self._maybe_pause_protocol()
            if self._channel.write_error() is not None:
                self._schedule()

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        """As asyncio.WriteTransport.writelines: one `write` of all.

        Args:
            list_of_data: the buffers, in order.

        Raises: as `StreamTransport.write`.
        """
        self.write(b"".join(list_of_data))

    def _post(self, view: bytes | memoryview) -> None:
        """Post what there is room for, and add the rest to the backlog, in front of what a
        finalizer has written meanwhile."""
        self._writing = True
        try:
            done = self._write_now(view)
            left = len(view) - done
            if left:
                entry = _entry(view, done)
                if not self._lost:  # a finalizer may have aborted
                    self._backlog_bytes += left
                    self._backlog.appendleft(entry)
        finally:
            self._writing = False

    def _write_now(self, view: bytes | memoryview) -> int:
        try:
            return self._channel.write(view)
        except RdmaError:
            self._schedule()  # the error is delivered from the loop
            return 0

    def _keep(self, data: bytes | memoryview) -> None:
        """Add a copy to the backlog. Each entry is sent as a message of its own, so small writes
        are joined: a small entry is a bytearray until a flush has begun with it."""
        backlog, size = self._backlog, len(data)
        # A flush may be under way with the first entry.
        last = backlog[-1] if len(backlog) > self._writing else None
        is_small = isinstance(last, bytearray) and len(last) + size <= JOIN_BYTES
        entry = None if is_small else _entry(data)
        if self._lost or not size:  # a finalizer may have aborted
            return
        self._backlog_bytes += size
        if entry is None:
            cast(bytearray, last).extend(data)
        else:
            backlog.append(entry)

    def _post_backlog(self) -> None:
        self._writing = True
        try:
            while self._backlog:
                view = memoryview(self._backlog[0])
                done = self._write_now(view)
                left = view[done:]
                if self._lost:
                    break  # a finalizer has aborted, which drops the backlog
                self._backlog_bytes -= done
                if left:
                    self._backlog[0] = left
                    break
                self._backlog.popleft()
        finally:
            self._writing = False

    def _flush(self) -> None:
        self._post_backlog()
        if self._lost:
            return
        self._watch_room()
        if self._backlog and self._channel.write_error() is not None:
            return  # as of asyncio's, no resume_writing: see _end_if_stuck
        self._maybe_resume_protocol()  # it may write more, also while the transport is closing

    def _end_if_posted(self) -> None:
        """End the data, and the transport if it is closing, once everything is posted. (If it was
        aborted, what is left was dropped, and the data has no end.)"""
        if self._backlog or self._lost:
            return
        if self._writing:
            self._schedule()
            return
        if self._eof_written:
            self._path.close_write(False)
        if self._closing:
            self._finish()

    def _end_if_stuck(self) -> None:
        """End the connection with the error that keeps the backlog from being posted, once the
        protocol has what can be read, and the end of the data. (If it does not read, at once.)"""
        if self._lost or not self._backlog:
            return
        if self._paused or self._closing or self._eof_delivered:
            error = self._channel.write_error()
            if error is not None:
                self._force_close(error)

    def can_write_eof(self) -> bool:
        """True.

        Raises: nothing.
        """
        return True

    def write_eof(self) -> None:
        """As asyncio.WriteTransport.write_eof.

        Raises:
            ForkError: called in a forked child.
        """
        if self._closing or self._eof_written:
            return
        self._connection._endpoint.require_same_process()
        self._eof_written = True
        self._end_if_posted()

    # -- flow control -----------------------------------------------------------------------------

    def get_write_buffer_size(self) -> int:
        """As asyncio.WriteTransport.get_write_buffer_size: bytes that are not posted yet.

        Raises: nothing.
        """
        return self._backlog_bytes

    def _report(self, error: BaseException, message: str) -> None:
        self._loop.call_exception_handler(
            {
                "message": message,
                "exception": error,
                "transport": self,
                "protocol": self._protocol,
            }
        )

    # -- the end ----------------------------------------------------------------------------------

    def is_closing(self) -> bool:
        """As asyncio.BaseTransport.is_closing.

        Raises: nothing.
        """
        return self._closing

    def close(self) -> None:
        """As asyncio.BaseTransport.close: what was written is posted first, at the peer's pace and
        without a time limit. (`abort` ends that.) Then connection_lost is called as soon as the
        peer's device has everything, or after `close_timeout` seconds.

        Raises: nothing.
        """
        if self._closing:
            return
        self._note_closing()
        self._end_if_posted()

    def abort(self) -> None:
        """As asyncio.WriteTransport.abort: connection_lost is called in the loop's next turn.

        If some of what was written is not posted yet, it is dropped, and the peer gets an error. If
        not, the peer gets everything, and the end of the data: the connection closes in the
        background, once the peer's device has it, or after `close_timeout` seconds, at most 5.

        Raises: nothing.
        """
        self._force_close(None)

    def _has_loop_ended(self) -> bool:
        # A loop that was never closed has ended, too, when its tasks are collected.
        return self._connection._endpoint.loop.has_ended

    def _end_soon(self) -> None:
        """End as an `abort` does, because the event loop ends. With a backlog, which is dropped,
        the data has no end, and the connection is closed at once."""
        endpoint = self._connection._endpoint
        if not (self._lost or self._backlog or endpoint.teardown.is_closing):
            closed = ClosedError(f"this side closed {endpoint.name}")
            self._force_close(self._channel.read_error() or closed)
        if not self._ends_soon:
            endpoint.close()

    @property
    def _is_ending(self) -> bool:
        """Whether the connection is closed soon, also because the program has closed the TLS above,
        which closes this transport once the peer has answered."""
        if self._ends_soon:
            return True
        protocol: Any = self._protocol
        if not isinstance(protocol, SSLProtocol):
            return False
        secured = secured_transport(protocol)
        return secured is not None and secured.is_closing()

    def _note_closing(self) -> None:
        self._closing = True
        self._connection._endpoint.teardown.is_reported = True

    def _fatal(self, error: BaseException) -> None:
        """End the connection with an error, as asyncio's transports do: its protocol's
        connection_lost gets the error, of whatever class it is. Errors of the connection itself
        are not reported."""
        if not isinstance(error, (OSError, RdmaError)):
            call = self._failed_call
            failed = f"protocol.{call}() call failed." if call else "a step of a stream failed"
            self._report(error, f"Fatal error: {failed}")
        self._force_close(error)

    def _force_close(self, error: BaseException | None) -> None:
        if self._connection._endpoint.is_inherited:
            self._note_closing()
            return
        if self._lost:
            self._lose_soon(error)  # a close may be waiting
            return
        self._is_cut = self._writing or bool(self._backlog) or self._resets_on_close
        self._backlog.clear()
        self._backlog_bytes = 0
        self._lost = True
        self._note_closing()
        if not self._is_cut:
            self._end_data()
        self._lose_soon(error)

    @property
    def _resets_on_close(self) -> bool:
        """Whether the program wants the peer to get an error in place of an end of the data."""
        return self._below is not None and self._below._resets_on_close

    def _end_data(self) -> None:
        """End both directions. From here on, the connection is closed within `close_timeout`."""
        self._path.close_write(True)
        self._ends_soon = True

    def _finish(self) -> None:
        """Call connection_lost as soon as the peer's device has everything. By callbacks only: a
        task would be cancelled at the end of the loop, or by the program."""
        if self._lost or self._connection._endpoint.is_inherited:
            return
        self._lost = True
        if self._resets_on_close:
            self._is_cut = True
            self._lose_soon(None)
            return
        self._end_data()
        if not self._has_loop_ended():
            self._loop.call_soon(self._settle, context=self._context)

    def _settle(self) -> None:
        """The step after `_finish`, in the loop's next turn: a loop that polls has the answers of
        most peers' devices by then, and connection_lost is called when it is by asyncio's own
        transports."""
        if self._losing or self._has_loop_ended():
            return
        lose = partial(self._lose_soon, None)
        if self._channel.notify_drained(lose):
            give_up = self._give_up
            self._end_timer = self._loop.call_later(self._channel.close_timeout, give_up)
        else:
            self._losing = True
            self._lose(None)

    def _give_up(self) -> None:
        self._is_cut = True
        self._lose_soon(None)

    def _lose_soon(self, error: BaseException | None) -> None:
        if self._losing or self._has_loop_ended():
            return
        self._losing = True
        if self._end_timer is not None:
            self._end_timer.cancel()
        self._loop.call_soon(self._lose, error, context=self._context)

    def _lose(self, error: BaseException | None) -> None:
        self._path.on_readable = self._path.on_writable = None
        self._show_readiness()
        try:
            self._protocol.connection_lost(cast("Exception | None", error))
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as fault:
            self._loop.call_exception_handler(
                {
                    "message": "protocol.connection_lost() failed",
                    "exception": fault,
                    "transport": self,
                    "protocol": self._protocol,
                }
            )
        finally:
            # What refers to the protocol or to this object ends here, as in asyncio: the program's
            # objects are freed without a garbage collection.
            self._protocol = cast(Any, None)
            self._readiness = self._end_timer = None
            if self._is_cut:
                self._connection._endpoint.close()
            else:
                close_once_drained(self._connection, self._channel)
            self._on_lost(self)

    def __del__(self) -> None:
        if getattr(self, "_closing", True):
            return
        endpoint = self._connection._endpoint
        # If it is not left open, the loop's end has named the connection, or the program closed it.
        if not endpoint.is_inherited and endpoint.teardown.left_open():
            endpoint.teardown.is_reported = True  # one warning for both
            place = endpoint.teardown.origin
            warn_unclosed(f"unclosed transport {with_origin(self, place)}", self, place)


def _weakly(method: Callable[[], int]) -> Callable[[], int]:
    """Return a function that calls a method; -1: its object is gone."""
    reference = WeakMethod(method)

    def call() -> int:
        found = reference()
        return -1 if found is None else found()

    return call


def _entry(data: bytes | memoryview, start: int = 0) -> bytearray | memoryview:
    """Return data from `start` on as an entry of the backlog: a copy, unless it is of bytes, which
    nobody changes. More is joined to a small entry."""
    if len(data) - start < JOIN_BYTES:
        return bytearray(data[start:])
    return memoryview(data if type(data) is bytes else bytes(data))[start:]
