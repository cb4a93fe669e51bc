"""asyncio's transport over a stream, for protocols that know nothing of RDMA."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import copy_context
from enum import IntEnum
from functools import partial
from typing import Any
from weakref import WeakMethod

from aiordma._base.arguments import Buffer
from aiordma._base.errors import ClosedError, RdmaError
from aiordma._base.origin import warn_unclosed, with_origin
from aiordma._connection.connection import Connection
from aiordma._loop.private import (
    FALLBACK,
    FlowControlMixin,
    SSLProtocol,
    copies_at_once,
    secured_transport,
)
from aiordma._native import call_at_end
from aiordma.streams.channel import Channel, TransportPath
from aiordma.streams.sockets import Readiness, StreamSocket, socket_name
from aiordma.verbs.buffers import flat_view

__all__ = ("StreamTransport",)

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
"""Writes of the backlog are joined up to so many bytes."""
_WARN_AFTER = 5
"""Writes to a lost connection are logged after so many, as asyncio does."""

Release = Callable[["StreamTransport"], None]


class _State(IntEnum):
    """The state of a transport. It only increases.

    OPEN ── close ─▶ CLOSING ── all is posted ─▶ DRAINING ── the peer's device has it ─▶ LOST
      └─────────────────┴───────── abort, or an error ───────────┴────────────────────────┘
    """

    OPEN = 0
    CLOSING = 1
    """Reads nothing more. The backlog is being posted."""
    DRAINING = 2
    """Writes nothing more. What was posted is on its way."""
    LOST = 3
    """connection_lost was called, or is called in the loop's next turn."""


_OPEN, _CLOSING, _DRAINING, _LOST = _State


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
        channel: Channel,
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
        self._backlog: deque[bytes | bytearray | memoryview] = deque()
        self._backlog_bytes = 0
        self._paused = False
        self._state = _OPEN
        # The data has an end: once the peer's device has it, the connection closes. Else it closes
        # at once, and the peer gets an error.
        self._drains = False
        self._end_timer: asyncio.TimerHandle | None = None
        self._writes_after_loss = 0
        self._eof_written = self._eof_delivered = False
        self._scheduled = False
        self._context = copy_context()
        channel.teardown.above, channel.teardown.is_reported = self, False
        self.set_protocol(protocol)
        self._most_bytes, self._most_reads = READ_BYTES, READS_AT_ONCE
        # Separate callbacks, as in asyncio: the loop reports an error of connection_made, and the
        # transport goes on.
        loop.call_soon(protocol.connection_made, self)
        loop.call_soon(self._begin, waiter)

    def _begin(self, waiter: "asyncio.Future[None] | None") -> None:
        if self._state < _DRAINING:
            self._path.on_readable = self._notified
            self._watch_room()
            self._schedule()
        if waiter is not None and not waiter.cancelled():
            waiter.set_result(None)

    def __repr__(self) -> str:
        state = ("open", "closing", "closed", "closed")[self._state]
        return f"<StreamTransport over {self._connection!r}: {state}>"

    # -- the protocol -----------------------------------------------------------------------------

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """As asyncio.BaseTransport.set_protocol.

        Args:
            protocol: the new protocol.

        Raises: nothing.
        """
        self._protocol: Any = protocol
        self._is_buffered = isinstance(protocol, asyncio.BufferedProtocol)
        self._copies_at_once = copies_at_once(protocol)
        self._most_bytes, self._most_reads = UPGRADE_BYTES, 1

    def get_protocol(self) -> asyncio.BaseProtocol:
        """As asyncio.BaseTransport.get_protocol.

        Raises: nothing.
        """
        protocol: asyncio.BaseProtocol = self._protocol
        return protocol

    # -- events -----------------------------------------------------------------------------------

    def _schedule(self) -> None:
        # A completion can be delivered inside a task or a protocol's call: asyncio's protocols
        # expect to be called from the loop.
        if not self._scheduled:
            self._scheduled = True
            self._call_soon(self._process, self._extra["peername"])

    def _notified(self) -> None:
        """Process at the end of the drain, when no code of the program's runs, without another turn
        of the loop, or schedule it."""
        if not self._scheduled and call_at_end(partial(self._context.run, self._process, None)):
            self._scheduled = True
        else:
            self._schedule()

    def _call_soon(self, callback: Callable[[Any], None], argument: object) -> None:
        """Schedule a callback, unless the loop is closed. It runs in the context in which the
        transport was made, as in asyncio: a completion can be delivered in any other."""
        if not self._loop.is_closed():
            self._loop.call_soon(callback, argument, context=self._context)

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
        if self._state >= _DRAINING:
            return
        try:
            if self._backlog:
                self._flush()
            if self._eof_written or self._state is not _OPEN:
                self._end_if_posted()
            self._deliver()
            if self._backlog:
                self._end_if_stuck()
            if self._readiness is not None:
                self._show_readiness()
        except Exception as error:
            # Not of the protocol's code, but of this object's own (docs/fault-model.md).
            self._channel.teardown.keep_for(error)
            self._channel.fail(error)
            self._enter(_LOST, error)
        except BaseException:
            self._schedule()  # the loop can run again: what is left is delivered then
            raise

    def _call(self, name: str, *arguments: Any, check: Callable[[Any], Any] | None = None) -> Any:
        """Call a method of the protocol. If it raises an error, or `check` of its result does, end
        the connection, and return None."""
        try:
            found = getattr(self._protocol, name)(*arguments)
            return found if check is None else check(found)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            self._failed(name, error)
            return None

    def _failed(self, name: str, error: BaseException) -> None:
        """End the connection because a method of the protocol has failed, as asyncio's transports
        do: connection_lost gets the error, of whatever class it is, and errors of a connection are
        not reported."""
        if not isinstance(error, (OSError, RdmaError)):
            self._report(error, f"Fatal error: protocol.{name}() call failed.")
        self._enter(_LOST, error)

    def _descriptor(self) -> int:
        if self._protocol is None:
            return -1
        is_new = self._readiness is None
        if self._readiness is None:
            self._readiness = Readiness()
        # What has arrived since the loop's last turn counts, too, as in the kernel's socket:
        # httpcore asks before it uses an idle connection, and the program may have computed for
        # long.
        if self._channel.poll() or is_new:
            self._show_readiness()
        return self._readiness.descriptor

    def _show_readiness(self) -> None:
        if self._readiness is not None:
            path, is_over = self._path, self._state >= _DRAINING
            has_ended = path.at_eof or is_over or self._channel.write_error() is not None
            self._readiness.show(has_ended or path.readable > 0)

    def _deliver(self) -> None:
        path = self._path
        for _ in range(self._most_reads):
            if self._paused or self._state is not _OPEN:
                return
            if not path.readable:
                break
            if self._is_buffered:
                self._fill_buffer()
                continue
            data = None if self._copies_at_once else path.read(self._most_bytes)
            try:  # not by _call, which costs as much as a short data_received
                if data is None:
                    path.feed(self._protocol.data_received, self._most_bytes)
                else:
                    self._protocol.data_received(data)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as fault:
                self._failed("data_received", fault)
        else:
            if self._paused or self._state is not _OPEN:
                return
            if path.readable:
                self._schedule()
                return
        if path.at_eof:
            self._deliver_eof()
        else:
            error = self._channel.read_error()
            if error is not None:
                self._enter(_LOST, error)

    def _fill_buffer(self) -> None:
        # No view of the buffer is left when buffer_updated runs: it may resize the buffer.
        view = self._call("get_buffer", -1, check=_fillable)
        if view is None:
            return
        size = self._path.read_into(view[: self._most_bytes])
        del view
        self._call("buffer_updated", size)

    def _deliver_eof(self) -> None:
        if self._eof_delivered:
            return
        self._eof_delivered = True
        if not self._call("eof_received"):
            self.close()

    # -- reading ----------------------------------------------------------------------------------

    def is_reading(self) -> bool:
        """As asyncio.ReadTransport.is_reading.

        Raises: nothing.
        """
        return not self._paused and self._state is _OPEN

    def pause_reading(self) -> None:
        """As asyncio.ReadTransport.pause_reading. The peer is held back once the ring is full.

        Raises: nothing.
        """
        if self._state is _OPEN:
            self._paused = True

    def resume_reading(self) -> None:
        """As asyncio.ReadTransport.resume_reading.

        Raises: nothing.
        """
        if self._state is _OPEN and self._paused:
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
        if type(data) is bytes:
            view: bytes | memoryview = data
        elif isinstance(data, (bytes, bytearray, memoryview)):
            view = flat_view(data, "write(): data")
        else:
            raise TypeError(
                "data argument must be a bytes-like object, not " + repr(type(data).__name__)
            )
        if self._eof_written:
            raise RuntimeError("Cannot call write() after write_eof()")
        self._channel.require_same_process()
        if self._state is not _OPEN and (
            self._state is not _CLOSING or self._channel.write_error() is not None
        ):
            if self._writes_after_loss >= _WARN_AFTER:
                logger.warning("a stream that has ended is written to")
            self._writes_after_loss += 1
            return
        if not view:
            return
        if self._backlog:
            self._keep(view)
        else:
            self._backlog.append(view)
            self._backlog_bytes = len(view)
            if not self._post(view) and self._backlog:
                self._backlog[0] = _entry(self._backlog[0])
        del view  # pause_writing may resize the program's buffer
        if self._backlog:
            self._watch_room()
            self._maybe_pause_protocol()
            if self._channel.write_error() is not None:
                self._schedule()
        elif self._eof_written or self._state is not _OPEN:
            self._end_if_posted()  # a finalizer has called write_eof or close

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        """As asyncio.WriteTransport.writelines: one `write` of all.

        Args:
            list_of_data: the buffers, in order.

        Raises: as `StreamTransport.write`.
        """
        self.write(b"".join(list_of_data))

    def _post(self, first: bytes | memoryview) -> bool:
        """Post as much of the backlog's first entry as there is room for. Return whether that was
        all of it. The entry stays in the backlog meanwhile: a finalizer of the program can run,
        whose writes come after it, and whose close waits for it."""
        try:
            done = self._channel.write(first)
        except RdmaError:
            self._schedule()  # the error is delivered from the loop
            return False
        if not self._backlog:  # a finalizer has aborted
            return False
        self._backlog_bytes -= done
        if done < len(first):
            self._backlog[0] = memoryview(first)[done:]
            return False
        self._backlog.popleft()
        return True

    def _keep(self, data: bytes | memoryview) -> None:
        """Add a copy to the backlog. Each entry is sent as a message of its own, so small writes
        are joined: a small entry is a bytearray until a flush has begun with it."""
        last = self._backlog[-1]
        if isinstance(last, bytearray) and len(last) + len(data) <= JOIN_BYTES:
            last.extend(data)
        else:
            self._backlog.append(_entry(data))
        self._backlog_bytes += len(data)

    def _flush(self) -> None:
        while self._backlog:
            first = self._backlog[0] = memoryview(self._backlog[0])  # no write is joined to it now
            if not self._post(first):
                break
        if self._state is _LOST:  # a finalizer has aborted
            return
        self._watch_room()
        if self._backlog and self._channel.write_error() is not None:
            return  # as in asyncio, no resume_writing: see _end_if_stuck
        self._maybe_resume_protocol()  # it may write more, also while the transport is closing

    def _end_if_posted(self) -> None:
        """End the data, and the transport if it is closing, once everything is posted. (If it was
        aborted, what is left was dropped, and the data has no end.)"""
        if self._backlog or self._state >= _DRAINING:
            return
        if self._eof_written:
            self._path.close_write(False)
        if self._state is _CLOSING:
            self._enter(_DRAINING)

    def _end_if_stuck(self) -> None:
        """End the connection with the error that keeps the backlog from being posted, once the
        protocol has what can be read, and the end of the data. (If it does not read, at once.)"""
        if self._backlog and (self._eof_delivered or not self.is_reading()):
            error = self._channel.write_error()
            if error is not None:
                self._enter(_LOST, error)

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
        if self._state is not _OPEN or self._eof_written:
            return
        self._channel.require_same_process()
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
        return self._state is not _OPEN

    def close(self) -> None:
        """As asyncio.BaseTransport.close: what was written is posted first, at the peer's pace and
        without a time limit. (`abort` ends that.) Then connection_lost is called as soon as the
        peer's device has everything, or after `close_timeout` seconds.

        Raises: nothing.
        """
        self._enter(_CLOSING)

    def abort(self) -> None:
        """As asyncio.WriteTransport.abort: connection_lost is called in the loop's next turn.

        If some of what was written is not posted yet, it is dropped, and the peer gets an error. If
        not, the peer gets everything, and the end of the data: the connection closes in the
        background, once the peer's device has it, or after `close_timeout` seconds, at most 5.

        Raises: nothing.
        """
        self._enter(_LOST)

    def _end_soon(self) -> None:
        """End as an `abort` does, because the event loop ends."""
        error: Exception | None = None
        if self._state < _DRAINING:
            closed = ClosedError(f"this side closed {self._channel.name}")
            error = self._channel.read_error() or closed
        self._enter(_LOST, error)

    @property
    def _is_ending(self) -> bool:
        """Whether the program has closed the TLS above, which closes this transport once the peer
        has answered. (`_enter` has set `is_reported` for its own end.)"""
        if not isinstance(self._protocol, SSLProtocol):
            return False
        secured = secured_transport(self._protocol)
        return secured is not None and secured.is_closing()

    def _enter(self, state: _State, error: BaseException | None = None) -> None:
        """Change to a later state, and do what it needs. All of it is done by callbacks: a task
        would be cancelled at the end of the loop, or by the program.

        Args:
            state: an earlier one, or the present one, has no effect.
            error: what connection_lost gets.
        """
        teardown, before = self._channel.teardown, self._state
        if teardown.is_inherited:
            state = min(state, _CLOSING)  # the parent process ends it
        if state <= before:
            return
        self._state = state
        teardown.is_reported = True
        if state is _CLOSING:
            self._end_if_posted()
            return
        if before < _DRAINING:
            is_reset = self._below is not None and self._below._resets_on_close
            self._drains = not (self._backlog or is_reset)
            self._backlog.clear()
            self._backlog_bytes = 0
            if self._drains:
                self._path.close_write(True)
        if self._end_timer is not None:
            self._end_timer.cancel()
        self._call_soon(self._settle if state is _DRAINING else self._lose, error)

    def _force_close(self, error: BaseException) -> None:
        """The name by which asyncio's SSLProtocol ends a transport."""
        self._enter(_LOST, error)

    def _settle(self, error: BaseException | None) -> None:
        """The step after `close_write`, in the loop's next turn: a loop that polls has the answers
        of most peers' devices by then, and connection_lost is called when it is by asyncio's own
        transports."""
        if self._state is not _DRAINING:
            return
        if self._drains and self._channel.notify_drained(partial(self._enter, _LOST)):
            give_up = self._give_up
            self._end_timer = self._loop.call_later(self._channel.close_timeout, give_up)
        else:
            self._state = _LOST
            self._lose(error)

    def _give_up(self) -> None:
        self._drains = False
        self._enter(_LOST)

    def _lose(self, error: BaseException | None) -> None:
        self._path.on_readable = self._path.on_writable = None
        self._show_readiness()
        try:
            self._protocol.connection_lost(error)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as fault:
            self._report(fault, "protocol.connection_lost() failed")
        finally:
            # What refers to the protocol or to this object ends here, as in asyncio: the program's
            # objects are freed without a garbage collection.
            self._protocol = self._readiness = self._end_timer = None
            if self._drains:
                self._channel.close_once_drained(self._connection)
            else:
                self._channel.teardown.close()
            self._on_lost(self)

    def __del__(self) -> None:
        if getattr(self, "_state", None) is not _OPEN:
            return
        teardown = self._channel.teardown
        # If it is not left open, the loop's end has named the connection, or the program closed it.
        if teardown.left_open():
            teardown.is_reported = True  # one warning for both
            place = teardown.origin
            warn_unclosed(f"unclosed transport {with_origin(self, place)}", self, place)


def _weakly(method: Callable[[], int]) -> Callable[[], int]:
    """Return a function that calls a method; -1: its object is gone."""
    reference = WeakMethod(method)

    def call() -> int:
        found = reference()
        return -1 if found is None else found()

    return call


def _fillable(buffer: Any) -> memoryview:
    view = flat_view(buffer, "get_buffer()")
    if view.readonly:
        raise TypeError("get_buffer() returned a read-only buffer")
    if not len(view):
        raise RuntimeError("get_buffer() returned an empty buffer")
    return view


def _entry(data: bytes | bytearray | memoryview) -> bytearray | memoryview:
    """Return data as an entry of the backlog: a copy, unless it is of bytes, which nobody changes.
    More is joined to a small entry."""
    if len(data) < JOIN_BYTES:
        return bytearray(data)
    view = memoryview(data)
    return view if type(view.obj) is bytes else memoryview(bytes(view))
