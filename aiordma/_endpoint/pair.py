"""The queue pair of an endpoint: its sizes, its entries in a shared completion queue, and the
attributes in force once it is connected."""

import logging
import math
from typing import Protocol

from aiordma._base.arguments import within_device
from aiordma._base.connection_parameters import DEVICE_MAXIMUM
from aiordma._base.enums import QueuePairAttribute, QueuePairState, QueuePairType
from aiordma._base.errors import TCP_SECONDS, VerbsCallError, retry_seconds
from aiordma._base.options import ConnectionOptions
from aiordma._runtime.hub import CompletionQueueShare, DeviceHub
from aiordma._runtime.unmanaged_identifier import Unmanaged
from aiordma.verbs import (
    Capacity,
    CompletionQueue,
    MemoryWindow,
    ProtectionDomain,
    QueuePair,
    RawSharedReceiveQueue,
)
from aiordma.verbs.identifier import Identifier

logger: logging.Logger = logging.getLogger("aiordma")

_IN_FORCE = (
    QueuePairAttribute.STATE
    | QueuePairAttribute.MAX_QP_RD_ATOMIC
    | QueuePairAttribute.RETRY_CNT
    | QueuePairAttribute.TIMEOUT
)
"""The attributes that the handshake has determined."""

_TCP_LEAST = 1.0
"""Seconds of a peer's silence that an iWARP device bears at least: TCP's clock is coarse."""


class Window(Protocol):
    """A memory window of the queue pair."""

    _window: MemoryWindow

    def _free(self) -> None:
        """Free the device's object, in any thread."""

    def _freed(self) -> None:
        """Release the bound memory, on the loop's thread, after `_free`."""


class Pair:
    """See the module. Call `reserve`, then `create`, and `free` at the end."""

    __slots__ = (
        "_entries",
        "_hub",
        "_options",
        "_read_depth",
        "_receives",
        "_share",
        "_shared",
        "has_probe_entry",
        "max_message",
        "number",
        "raw",
        "retries",
        "service",
        "windows",
    )

    def __init__(self, hub: DeviceHub, options: ConnectionOptions) -> None:
        self.raw: QueuePair | None = None
        self.number: int = 0
        self.service: QueuePairType = QueuePairType.RC
        self.max_message: int = 0
        """Bytes of the longest message."""
        self.retries: tuple[int, int] = options.retry_count, options.ack_timeout
        """The actual retry_count and ack_timeout."""
        self.has_probe_entry: bool = False
        """Whether the send queue has an entry for the probe of an idle or silent peer."""
        self.windows: dict[int, Window] = {}
        """Until a call has freed them: in the phase DESTROYING, perhaps in a thread."""
        self._hub = hub
        self._options = options
        self._shared: tuple[RawSharedReceiveQueue, CompletionQueue] | None = None
        self._share: CompletionQueueShare | None = None
        self._entries = self._receives = 0
        self._read_depth: int | None = None

    # -- creation -------------------------------------------------------------------------------

    async def reserve(
        self, service: QueuePairType, shared: tuple[RawSharedReceiveQueue, CompletionQueue] | None
    ) -> None:
        """Reserve the entries that its requests need in a completion queue.

        Args:
            service: its service.
            shared: the shared receive queue to use, and the completion queue of its receives; None:
                its own receive queue.

        Raises:
            ValueError: an option exceeds the device's limit; the message has both.
            VerbsCallError: the driver refused.
        """
        self.service, self._shared = service, shared
        options, limits = self._options, self._hub.attributes
        for name, limit in (
            ("initiator_depth", limits.max_qp_init_rd_atom),
            ("responder_resources", limits.max_qp_rd_atom),
        ):
            value = getattr(options, name)
            if value != DEVICE_MAXIMUM:
                within_device(value, name, 0, limit, self._hub.context.device_name)
        self._receives = 0 if shared is not None else options.receive_queue
        entries = options.max_send_wr + self._receives
        if options.keepalive is not None or self._hub.leaves_silence_to_tcp:
            self.has_probe_entry = options.max_send_wr < limits.max_qp_wr and (
                options.cqe is None or entries <= options.cqe < limits.max_cqe
            )
        spare = int(self.has_probe_entry)
        self._entries = entries + spare
        cqe = None if options.cqe is None else options.cqe + spare
        needed = self._entries, options.comp_vector, cqe
        self._share = self._hub.reserve_at_once(*needed) or await self._hub.reserve(*needed)

    def create(
        self, identifier: Identifier | Unmanaged, domain: ProtectionDomain, header_parts: int
    ) -> None:
        """Create it, on the loop's thread or in a worker. `header_parts` are parts of a receive in
        addition to those of the caller."""
        assert self._share is not None
        options, queue = self._options, self._share.queue
        shared, receives = self._shared or (None, queue)
        max_sge = self._hub.attributes.max_sge
        self.max_message = self._hub.message_limit(identifier.port)
        capacity = Capacity(
            options.max_send_wr + self.has_probe_entry,
            self._receives,
            min(options.max_send_sge, max_sge),
            min(options.max_recv_sge + header_parts, max_sge),
            options.max_inline_data,
        )
        manager = None if isinstance(identifier, Unmanaged) else identifier
        self.raw = QueuePair(
            *(domain, queue, receives, self.service, capacity, shared), manager=manager
        )
        self.number = self.raw.qp_num

    def free(self) -> None:
        """Give its entries back, once it is destroyed."""
        if self._share is not None:
            self._share.reserved -= self._entries

    # -- once it is connected -------------------------------------------------------------------

    def set_up(self) -> None:
        """Query and set the attributes that are available only now. An iWARP device has none."""
        assert self.raw is not None
        in_force = self.raw.query(_IN_FORCE)
        self._read_depth = in_force.max_rd_atomic
        self.retries = in_force.retry_cnt, in_force.timeout
        try:
            # The delay before the peer resends a message that finds no receive.
            current, delay = QueuePairState(in_force.qp_state), self._options.min_rnr_timer
            self.raw._modify(current, None, None, {"min_rnr_timer": delay})
        except (VerbsCallError, ValueError) as error:
            # The peer may have disconnected already, and the queue pair with it.
            logger.debug("min_rnr_timer was not set: %s", error)

    def fail(self) -> None:
        """Move it to the error state, if nothing else does: then it flushes."""
        assert self.raw is not None
        try:
            self.raw.modify(QueuePairState.ERR)
        except (VerbsCallError, ValueError) as error:
            logger.debug("moving to ERR: %s", error)

    @property
    def capacity(self) -> Capacity:
        """Its sizes."""
        return Capacity() if self.raw is None else self.raw.capacity

    @property
    def max_read_depth(self) -> int:
        """How many READs can be outstanding on the peer; 0: none, or the device does not say."""
        if self._read_depth is None and self.raw is not None:
            self._read_depth = self.raw.query(_IN_FORCE).max_rd_atomic
        return self._read_depth or 0

    @property
    def peer_timeout(self) -> float:
        """Seconds after which a peer that acknowledges nothing ends the connection."""
        if self.service is not QueuePairType.RC:
            return math.inf  # no acknowledgements
        seconds = retry_seconds(*self.retries)
        if not self._hub.is_iwarp:
            return seconds
        return min(max(seconds, _TCP_LEAST), TCP_SECONDS)
