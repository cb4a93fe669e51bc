"""The queue pair of an endpoint: its sizes, its entries in a shared completion queue, and the
attributes in force once it is connected."""

import logging
import math
from typing import NamedTuple, Protocol

from aiordma._base.arguments import within_device
from aiordma._base.connection_parameters import DEVICE_MAXIMUM
from aiordma._base.enums import QueuePairAttribute, QueuePairState, QueuePairType
from aiordma._base.errors import TCP_SECONDS, VerbsCallError, retry_seconds
from aiordma._base.options import DEFAULT_OPTIONS, ConnectionOptions
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

_TCP_LEAST = 1.0
"""Seconds of a peer's silence that an iWARP device bears at least: TCP's clock is coarse."""


class Window(Protocol):
    """A memory window of the queue pair."""

    _window: MemoryWindow

    def _free(self) -> None:
        """Free the device's object, in any thread."""

    def _freed(self) -> None:
        """Release the bound memory, on the loop's thread, after `_free`."""


class Sizes(NamedTuple):
    """What a queue pair with some options has on a device."""

    entries: int
    """In a completion queue."""
    cqe: int | None
    """The size of that queue, as the option."""
    has_probe_entry: bool
    """As of `Pair`."""
    capacity: Capacity


def _sizes(hub: DeviceHub, options: ConnectionOptions, header_parts: int, shared: bool) -> Sizes:
    """Return the sizes, which are checked once for the options of programs that name none.

    Raises:
        ValueError: an option exceeds the device's limit; the message has both.
    """
    key = header_parts, shared
    if options is DEFAULT_OPTIONS and key in hub.sizes:
        known: Sizes = hub.sizes[key]
        return known
    limits, device = hub.attributes, hub.context.device_name
    for name, limit in (
        ("initiator_depth", limits.max_qp_init_rd_atom),
        ("responder_resources", limits.max_qp_rd_atom),
    ):
        value = getattr(options, name)
        if value != DEVICE_MAXIMUM:
            within_device(value, name, 0, limit, device)
    receives = 0 if shared else options.receive_queue
    entries, has_probe_entry = options.max_send_wr + receives, False
    if options.keepalive is not None or hub.leaves_silence_to_tcp:
        has_probe_entry = options.max_send_wr < limits.max_qp_wr and (
            options.cqe is None or entries <= options.cqe < limits.max_cqe
        )
    entries += has_probe_entry
    cqe = None if options.cqe is None else options.cqe + has_probe_entry
    hub.check_queue(entries, cqe)
    capacity = Capacity(
        options.max_send_wr + has_probe_entry,
        receives,
        min(options.max_send_sge, limits.max_sge),
        min(options.max_recv_sge + header_parts, limits.max_sge),
        options.max_inline_data,
    )
    capacity._check(hub.context)
    sizes = Sizes(entries, cqe, has_probe_entry, capacity)
    if options is DEFAULT_OPTIONS:
        hub.sizes[key] = sizes
    return sizes


class Pair:
    """See the module. Call `reserve`, then `create`, and `free` at the end."""

    __slots__ = (
        "_hub",
        "_options",
        "_read_depth",
        "_share",
        "_shared",
        "_sizes",
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
        """Its retry_count and ack_timeout."""
        self.has_probe_entry: bool = False
        """Whether the send queue has an entry for the probe of an idle or silent peer."""
        self.windows: dict[int, Window] = {}
        """Until a call has freed them: in the phase DESTROYING, perhaps in a thread."""
        self._hub = hub
        self._options = options
        self._shared: tuple[RawSharedReceiveQueue, CompletionQueue] | None = None
        self._share: CompletionQueueShare | None = None
        self._sizes: Sizes | None = None
        self._read_depth: int | None = None

    # -- creation -------------------------------------------------------------------------------

    async def reserve(
        self,
        service: QueuePairType,
        header_parts: int,
        shared: tuple[RawSharedReceiveQueue, CompletionQueue] | None,
    ) -> None:
        """Reserve the entries that its requests need in a completion queue.

        Args:
            service: its service.
            header_parts: parts of a receive in addition to those of the caller.
            shared: the shared receive queue to use, and the completion queue of its receives; None:
                its own receive queue.

        Raises:
            ValueError: an option exceeds the device's limit; the message has both.
            VerbsCallError: the driver refused.
        """
        self.service, self._shared = service, shared
        self._sizes = sizes = _sizes(self._hub, self._options, header_parts, shared is not None)
        self.has_probe_entry = sizes.has_probe_entry
        needed = sizes.entries, self._options.comp_vector, sizes.cqe
        self._share = self._hub.reserve_at_once(*needed) or await self._hub.reserve(*needed)

    def create(self, identifier: Identifier | Unmanaged, domain: ProtectionDomain) -> None:
        """Create it, on the loop's thread or in a worker."""
        assert self._share is not None
        assert self._sizes is not None
        queue = self._share.queue
        shared, receives = self._shared or (None, queue)
        self.max_message = self._hub.message_limit(identifier.port)
        manager = None if isinstance(identifier, Unmanaged) else identifier
        capacity = self._sizes.capacity
        self.raw = QueuePair(
            *(domain, queue, receives, self.service, capacity, shared), manager=manager
        )
        self.number = self.raw.qp_num

    def free(self) -> None:
        """Give its entries back, once it is destroyed."""
        if self._share is not None and self._sizes is not None:
            self._share.reserved -= self._sizes.entries

    # -- once it is connected -------------------------------------------------------------------

    def set_rnr_timer(self) -> None:
        """Set the delay before the peer resends a message that finds no receive, on the side that
        has connected: there, librdmacm has moved the queue pair to RTS. Not on iWARP."""
        assert self.raw is not None
        delay = {"min_rnr_timer": self._options.min_rnr_timer}
        try:
            self.raw._modify(QueuePairState.RTS, None, None, delay)
        except VerbsCallError as error:
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
            self._read_depth = self.raw.query(QueuePairAttribute.MAX_QP_RD_ATOMIC).max_rd_atomic
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
