"""The two work queues of a queue pair: posting with credits, and what is in flight on them.

Every post takes a slot, enters the in-flight table, and then tells the device; every completion
comes back here through its request.
"""

from collections.abc import Sequence

from aiordma.credits import Credits
from aiordma.enums import SendFlag
from aiordma.errors import QueueFullError, RdmaError
from aiordma.hub import DeviceHub
from aiordma.options import ConnectionOptions
from aiordma.ranges import RemoteMemory
from aiordma.request import Holdable, WorkRequest
from aiordma.verbs import QueuePair

__all__ = ("WorkQueues",)

_SIGNALED = int(SendFlag.SIGNALED)


class WorkQueues:
    """What an endpoint posts on, once it has a queue pair; the endpoint says whether it may."""

    def __init__(self, hub: DeviceHub, options: ConnectionOptions) -> None:
        self.hub = hub
        self.loop = hub.loop
        self.options = options
        self.queue_pair: QueuePair | None = None
        self.send_credits = Credits(self.loop, options.send_depth)
        self.receive_credits = Credits(self.loop, options.receive_queue)
        self._open: set[WorkRequest] = set()

    def require_usable(self) -> None:
        """Do nothing while requests may be posted, else raise why not."""
        raise NotImplementedError

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
            self.require_usable()
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
