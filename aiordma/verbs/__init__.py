"""Synchronous verbs objects, without an event loop.

with Device("rxe0").open() as context, context.alloc_pd() as domain: ...
"""

from aiordma._base.connection_parameters import ConnectionParameters, Ece
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
    PartialPostError,
    PeerFlushedError,
    RemoteInvalidRequestError,
    RemoteOperationError,
)
from aiordma.verbs.address import GRH_BYTES, AddressHandle, AddressVector
from aiordma.verbs.async_event import AsyncEvent, AsyncEvents
from aiordma.verbs.attributes import DeviceAttributes, GidEntry, PortAttributes
from aiordma.verbs.completion import CompletionChannel, CompletionQueue, WorkCompletion
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
    "CompletionQueue",
    "CompletionQueueFlag",
    "ConnectionParameters",
    "Context",
    "Device",
    "DeviceAttributes",
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
    "PartialPostError",
    "PeerFlushedError",
    "PortAttributes",
    "PortSpace",
    "PortState",
    "ProtectionDomain",
    "QueuePair",
    "QueuePairAttributes",
    "QueuePairState",
    "QueuePairType",
    "RawPart",
    "RawSharedReceiveQueue",
    "RegistrableMemory",
    "RemoteInvalidRequestError",
    "RemoteOperationError",
    "Resource",
    "SendFlag",
    "SendWork",
    "Sge",
    "Transport",
    "WorkCompletion",
    "WorkCompletionFlag",
    "WorkCompletionOpcode",
    "WorkCompletionStatus",
    "WorkRequestOpcode",
)
