"""The two work queues of a queue pair: posting with credits, and what is in flight on them.

Every post takes a slot, enters the in-flight table, and then tells the device; every completion
comes back here through its request.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from aiordma._native import ffi
from aiordma.connection_parameters import DEVICE_MAXIMUM
from aiordma.credits import Credits
from aiordma.drain import ChainPort
from aiordma.enums import SendFlag, WorkCompletionOpcode, WorkRequestOpcode
from aiordma.errors import FlushedError, PartialPostError, QueueFullError, RdmaError, VerbsCallError
from aiordma.hub import DeviceHub, SharedQueue
from aiordma.options import ConnectionOptions
from aiordma.queue_state import QueueState
from aiordma.ranges import RemoteMemory
from aiordma.request import Holdable, WorkRequest
from aiordma.states import ConnectionState
from aiordma.verbs import (
    MemoryRegion,
    MemorySlice,
    MemoryWindow,
    RawSharedReceiveQueue,
    SendWork,
)
from aiordma.verbs.send_work import pack_chain

__all__ = ("SharedReceives", "Window", "WorkQueues")

_SIGNALED = int(SendFlag.SIGNALED)

_COMPLETES_AS: dict[int, WorkCompletionOpcode] = {
    WorkRequestOpcode.RDMA_WRITE: WorkCompletionOpcode.RDMA_WRITE,
    WorkRequestOpcode.RDMA_WRITE_WITH_IMM: WorkCompletionOpcode.RDMA_WRITE,
    WorkRequestOpcode.RDMA_READ: WorkCompletionOpcode.RDMA_READ,
    WorkRequestOpcode.ATOMIC_CMP_AND_SWP: WorkCompletionOpcode.COMP_SWAP,
    WorkRequestOpcode.ATOMIC_FETCH_AND_ADD: WorkCompletionOpcode.FETCH_ADD,
    WorkRequestOpcode.LOCAL_INV: WorkCompletionOpcode.LOCAL_INV,
    WorkRequestOpcode.BIND_MW: WorkCompletionOpcode.BIND_MW,
}


logger = logging.getLogger("aiordma")


class Window(Protocol):
    """A memory window of the queue pair."""

    def free(self) -> None:
        """Free the device's object, in any thread."""

    def close(self) -> None:
        """Let go of the memory that it was bound to, too; on the loop's thread."""


class SharedReceives(Protocol):
    """A shared receive queue, and the completion queue where its receives complete."""

    raw: RawSharedReceiveQueue
    queue: SharedQueue
    buffers: int
    """Receives that it posts by itself."""

    def join(self, member: "WorkQueues") -> None:
        """Count a queue pair that is about to be made on it, or refuse."""

    def delays(self, member: "WorkQueues", then: Callable[[], None]) -> bool:
        """Return whether the queue pair, in its error state, must not be destroyed before `then` is
        called: the device may still tell of receives that it took."""

    def leave(self, member: "WorkQueues") -> None:
        """Count no more a queue pair that is gone, and whose completions have been delivered."""


class WorkQueues(QueueState):
    """What an endpoint posts on, once it has a queue pair."""

    def __init__(self, hub: DeviceHub, options: ConnectionOptions, state: ConnectionState) -> None:
        super().__init__(hub, state)
        self.options = options
        self.shared_receive: SharedReceives | None = None
        self.send_credits = Credits(self.loop, options.send_depth)
        self.receive_credits = Credits(self.loop, options.receive_queue)
        self.regions: dict[int, MemoryRegion] = {}
        self.windows: dict[int, Window] = {}

    def check_depths(self) -> None:
        """Do nothing if the device can have as many READs outstanding as the options say.

        Raises:
            ValueError: it cannot; the message names the option and the limit.
        """
        for name, limit in (
            ("initiator_depth", self.hub.attributes.max_qp_init_rd_atom),
            ("responder_resources", self.hub.attributes.max_qp_rd_atom),
        ):
            value = getattr(self.options, name)
            if value != DEVICE_MAXIMUM and value > limit:
                raise ValueError(f"{name}={value}: {self.hub.context.device_name} has 0..{limit}")

    def adopt(self, region: MemoryRegion) -> None:
        """Close the region with this endpoint, if it is not closed before."""
        self.regions[id(region)] = region
        region.forget = lambda: self.regions.pop(id(region), None)

    def request_failed(self, request: WorkRequest, raw: tuple[int, ...]) -> Exception:
        """Turn a failed completion into its error."""
        raise NotImplementedError

    def post_send(
        self,
        operation: str,
        opcode: int,
        sges: bytes,
        count: int,
        length: int,
        held: Sequence[Holdable],
        *,
        flags: int = 0,
        remote: RemoteMemory | None = None,
        immediate: int = 0,
        credited: bool = False,
    ) -> WorkRequest:
        """Post on the send queue; `credited` if the caller awaited `send_credits.take()`.

        Raises:
            QueueFullError: no slot is free.
            VerbsCallError: the device refused it. Nothing was posted, nothing is held.
        """
        try:
            self.require_sendable()
        except BaseException:
            if credited:
                self.send_credits.give()
            raise
        if not credited and not self.send_credits.try_take():
            raise QueueFullError(
                f"{self.options.send_depth} requests are in flight: await one first, or use the "
                "coroutine of the same name, which waits"
            )
        request = WorkRequest(self, operation, length, held, remote)
        self._enter(request)
        assert self.queue_pair is not None
        try:
            self.queue_pair.post_send_raw(
                request.wr_id,
                opcode,
                flags | _SIGNALED,
                sges,
                count,
                0 if remote is None else remote.address,
                0 if remote is None else remote.rkey,
                immediate,
            )
        except RdmaError as error:
            if isinstance(error, VerbsCallError) and error.was_taken:
                # The device may still execute it: only the end of the queue pair decides that.
                self.fail(error)
                return request
            self._take_back(request)
            self.send_credits.give()
            raise
        self.hub.watch_over()
        return request

    def post_sends(
        self, works: Sequence[SendWork], *, credited: bool = False, last_tells: bool = False
    ) -> list[WorkRequest]:
        """Post requests of any kind as one chain, with one call.

        Args:
            works: in order.
            credited: the caller awaited `send_credits.take()`, once for each.
            last_tells: only the last one is signaled: its completion ends those before it. Their
                slots are counted until then.

        Raises:
            QueueFullError: there are not as many free slots; nothing was posted.
            PartialPostError: the device refused one of several; the error names it and has those
                before it, which are posted.
            VerbsCallError: it refused the only one.
        """
        count = len(works)
        try:
            self.require_sendable()
        except BaseException:
            if credited:
                self._give_sends(count)
            raise
        if not credited and not self.send_credits.try_take_many(count):
            raise QueueFullError(
                f"{count} requests at once, and {self.send_credits.free} of "
                f"{self.options.send_depth} slots are free: await one first"
            )
        requests = [self._request(work) for work in works]
        self.post_prepared(works, requests, last_tells=last_tells)
        return requests

    def _request(self, work: SendWork) -> WorkRequest:
        request = WorkRequest(self, work.operation, work.length, work.held, work.remote)
        request.completes_as = _COMPLETES_AS.get(work.opcode, WorkCompletionOpcode.SEND)
        return request

    def prepare(self, work: SendWork) -> WorkRequest:
        """Make a request that takes its slot and holds its memory, to be posted by
        `post_prepared`, or ended by `fail` on it.

        Raises:
            QueueFullError: no slot is free.
        """
        self.require_sendable()
        if not self.send_credits.try_take():
            raise QueueFullError(f"{self.options.send_depth} requests are in flight: await one")
        request = self._request(work)
        self._open.add(request)  # so that it ends with the queue pair, if it is never posted
        return request

    def post_prepared(
        self, works: Sequence[SendWork], requests: list[WorkRequest], *, last_tells: bool
    ) -> None:
        """Post prepared requests as one chain; those that are refused end with the error, and give
        their slots back. Raises as `post_sends`."""
        flags = [int(work.flags) | _SIGNALED for work in works]
        if last_tells:
            flags[:-1] = [value & ~_SIGNALED for value in flags[:-1]]
        for request in requests:
            self._enter(request)
            if last_tells:
                request.tells_for(requests)
        assert self.queue_pair is not None
        error, posted = self.queue_pair.post_send_chain(
            works, [request.wr_id for request in requests], flags
        )
        self.hub.watch_over()
        self._chain_posted(error, posted, requests, last_tells)

    def post_collected(
        self, port: ChainPort, works: Sequence[SendWork], *, last_tells: bool
    ) -> None:
        """`post_prepared`, of a chain some of whose requests its port has made. `works` are those
        of the others."""
        if not works:
            error = port.post(last_tells)
        else:
            raw = pack_chain(works, [0] * len(works), [int(work.flags) for work in works])
            sges = b"".join([work.sges for work in works])
            error = port.post(last_tells, int(ffi.cast("uintptr_t", raw)), sges)
        if error:
            self._chain_posted(error, port.posted, port.requests(), last_tells)

    def _chain_posted(
        self, error: int, posted: int, requests: list[WorkRequest], last_tells: bool
    ) -> None:
        if error < 0:
            self.fail(VerbsCallError(-error, "ibv_post_send", "the device could not be told"))
            return
        if not error:
            return
        refused = requests[posted]
        hint = f"{refused.operation} of {refused.length} bytes"
        failure = VerbsCallError(error, "ibv_post_send", hint)
        if posted:
            failure = PartialPostError(error, "ibv_post_send", hint, requests[:posted])
        for request in requests[posted:]:
            self.hub.in_flight.take(request.wr_id)
            request.fail(failure)
        if posted and last_tells:
            # The one that would have told of their end was not taken: nobody would hear of them
            # before the end of the queue pair.
            self.fail(failure)
        raise failure

    def _give_sends(self, count: int) -> None:
        for _ in range(count):
            self.send_credits.give()

    def post_bind(
        self,
        window: MemoryWindow,
        bound: MemorySlice,
        access: int,
        flags: int,
        *,
        credited: bool = False,
    ) -> WorkRequest:
        """Bind a window of type 1; to no bytes unbinds it. Its rkey is another one at once."""
        try:
            self.require_sendable()
        except BaseException:
            if credited:
                self.send_credits.give()
            raise
        if not credited and not self.send_credits.try_take():
            raise QueueFullError(f"{self.options.send_depth} requests are in flight")
        request = WorkRequest(self, "BIND_MW", bound.length, (bound,))
        self._enter(request)
        assert self.queue_pair is not None
        try:
            self.queue_pair.bind_window(request.wr_id, window, bound, access, flags | _SIGNALED)
        except RdmaError:
            self._take_back(request)
            self.send_credits.give()
            raise
        self.hub.watch_over()
        return request

    def post_receive(
        self, sges: bytes, count: int, length: int, held: Sequence[Holdable]
    ) -> WorkRequest:
        """Post on the receive queue. Raises as `post_send` does."""
        self.require_usable()
        if not self.receive_credits.try_take():
            raise QueueFullError(
                f"{self.options.receive_queue} receives are posted: await one first"
            )
        request = WorkRequest(self, "RECV", length, held, is_receive=True)
        self._enter(request)
        assert self.queue_pair is not None
        try:
            self.queue_pair.post_recv_raw(request.wr_id, sges, count)
        except RdmaError:
            self._take_back(request)
            self.receive_credits.give()
            raise
        self.hub.watch_over()
        return request

    def _enter(self, request: WorkRequest) -> None:
        # Before the device can know of it, so that nothing (an interrupt, say) comes between; only
        # the device's own refusal takes it out again.
        request.wr_id = self.hub.in_flight.add(request)
        self._open.add(request)

    def _take_back(self, request: WorkRequest) -> None:
        self._open.discard(request)
        self.hub.in_flight.take(request.wr_id)
        request.drop()

    def request_ended(self, request: WorkRequest) -> None:
        """Take back the slot (RequestOwner)."""
        self._open.discard(request)
        (self.receive_credits if request.is_receive else self.send_credits).give()

    def run_ended(self, earlier: WorkRequest, last: WorkRequest) -> None:
        """End one that tells nothing (RequestOwner). A queue works in order: it succeeded, unless
        all that is known of the last one is that it was flushed."""
        self.hub.in_flight.take(earlier.wr_id)
        earlier.tells_for(())  # or each would look through all those before it
        cause = last.exception()
        if isinstance(cause, FlushedError):
            earlier.fail(cause)
        else:
            qpn = 0 if self.queue_pair is None else self.queue_pair.qpn
            opcode = int(earlier.completes_as)
            earlier.complete((earlier.wr_id, 0, opcode, 0, 0, 0, qpn, 0, 0, 0, 0, 0, 0, 0))

    def shorten_rnr_timer(self) -> None:
        """Shorten the pause of a peer that finds no receive posted; not a thing on iWARP."""
        if self.hub.is_iwarp or self.queue_pair is None:
            return
        try:
            self.queue_pair.modify(min_rnr_timer=self.options.min_rnr_timer)
        except (VerbsCallError, ValueError) as error:
            # The peer may have disconnected already, and the queue pair with it.
            logger.debug("min_rnr_timer was not set: %s", error)
