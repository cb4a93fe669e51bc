"""Synchronous verbs objects, without an event loop.

with Device("rxe0").open() as context, context.alloc_pd() as domain: ...
"""

from aiordma.verbs.completion import CompletionChannel, CompletionQueue, WorkCompletion
from aiordma.verbs.device import (
    Context,
    Device,
    DeviceAttributes,
    PortAttributes,
    ProtectionDomain,
)
from aiordma.verbs.memory import MemoryRegion, MemorySlice
from aiordma.verbs.queue_pair import AddressVector, Capacity, QueuePair
from aiordma.verbs.resource import Resource

__all__ = (
    "AddressVector",
    "Capacity",
    "CompletionChannel",
    "CompletionQueue",
    "Context",
    "Device",
    "DeviceAttributes",
    "MemoryRegion",
    "MemorySlice",
    "PortAttributes",
    "ProtectionDomain",
    "QueuePair",
    "Resource",
    "WorkCompletion",
)
