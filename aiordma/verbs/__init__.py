"""Synchronous verbs objects, without an event loop.

with Device("rxe0").open() as context, context.alloc_pd() as domain: ...
"""

from aiordma._base.connection_parameters import ConnectionParameters, Ece
from aiordma._base.device_enums import (
    DeviceCapability,
    OnDemandOperation,
    OnDemandPaging,
    RawPacketCapability,
)
from aiordma._base.enums import (
    AsyncEventType,
    AtomicCapability,
    CmEventType,
    CompletionQueueFlag,
    GidType,
    LinkLayer,
    MemoryAdvice,
    MemoryWindowType,
    Mtu,
    PortSpace,
    PortState,
    QueuePairState,
    QueuePairType,
    SendFlag,
    Transport,
    WorkCompletionFlag,
    WorkCompletionOpcode,
    WorkCompletionStatus,
    WorkRequestOpcode,
)
from aiordma._base.errors import (
    LocalAccessError,
    LocalLengthError,
    LocalProtectionError,
    LocalQueuePairError,
    PeerFlushedError,
    RemoteInvalidRequestError,
    RemoteOperationError,
)
from aiordma.verbs.address import GRH_BYTES, MOST_LID, AddressHandle, AddressVector
from aiordma.verbs.async_event import AsyncEvent, AsyncEvents
from aiordma.verbs.attributes import (
    CompletionModerationCapabilities,
    DeviceAttributes,
    GidEntry,
    OnDemandCapabilities,
    PacketPacingCapabilities,
    PortAttributes,
    ReceiveHashCapabilities,
    SegmentationCapabilities,
    TagMatchingCapabilities,
)
from aiordma.verbs.completion import CompletionChannel, CompletionQueue
from aiordma.verbs.device import Context, Device, ProtectionDomain
from aiordma.verbs.dmabuf import DmabufRegion
from aiordma.verbs.event_channel import Event as CmEvent
from aiordma.verbs.event_channel import EventChannel
from aiordma.verbs.foreign_memory import RegistrableMemory
from aiordma.verbs.identifier import Identifier
from aiordma.verbs.memory import LocalMemory
from aiordma.verbs.memory_window import MemoryWindow
from aiordma.verbs.queue_pair import Capacity, QueuePair, QueuePairAttributes
from aiordma.verbs.raw_parts import RawPart, Sge
from aiordma.verbs.resource import Resource
from aiordma.verbs.send_work import SendWork
from aiordma.verbs.shared_receive import RawSharedReceiveQueue

__all__ = (
    "GRH_BYTES",
    "MOST_LID",
    "AddressHandle",
    "AddressVector",
    "AsyncEvent",
    "AsyncEventType",
    "AsyncEvents",
    "AtomicCapability",
    "Capacity",
    "CmEvent",
    "CmEventType",
    "CompletionChannel",
    "CompletionModerationCapabilities",
    "CompletionQueue",
    "CompletionQueueFlag",
    "ConnectionParameters",
    "Context",
    "Device",
    "DeviceAttributes",
    "DeviceCapability",
    "DmabufRegion",
    "Ece",
    "EventChannel",
    "GidEntry",
    "GidType",
    "Identifier",
    "LinkLayer",
    "LocalAccessError",
    "LocalLengthError",
    "LocalMemory",
    "LocalProtectionError",
    "LocalQueuePairError",
    "MemoryAdvice",
    "MemoryWindow",
    "MemoryWindowType",
    "Mtu",
    "OnDemandCapabilities",
    "OnDemandOperation",
    "OnDemandPaging",
    "PacketPacingCapabilities",
    "PeerFlushedError",
    "PortAttributes",
    "PortSpace",
    "PortState",
    "ProtectionDomain",
    "QueuePair",
    "QueuePairAttributes",
    "QueuePairState",
    "QueuePairType",
    "RawPacketCapability",
    "RawPart",
    "RawSharedReceiveQueue",
    "ReceiveHashCapabilities",
    "RegistrableMemory",
    "RemoteInvalidRequestError",
    "RemoteOperationError",
    "Resource",
    "SegmentationCapabilities",
    "SendFlag",
    "SendWork",
    "Sge",
    "TagMatchingCapabilities",
    "Transport",
    "WorkCompletionFlag",
    "WorkCompletionOpcode",
    "WorkCompletionStatus",
    "WorkRequestOpcode",
)
