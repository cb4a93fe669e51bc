"""Synchronous verbs objects, without an event loop.

with Device("rxe0").open() as context, context.alloc_pd() as domain: ...
"""

from aiordma._base.device_enums import (
    DeviceCapability,
    OnDemandOperation,
    OnDemandPaging,
    RawPacketCapability,
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
from aiordma.verbs.completion import CompletionChannel, CompletionQueue, WorkCompletion
from aiordma.verbs.device import (
    Context,
    Device,
    ProtectionDomain,
)
from aiordma.verbs.dmabuf import DmabufRegion
from aiordma.verbs.foreign_memory import RegistrableMemory
from aiordma.verbs.memory import LocalMemory, MemoryRegion, MemorySlice
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
    "AsyncEvents",
    "Capacity",
    "CompletionChannel",
    "CompletionModerationCapabilities",
    "CompletionQueue",
    "Context",
    "Device",
    "DeviceAttributes",
    "DeviceCapability",
    "DmabufRegion",
    "GidEntry",
    "LocalMemory",
    "MemoryRegion",
    "MemorySlice",
    "MemoryWindow",
    "OnDemandCapabilities",
    "OnDemandOperation",
    "OnDemandPaging",
    "PacketPacingCapabilities",
    "PortAttributes",
    "ProtectionDomain",
    "QueuePair",
    "QueuePairAttributes",
    "RawPacketCapability",
    "RawPart",
    "RawSharedReceiveQueue",
    "ReceiveHashCapabilities",
    "RegistrableMemory",
    "Resource",
    "SegmentationCapabilities",
    "SendWork",
    "Sge",
    "TagMatchingCapabilities",
    "WorkCompletion",
)
