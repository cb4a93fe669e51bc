"""The ports of the backend in Python, which create and post plain requests.

`python` has the rest of this backend: requests, the in-flight table and the drain.
"""

import errno
import struct
from collections.abc import Awaitable
from threading import get_ident
from typing import Any

from aiordma._base.process import here
from aiordma._base.ranges import RemoteMemory
from aiordma._native import HandleBase, Part, Pool, Slots, ffi, lib
from aiordma._requests.python import Drain, OpenRequests, WorkRequest
from aiordma.verbs import MemorySlice
from aiordma.verbs.buffers import address_of, flat_view
from aiordma.verbs.send_work import RECEIVE_REQUEST, pack_plain

__all__ = ("ChainPort", "Port", "SharedPort")

SGE = struct.Struct("=QII")
"""The layout of struct ibv_sge: address, length, lkey."""

_SEND, _WRITE, _READ = lib.IBV_WR_SEND, lib.IBV_WR_RDMA_WRITE, lib.IBV_WR_RDMA_READ
_COMPLETES_AS = {_SEND: lib.IBV_WC_SEND, _WRITE: lib.IBV_WC_RDMA_WRITE, _READ: lib.IBV_WC_RDMA_READ}
_SIGNALED, _INLINE = int(lib.IBV_SEND_SIGNALED), int(lib.IBV_SEND_INLINE)


class _Plain:
    """A plain request to post: one part, which is registered or short enough to go inline."""

    __slots__ = ("flags", "held", "length", "opcode", "operation", "remote", "sge", "source")

    def __init__(
        self, operation: str, opcode: int, memory: Part | memoryview, remote: RemoteMemory | None
    ) -> None:
        self.operation = operation
        self.opcode = opcode
        self.remote = remote
        self.flags = 0
        self.held: tuple[Any, ...] = ()
        self.source: memoryview | None = None
        if isinstance(memory, Part):
            self.sge, self.length, self.held = memory._sge, memory.length, (memory,)
        else:
            self.source, self.length, self.flags = memory, memory.nbytes, _INLINE
            self.sge = SGE.pack(address_of(memory), memory.nbytes, 0)

    def pack(self, wr_id: int, flags: int) -> bytes:
        """Return the request as a struct aiordma_send_request."""
        address, rkey = (0, 0) if self.remote is None else (self.remote.address, self.remote.rkey)
        return pack_plain(wr_id, self.opcode, self.flags | flags, 1, address, rkey, 0)

    def is_still_open(self) -> bool:
        """Whether the region is still open after the arguments were read."""
        return all(part.region._usable for part in self.held)


class _Port:
    """The parts that ports of queue pairs and of shared receive queues have in common."""

    def __init__(
        self,
        owner: Any,
        drain: Drain,
        sends: Any,
        receives: Slots,
        posted: OpenRequests,
        domain: object,
    ) -> None:
        self.can_receive = False
        """Whether receives may be posted."""
        self.notifies_owner = False
        """Whether the owner is notified of each completion."""
        self.thread: int = get_ident()
        """The only thread that may post: the event loop's."""
        self._owner, self._drain, self._open, self._domain = owner, drain, posted, domain
        self._sends, self._receives = sends, receives
        self._process = here.pid
        self._queue_pair = self._shared = ffi.NULL
        self._max_message = self._max_inline = 0

    def receive_all(
        self, parts: list[Any], /
    ) -> list[WorkRequest] | tuple[int, list[WorkRequest]] | None:
        """Post a receive for each item, in one call.

        Returns:
            The requests. If the device refused a receive: the errno, and the requests before it,
            which are posted. None: take the general path; nothing was posted.
        """
        if not isinstance(parts, list):
            return None
        all_plain: list[_Plain] = []
        for part in list(parts):
            plain = self._read_receive(part)
            if plain is None:
                return None
            all_plain.append(plain)
        if not all_plain or len(all_plain) > self._receives.free:
            return None
        requests: list[WorkRequest] = []
        try:
            for plain in all_plain:
                self._receives.free -= 1
                requests.append(self._make(plain))
        except BaseException:
            for request in requests:
                self._take_back(request)
            raise
        posted = ffi.new("uint32_t *")
        try:
            are_plain = all(plain.is_still_open() for plain in all_plain)
            if not (are_plain and self._is_usable(self.can_receive)):
                return None
            for request in requests:
                self._enter(request)
            sges = b"".join([plain.sge for plain in all_plain])
            error = self._give_receives(requests, sges, posted)
        finally:
            for request in requests[posted[0] :]:
                self._take_back(request)
        return (error, requests[: posted[0]]) if error else requests

    def _is_usable(self, may: bool) -> bool:
        return (
            may
            and bool(self._queue_pair or self._shared)
            and self._process == here.pid
            and self.thread == get_ident()
        )

    def _read_receive(self, memory: Any) -> _Plain | None:
        target = self._target(memory) if self._is_usable(self.can_receive) else None
        return None if target is None else _Plain("RECV", 0, target, None)

    def _target(self, memory: Any) -> Part | None:
        if not isinstance(memory, MemorySlice) or not memory.region._writable:
            return None
        return self._registered(memory)

    def _registered(self, part: MemorySlice) -> Part | None:
        is_plain = (
            part.region._usable
            and part.region.domain is self._domain
            and 0 < part.length <= min(self._max_message, 2**32 - 1)
        )
        return part if is_plain else None

    def _make(self, plain: _Plain) -> WorkRequest:
        """Create a request, which owns the slot and holds its memory."""
        is_receive = plain.operation == "RECV"
        try:
            return WorkRequest(
                self._owner,
                plain.operation,
                plain.length,
                plain.held,
                plain.remote,
                is_receive=is_receive,
            )
        except BaseException:
            _give_slot(self._receives if is_receive else self._sends)
            raise

    def _enter(self, request: WorkRequest) -> None:
        # Before the post. Only a refusal by the device removes the entry.
        request.wr_id = self._drain.in_flight.add(request)
        self._open.add(request)

    def _take_back(self, request: WorkRequest) -> None:
        """Undo a request that the device did not accept."""
        self._drain.in_flight.take(request.wr_id)
        self._open.discard(request)
        request._drop()
        _give_slot(self._receives if request.is_receive else self._sends)

    def _give_receives(self, requests: list[WorkRequest], sges: bytes, posted: Any) -> int:
        """Return the errno, and set `posted`, an uint32_t, to the number of accepted requests. If
        this raises, the device got none."""
        packed = b"".join([RECEIVE_REQUEST.pack(request.wr_id, 1, 0) for request in requests])
        self._drain.crossings += 1
        _watch_over(self._drain)
        error = lib.aiordma_post_recv_chain(
            self._queue_pair, self._shared, packed, len(requests), sges, len(sges), posted
        )
        return abs(int(error))


class Port(_Port):
    """Posts requests on a queue pair. A method returns None if the port cannot handle the request;
    the caller then takes the general path. This backend handles only plain requests: they have one
    part, which is registered or short enough to go inline, and no options. The engine in C handles
    nearly all requests.

    Args:
        owner: the owner of the queue pair. Its `post_refused` raises the error of a refused post;
            `doorbell_failed` is called if the device could not be notified of a post.
        drain: the drain that delivers the completions.
        sends: the send queue's slots.
        receives: the receive queue's slots.
        posted: the owner's requests in flight.
        loop: asyncio's loop, or None.
        domain: the protection domain of registered memory.
    """

    def __init__(
        self,
        owner: Any,
        drain: Drain,
        sends: Slots,
        receives: Slots,
        posted: OpenRequests,
        loop: object,
        domain: object,
    ) -> None:
        super().__init__(owner, drain, sends, receives, posted, domain)
        self.ready = False
        """Whether sends may be posted."""
        self.can_send_datagrams = False
        """Whether datagrams may be posted."""
        self.max_datagram = 0
        """The length of the longest datagram."""
        self.can_read = False
        """Whether READs may be posted."""
        self.can_atomics = False
        """Whether atomics may be posted."""
        self.can_immediate = False
        """Whether requests may carry immediate data."""
        self.can_invalidate = False
        """Whether messages may invalidate an rkey."""
        self.can_bind = False
        """Whether windows may be bound."""
        self.has_pooled_receives = False
        """Whether its receives are pooled receives for messages, not the program's own."""

    def open(
        self,
        queue_pair: int,
        max_message: int,
        max_inline: int,
        max_send_sge: int,
        max_recv_sge: int,
        max_read_sge: int,
        pool: Pool,
        /,
    ) -> None:
        """Set the queue pair, by its address, its limits, and the pool of blocks."""
        self._queue_pair = ffi.cast("struct ibv_qp *", queue_pair)
        self._max_message, self._max_inline = max_message, max_inline

    def send(
        self,
        data: Any,
        *,
        immediate: Any = None,
        invalidate: Any = None,
        fence: Any = False,
        solicited: Any = False,
    ) -> WorkRequest | None:
        """Post a message. None: take the general path."""
        if not (immediate is None and invalidate is None and _is_false(fence, solicited)):
            return None
        return self._post_send(self._read_send(data))

    def sendv(
        self,
        parts: Any,
        *,
        immediate: Any = None,
        invalidate: Any = None,
        fence: Any = False,
        solicited: Any = False,
    ) -> WorkRequest | None:
        """Return None: this backend takes the general path."""
        return None

    def write(
        self,
        local: Any,
        remote: Any,
        *,
        immediate: Any = None,
        fence: Any = False,
        solicited: Any = False,
    ) -> WorkRequest | None:
        """Post a WRITE. None: take the general path."""
        if not (immediate is None and _is_false(fence, solicited)):
            return None
        return self._post_send(self._read_write(local, remote))

    def writev(
        self,
        parts: Any,
        remote: Any,
        *,
        immediate: Any = None,
        fence: Any = False,
        solicited: Any = False,
    ) -> WorkRequest | None:
        """Return None: this backend takes the general path."""
        return None

    def read(self, remote: Any, local: Any, *, fence: Any = False) -> WorkRequest | None:
        """Post a READ. None: take the general path."""
        return self._post_send(self._read_read(remote, local)) if _is_false(fence) else None

    def readv(self, remote: Any, parts: Any, *, fence: Any = False) -> WorkRequest | None:
        """Return None: this backend takes the general path."""
        return None

    def compare_swap(
        self, local: Any, remote: Any, compare: Any, swap: Any, *, fence: Any = False
    ) -> WorkRequest | None:
        """Return None: this backend takes the general path."""
        return None

    def fetch_add(
        self, local: Any, remote: Any, add: Any, *, fence: Any = False
    ) -> WorkRequest | None:
        """Return None: this backend takes the general path."""
        return None

    def compare_swap_value(self, remote: Any, compare: Any, swap: Any) -> Awaitable[int] | None:
        """Return None: this backend takes the general path."""
        return None

    def fetch_add_value(self, remote: Any, add: Any) -> Awaitable[int] | None:
        """Return None: this backend takes the general path."""
        return None

    def bind(
        self, window: Any, memory: Any, access: Any, *, fence: Any = False
    ) -> WorkRequest | None:
        """Return None: this backend takes the general path."""
        return None

    def local_invalidate(self, window: Any, *, fence: Any = False) -> WorkRequest | None:
        """Return None: this backend takes the general path."""
        return None

    def ud_send(
        self, data: Any, peer: Any, *, immediate: Any = None, solicited: Any = False
    ) -> WorkRequest | None:
        """Return None: this backend takes the general path."""
        return None

    def ud_sendv(
        self, parts: Any, peer: Any, *, immediate: Any = None, solicited: Any = False
    ) -> WorkRequest | None:
        """Return None: this backend takes the general path."""
        return None

    def set_peer(
        self, peer: object, handle: HandleBase, address_handle: int, qpn: int, qkey: int, /
    ) -> None:
        """Do nothing: this backend posts no datagrams."""

    def ud_receive(self, buffer: Any) -> Any:
        """Return None: this backend takes the general path."""
        return None

    def ud_receivev(self, parts: Any) -> Any:
        """Return None: this backend takes the general path."""
        return None

    def set_senders(self, senders: object, /) -> None:
        """Do nothing: this backend posts no receives of datagrams."""

    def receive(self, buffer: Any) -> WorkRequest | None:
        """Post a receive. None: take the general path."""
        plain = self._read_receive(buffer) if self._queue_pair else None
        if plain is None or not _take_slot(self._receives):
            return None
        request = self._make(plain)
        try:
            if not (self._is_usable(self.can_receive) and plain.is_still_open()):
                self._take_back(request)
                return None
            self._enter(request)
            error = self._give_receives([request], plain.sge, ffi.new("uint32_t *"))
        except BaseException:
            self._take_back(request)
            raise
        if error:
            self._take_back(request)
            self._owner.post_refused(error, True)
        return request

    def receivev(self, parts: Any) -> WorkRequest | None:
        """Return None: this backend takes the general path."""
        return None

    def _read_send(self, data: Any) -> _Plain | None:
        memory = self._source(data) if self._is_usable(self.ready) else None
        return None if memory is None else _Plain("SEND", _SEND, memory, None)

    def _read_write(self, data: Any, remote: Any) -> _Plain | None:
        memory = self._source(data) if self._is_usable(self.ready) else None
        return self._one_sided("RDMA_WRITE", _WRITE, memory, remote)

    def _read_read(self, remote: Any, memory: Any) -> _Plain | None:
        target = self._target(memory) if self._is_usable(self.ready and self.can_read) else None
        if not getattr(remote, "length", 0):
            return None  # the general path gives a READ of no bytes a part on iWARP
        return self._one_sided("RDMA_READ", _READ, target, remote)

    def _one_sided(
        self, operation: str, opcode: int, memory: Part | memoryview | None, remote: Any
    ) -> _Plain | None:
        if memory is None or type(remote) is not RemoteMemory:
            return None
        plain = _Plain(operation, opcode, memory, remote)
        return plain if remote.length == plain.length else None

    def _source(self, memory: Any) -> Part | memoryview | None:
        if isinstance(memory, MemorySlice):
            return self._registered(memory)
        try:
            view = flat_view(memory)
        except (TypeError, ValueError):
            return None  # the general path raises the error
        return view if 0 < view.nbytes <= self._max_inline else None

    def _post_send(self, plain: _Plain | None) -> WorkRequest | None:
        if plain is None or not _take_slot(self._sends):
            return None  # the general path raises, or waits
        request = self._make(plain)
        try:
            if not (self._is_usable(self.ready) and plain.is_still_open()):
                self._take_back(request)
                return None
            posted = ffi.new("uint32_t *")
            self._enter(request)
            packed = plain.pack(request.wr_id, _SIGNALED)
            error = self._give_sends(packed, 1, plain.sge, posted)
        except BaseException:
            self._take_back(request)
            raise
        if error > 0:
            self._take_back(request)
            self._owner.post_refused(error, False)
        if error < 0:
            try:
                self._owner.doorbell_failed(-error)
            except MemoryError:
                self._owner.doorbell_failed(-error)
        return request

    def _give_sends(self, requests: bytes, count: int, sges: bytes, posted: Any) -> int:
        """Return C's errno (negative: the doorbell failed; EIO's if there is no memory for another
        one), and set `posted`, an uint32_t, to the number of accepted requests. If this raises, the
        device got none."""
        self._drain.crossings += 1
        _watch_over(self._drain)
        try:
            error = lib.aiordma_post_send_chain(
                self._queue_pair, requests, count, sges, len(sges), posted
            )
            return int(error)
        except MemoryError:
            if not posted[0]:
                raise
            return -errno.EIO


def _is_false(*flags: Any) -> bool:
    """Whether no option is given. Other values than False are for the general path."""
    return all(flag is False for flag in flags)


def _watch_over(drain: Drain) -> None:
    """Start the hub's watchdog for lost events, because a request is in flight."""
    if not drain.watched:
        drain.hub.watch_over()


def _take_slot(slots: Slots) -> bool:
    if slots.free <= 0 or slots.waiting:
        return False
    slots.free -= 1
    return True


def _give_slot(slots: Any) -> None:
    slots.free += 1
    if slots.waiting:
        slots.grant()


class SharedPort(_Port):
    """Posts receives on a shared receive queue. The arguments are those of Port. This backend
    handles only receives of one part, which is registered."""

    def __init__(
        self,
        owner: Any,
        drain: Drain,
        receives: Slots,
        posted: OpenRequests,
        loop: object,
        domain: object,
    ) -> None:
        super().__init__(owner, drain, None, receives, posted, domain)

    def open(self, queue: int, max_message: int, max_recv_sge: int, /) -> None:
        """Set the shared receive queue, by its address, and its limits."""
        self._shared, self._max_message = ffi.cast("struct ibv_srq *", queue), max_message


class ChainPort:
    """Collects the requests of one chain. It creates the plain requests: each takes a slot and
    holds its memory, and inline bytes are copied. `post` posts all of them.

    Args:
        port: the port of the queue pair.
    """

    def __init__(self, port: Port) -> None:
        if not isinstance(port, Port):
            raise TypeError(f"ChainPort(): port={port!r} is no Port")
        self._port = port
        self.over: bool = False
        """Whether the chain collects no more requests: its methods then return None."""
        self.posted: int = 0
        """The number of requests that the device accepted."""
        self.signal_last_only: bool = False
        """Whether only the last request is signaled; this backend gets it from `post`."""
        self.error: int = 0
        """0: this backend posts nothing by itself."""
        self._collected: list[tuple[WorkRequest, _Plain | None]] = []
        self._is_posted = False

    @property
    def usable(self) -> bool:
        """Whether requests may be posted on the queue pair; if not, the owner raises the reason."""
        return self._port._is_usable(self._port.ready)

    @property
    def count(self) -> int:
        """The number of requests."""
        return len(self._collected)

    def send(
        self,
        data: Any,
        *,
        immediate: Any = None,
        invalidate: Any = None,
        fence: Any = False,
        solicited: Any = False,
    ) -> WorkRequest | None:
        """Collect a message. None: take the general path."""
        if not (immediate is None and invalidate is None and _is_false(fence, solicited)):
            return None
        return self._collect(None if self.over else self._port._read_send(data))

    def sendv(
        self,
        parts: Any,
        *,
        immediate: Any = None,
        invalidate: Any = None,
        fence: Any = False,
        solicited: Any = False,
    ) -> WorkRequest | None:
        """Return None: this backend takes the general path."""
        return None

    def write(
        self,
        local: Any,
        remote: Any,
        *,
        immediate: Any = None,
        fence: Any = False,
        solicited: Any = False,
    ) -> WorkRequest | None:
        """Collect a WRITE. None: take the general path."""
        if not (immediate is None and _is_false(fence, solicited)):
            return None
        return self._collect(None if self.over else self._port._read_write(local, remote))

    def writev(
        self,
        parts: Any,
        remote: Any,
        *,
        immediate: Any = None,
        fence: Any = False,
        solicited: Any = False,
    ) -> WorkRequest | None:
        """Return None: this backend takes the general path."""
        return None

    def read(self, remote: Any, local: Any, *, fence: Any = False) -> WorkRequest | None:
        """Collect a READ. None: take the general path."""
        if self.over or not _is_false(fence):
            return None
        return self._collect(self._port._read_read(remote, local))

    def readv(self, remote: Any, parts: Any, *, fence: Any = False) -> WorkRequest | None:
        """Return None: this backend takes the general path."""
        return None

    def compare_swap(
        self, local: Any, remote: Any, compare: Any, swap: Any, *, fence: Any = False
    ) -> WorkRequest | None:
        """Return None: this backend takes the general path."""
        return None

    def fetch_add(
        self, local: Any, remote: Any, add: Any, *, fence: Any = False
    ) -> WorkRequest | None:
        """Return None: this backend takes the general path."""
        return None

    def bind(
        self, window: Any, memory: Any, access: Any, *, fence: Any = False
    ) -> WorkRequest | None:
        """Return None: this backend takes the general path."""
        return None

    def local_invalidate(self, window: Any, *, fence: Any = False) -> WorkRequest | None:
        """Return None: this backend takes the general path."""
        return None

    def _collect(self, plain: _Plain | None) -> WorkRequest | None:
        port = self._port
        if plain is None or not _take_slot(port._sends):
            return None
        request = port._make(plain)
        try:
            if self.over or not self.usable or not plain.is_still_open():
                port._take_back(request)
                return None
            request._completes_as = _COMPLETES_AS[plain.opcode]
            if plain.source is not None:
                plain.source = memoryview(plain.source.tobytes())
                plain.sge = SGE.pack(address_of(plain.source), plain.length, 0)
            port._open.add(request)  # if it is never posted, the end of the queue pair ends it
            self._collected.append((request, plain))
        except BaseException:  # there was no memory
            port._take_back(request)
            raise
        return request

    def add(self, request: WorkRequest, /) -> None:
        """Append a request that is not plain, and was created elsewhere."""
        if not isinstance(request, WorkRequest) or self.over:
            raise ValueError("add() takes a WorkRequest, and the chain must not be over")
        self._collected.append((request, None))

    def requests(self) -> list[WorkRequest]:
        """Return all requests, in order."""
        return [request for request, _ in self._collected]

    def post(self, signal_last_only: bool, works: int = 0, sges: bytes = b"", /) -> int:
        """Post all requests in order, in one call.

        Args:
            signal_last_only: only the last request is signaled.
            works: the address of an array of struct aiordma_send_request, for the requests that
                were appended with `add`.
            sges: the parts of these requests.

        Returns:
            C's errno, or 0 if the device accepted all. A negative errno: all requests are in the
            queue, but the device could not be notified.
        """
        port, requests = self._port, self.requests()
        is_general = any(plain is None for _, plain in self._collected)
        if not requests or self._is_posted or (is_general and not works):
            raise ValueError("a chain is posted once, and must not be empty")
        self.over = self._is_posted = True
        if signal_last_only:
            for request in requests:
                request._set_run(requests)
        if not self.usable:
            return errno.ENOTCONN
        packed, parts = self._pack(
            signal_last_only, ffi.cast("struct aiordma_send_request *", works), sges
        )
        posted = ffi.new("uint32_t *")
        error = port._give_sends(packed, len(requests), parts, posted)
        self.posted = posted[0]
        return error

    def _pack(self, signal_last_only: bool, works: Any, sges: bytes) -> tuple[bytes, bytes]:
        """Enter all requests into the in-flight table. Return the packed requests and parts."""
        packed, parts, at = [], [], 0
        for place, (request, plain) in enumerate(self._collected, start=1):
            request.wr_id = self._port._drain.in_flight.add(request)
            flags = 0 if signal_last_only and place < len(self._collected) else _SIGNALED
            if plain is not None:
                packed.append(plain.pack(request.wr_id, flags))
                parts.append(plain.sge)
                continue
            works[0].wr_id = request.wr_id
            works[0].send_flags |= flags
            packed.append(ffi.buffer(works, ffi.sizeof(works[0]))[:])
            end = at + SGE.size * works[0].sge_count
            parts.append(sges[at:end])
            works, at = works + 1, end
        return b"".join(packed), b"".join(parts)
