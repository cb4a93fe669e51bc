"""From completion queues to the requests that they end, and a queue pair's port.

All are references: the engine in C (`_native/engine/`: drain.c, port.c, shared.c, chain.c) stands
in for them, and does what they leave out. A port posts plain requests without Python's help, and a
chain's collects them; these find none plain, so that all go the general way. Nothing is looked for
at an await, and nobody is run at once.
"""

import logging
from typing import Any, Protocol

from aiordma._native import ffi, in_c, lib
from aiordma.counted import Slots
from aiordma.inflight import InFlightTable
from aiordma.request import OpenRequests, WorkRequest
from aiordma.verbs.completion import COMPLETION

__all__ = (
    "BATCH",
    "ChainPort",
    "ClosedPort",
    "Drain",
    "Entry",
    "Port",
    "ReferenceDrain",
    "SharedPort",
)

logger = logging.getLogger("aiordma")

BATCH = 256


class Entry(Protocol):
    """What the in-flight table keeps."""

    def complete(self, raw: tuple[int, ...]) -> None:
        """Take the completion, in the fields' order of WorkCompletion."""


class ReferenceDrain:
    """One channel's queues: their events, their arming, and what completed in them.

    Addresses are those of C's structures. `hub` has `watch_over`, called as something is posted
    while the watchdog does not run (`watched`), and `drain_soon`, called where completions were
    found that cannot be delivered on the spot (`scheduled` until that is reset).
    """

    def __init__(
        self, hub: object, provider: int, channel: int, in_flight: InFlightTable[Any]
    ) -> None:
        self._provider = ffi.cast("struct aiordma_provider *", provider)
        self._in_flight = in_flight
        self._drain = ffi.new("struct aiordma_drain *")
        self._batch = ffi.new("struct aiordma_completion[]", BATCH)
        self._drain.channel = ffi.cast("struct ibv_comp_channel *", channel)
        self._drain.batch = self._batch
        self._drain.capacity = BATCH
        self._queues: Any = None
        self.enabled = True
        """Whether polls find anything; not once the device has failed."""
        self.draining = False
        """Whether completions are being delivered."""
        self.watched = self.scheduled = False
        self.events = self.polls = self.crossings = self.delivered = self.wakes = 0

    def set_queues(self, addresses: list[int]) -> None:
        """Drain these; those known stay armed."""
        drain = self._drain
        armed = {drain.queues[i].queue: drain.queues[i].armed for i in range(drain.queue_count)}
        self._queues = ffi.new("struct aiordma_drained_queue[]", max(1, len(addresses)))
        for i, address in enumerate(addresses):
            queue = ffi.cast("struct ibv_cq *", address)
            self._queues[i].queue, self._queues[i].armed = queue, armed.get(queue, 0)
        drain.queues, drain.queue_count = self._queues, len(addresses)

    @property
    def more(self) -> bool:
        """Whether the batch was full: step again."""
        return bool(self._drain.more)

    def step(self, arm: bool, direct: bool) -> int:
        """Take the channel's events, arm what is not armed, poll a batch, deliver it.

        Args:
            arm: False: the loop does, before it sleeps; here it is always done.
            direct: whether no task is running, so that those who are woken can run at once.

        Returns:
            How many completed, or -errno. Nothing while a step is under way.
        """
        if self.draining:
            return 0
        count = int(lib.aiordma_drain(self._provider, self._drain))
        self.crossings += 1
        self.polls += 1
        self.events += self._drain.events
        if count > 0:
            self.draining = True
            self.delivered += count
            try:
                self._deliver(count)
            finally:
                self.draining = False
        return count

    def _deliver(self, count: int) -> None:
        take = self._in_flight.take
        packed = ffi.buffer(self._batch, count * COMPLETION.size)[:]
        for raw in COMPLETION.iter_unpack(packed):
            entry = take(raw[0])
            if entry is None:
                continue  # its queue pair is gone, and the request was ended then
            try:
                entry.complete(raw)
            except Exception:
                logger.exception("a callback of a completed work request failed")

    def forget_arming(self) -> None:
        """Take no queue to be armed: its event may have been lost."""
        for i in range(self._drain.queue_count):
            self._queues[i].armed = 0


@in_c("Drain")
class Drain(ReferenceDrain):
    """The one that is used."""


class ClosedPort:
    """A port that posts nothing. None for an answer means: post it the general way."""

    def __init__(self) -> None:
        self.ready = False
        """Whether sends may be posted."""
        self.can_receive = False
        self.can_read = False
        """Whether READs were agreed on."""
        self.tells = False
        """Whether the owner wants to hear of each end."""
        self.feeds = False
        """Whether its receives are those of a queue of messages, and not the user's."""

    def open(self, queue_pair: int, max_message: int, max_inline: int) -> None:
        """There is a queue pair, at that address."""

    def send(self, data: Any) -> WorkRequest | None:
        """Post a message."""
        return None

    def receive(self, memory: Any) -> WorkRequest | None:
        """Post a receive."""
        return None

    def write(self, data: Any, remote: Any) -> WorkRequest | None:
        """Post a WRITE."""
        return None

    def read(self, remote: Any, memory: Any) -> WorkRequest | None:
        """Post a READ."""
        return None


@in_c("Port")
class Port(ClosedPort):
    """A queue pair, to post plain requests on: one part, registered, or short enough to go inline.

    Args:
        owner: whose queue pair it is; told of what fails (`post_refused`, `doorbell_failed`).
        drain: where its requests complete.
        sends: the send queue's slots.
        receives: the receive queue's.
        posted: the owner's requests in flight.
        loop: asyncio's, or None.
        domain: where memory has to be registered.
    """

    def __init__(
        self,
        owner: object,
        drain: ReferenceDrain,
        sends: Slots,
        receives: Slots,
        posted: OpenRequests,
        loop: object,
        domain: object,
    ) -> None:
        super().__init__()


@in_c("SharedPort")
class SharedPort(Port):
    """A shared receive queue, to post plain receives on. Of a Port's arguments, the send queue's
    slots are nobody's."""

    def open_shared(self, queue: int, max_message: int) -> None:
        """There is a queue, at that address."""

    def post(self, parts: list[Any]) -> list[WorkRequest] | tuple[int, list[WorkRequest]] | None:
        """Post a receive for each part as one chain, with one call.

        Returns:
            The requests; or the errno with which the device refused one, and the requests before
            it, which are posted; None: they are not plain, or too many, and nothing was posted.
        """
        return None


@in_c("ChainPort")
class ChainPort(ClosedPort):
    """The requests of one chain. Plain ones it makes itself: each takes its slot, and holds its
    memory; bytes that go inline are copied. Nothing is posted before `post`.

    Args:
        port: the queue pair's.
    """

    def __init__(self, port: ClosedPort) -> None:
        super().__init__()
        self.over = False
        """Whether nothing is collected any more: None is then all that it answers."""
        self.posted = 0
        """How many requests the device took."""
        self._requests: list[WorkRequest] = []

    @property
    def usable(self) -> bool:
        """Whether the queue pair may be posted on; if not, the owner says why."""
        return False

    @property
    def count(self) -> int:
        """How many requests there are."""
        return len(self._requests)

    def add(self, request: WorkRequest) -> None:
        """One that is not plain, and was made elsewhere, is the next."""
        self._requests.append(request)

    def requests(self) -> list[WorkRequest]:
        """List all, in order."""
        return list(self._requests)

    def post(self, last_tells: bool, works: int = 0, sges: bytes = b"") -> int:
        """Post all requests in their order, with one call, where any of them is plain.

        Args:
            last_tells: only the last one is signaled.
            works: the address of an array of struct aiordma_send_request: those that were added.
            sges: their parts.

        Returns:
            C's errno, 0 if all were taken; a negative one: all were, and the device could not be
            told.
        """
        raise NotImplementedError("the reference finds no request plain")
