"""Synchronous verbs objects, without an event loop.

with Device("rxe0").open() as context, context.alloc_pd() as domain: ...
"""

from aiordma.verbs.address import GRH_BYTES, AddressHandle, AddressVector
from aiordma.verbs.completion import CompletionChannel, CompletionQueue, WorkCompletion
from aiordma.verbs.device import (
    Context,
    Device,
    DeviceAttributes,
    PortAttributes,
    ProtectionDomain,
)
from aiordma.verbs.memory import MemoryRegion, MemorySlice
from aiordma.verbs.memory_window import MemoryWindow
from aiordma.verbs.queue_pair import Capacity, QueuePair
from aiordma.verbs.resource import Resource
from aiordma.verbs.send_work import SendWork
from aiordma.verbs.shared_receive import RawSharedReceiveQueue

__all__ = (
    "GRH_BYTES",
    "AddressHandle",
    "AddressVector",
    "Capacity",
    "CompletionChannel",
    "CompletionQueue",
    "Context",
    "Device",
    "DeviceAttributes",
    "MemoryRegion",
    "MemorySlice",
    "MemoryWindow",
    "PortAttributes",
    "ProtectionDomain",
    "QueuePair",
    "RawSharedReceiveQueue",
    "Resource",
    "SendWork",
    "WorkCompletion",
)
