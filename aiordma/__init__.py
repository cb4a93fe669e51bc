"""RDMA for asyncio and trio: every posted work request is an awaitable.

    async with aiordma.connect("192.0.2.1", 7471) as connection:
        await connection.send(b"hello")
        print(await connection.receive())

Importing the package opens nothing. Libraries and devices are opened at their first use.
"""

import sys

from anyio import EndOfStream

from aiordma._base.connection_parameters import ConnectionParameters, Ece
from aiordma._base.enums import (
    Access,
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
    AddressError,
    BusyError,
    ClosedError,
    ConnectTimeoutError,
    DeviceEventError,
    DeviceRemovedError,
    DeviceRequirementError,
    DisconnectedError,
    EventLoopError,
    FlushedError,
    ForkError,
    LocalAccessError,
    LocalLengthError,
    LocalProtectionError,
    LocalQueuePairError,
    MulticastError,
    NoDeviceError,
    NoMemoryError,
    NotPostedError,
    NotSupportedError,
    PartialPostError,
    PeerFlushedError,
    PeerGoneError,
    QueueFullError,
    RdmaConnectionError,
    RdmaError,
    ReceiverNotReadyError,
    RejectedError,
    RemoteAccessError,
    RemoteInvalidRequestError,
    RemoteOperationError,
    RetryExceededError,
    RouteError,
    StreamProtocolError,
    UnreachableError,
    VerbsCallError,
    WorkCompletionError,
)
from aiordma._base.opening import Opening
from aiordma._base.options import ConnectionKeywords, ConnectionOptions
from aiordma._base.ranges import RemoteMemory
from aiordma._base.statistics import DeviceStatistics, ListenerStatistics, RequestStatistics
from aiordma._connection.chain import Chain
from aiordma._connection.connection import Connection, ConnectionInfo
from aiordma._connection.connection_request import ConnectionRequest
from aiordma._connection.connector import connect, prepare_connection
from aiordma._connection.domain import Domain
from aiordma._connection.domain_source import open_domain
from aiordma._connection.grant import Grant
from aiordma._connection.listener import Listener, listen
from aiordma._connection.messages import Message
from aiordma._connection.reconnecting import (
    ConnectKeywords,
    Reconnecting,
    Session,
    reconnecting,
)
from aiordma._connection.shared_receive import SharedReceiveQueue
from aiordma._connection.shared_source import open_shared_receive
from aiordma._connection.unmanaged_connection import (
    QueuePairAddress,
    UnmanagedConnection,
    open_queue_pair,
)
from aiordma._datagram.datagram import Datagram
from aiordma._datagram.datagram_source import open_datagram
from aiordma._datagram.message import DatagramArrival, DatagramMessage, DatagramReceive
from aiordma._datagram.multicast import MulticastGroup
from aiordma._datagram.peer import DatagramPeer
from aiordma._endpoint.windows import BoundWindow
from aiordma._loop.polling import new_event_loop, run
from aiordma._requests.registrations import RegistrationCache
from aiordma._requests.request import WorkRequest
from aiordma._runtime.address_lookup import ResolvedAddress, devices, resolve
from aiordma._runtime.device_statistics import statistics
from aiordma._runtime.tracing import Trace, TracedRequest, trace
from aiordma.verbs import (
    GRH_BYTES,
    AddressHandle,
    AddressVector,
    AsyncEvent,
    AsyncEvents,
    Capacity,
    CompletionChannel,
    CompletionQueue,
    Context,
    Device,
    DeviceAttributes,
    DmabufRegion,
    GidEntry,
    LocalMemory,
    MemoryRegion,
    MemorySlice,
    MemoryWindow,
    PortAttributes,
    ProtectionDomain,
    QueuePair,
    QueuePairAttributes,
    RawSharedReceiveQueue,
    RegistrableMemory,
    Resource,
    SendWork,
    Sge,
    WorkCompletion,
)
from aiordma.verbs.event_channel import Event as CmEvent
from aiordma.verbs.event_channel import EventChannel
from aiordma.verbs.identifier import Identifier

__all__ = (
    "GRH_BYTES",
    "Access",
    "AddressError",
    "AddressHandle",
    "AddressVector",
    "AsyncEvent",
    "AsyncEventType",
    "AsyncEvents",
    "AtomicCapability",
    "BoundWindow",
    "BusyError",
    "Capacity",
    "Chain",
    "ClosedError",
    "CmEvent",
    "CmEventType",
    "CompletionChannel",
    "CompletionQueue",
    "CompletionQueueFlag",
    "ConnectKeywords",
    "ConnectTimeoutError",
    "Connection",
    "ConnectionInfo",
    "ConnectionKeywords",
    "ConnectionOptions",
    "ConnectionParameters",
    "ConnectionRequest",
    "Context",
    "Datagram",
    "DatagramArrival",
    "DatagramMessage",
    "DatagramPeer",
    "DatagramReceive",
    "Device",
    "DeviceAttributes",
    "DeviceEventError",
    "DeviceRemovedError",
    "DeviceRequirementError",
    "DeviceStatistics",
    "DisconnectedError",
    "DmabufRegion",
    "Domain",
    "Ece",
    "EndOfStream",
    "EventChannel",
    "EventLoopError",
    "FlushedError",
    "ForkError",
    "GidEntry",
    "GidType",
    "Grant",
    "Identifier",
    "LinkLayer",
    "Listener",
    "ListenerStatistics",
    "LocalAccessError",
    "LocalLengthError",
    "LocalMemory",
    "LocalProtectionError",
    "LocalQueuePairError",
    "MemoryAdvice",
    "MemoryRegion",
    "MemorySlice",
    "MemoryWindow",
    "MemoryWindowType",
    "Message",
    "Mtu",
    "MulticastError",
    "MulticastGroup",
    "NoDeviceError",
    "NoMemoryError",
    "NotPostedError",
    "NotSupportedError",
    "Opening",
    "PartialPostError",
    "PeerFlushedError",
    "PeerGoneError",
    "PortAttributes",
    "PortSpace",
    "PortState",
    "ProtectionDomain",
    "QueueFullError",
    "QueuePair",
    "QueuePairAddress",
    "QueuePairAttributes",
    "QueuePairState",
    "QueuePairType",
    "RawSharedReceiveQueue",
    "RdmaConnectionError",
    "RdmaError",
    "ReceiverNotReadyError",
    "Reconnecting",
    "RegistrableMemory",
    "RegistrationCache",
    "RejectedError",
    "RemoteAccessError",
    "RemoteInvalidRequestError",
    "RemoteMemory",
    "RemoteOperationError",
    "RequestStatistics",
    "ResolvedAddress",
    "Resource",
    "RetryExceededError",
    "RouteError",
    "SendFlag",
    "SendWork",
    "Session",
    "Sge",
    "SharedReceiveQueue",
    "StreamProtocolError",
    "Trace",
    "TracedRequest",
    "Transport",
    "UnmanagedConnection",
    "UnreachableError",
    "VerbsCallError",
    "WorkCompletion",
    "WorkCompletionError",
    "WorkCompletionFlag",
    "WorkCompletionOpcode",
    "WorkCompletionStatus",
    "WorkRequest",
    "WorkRequestOpcode",
    "connect",
    "devices",
    "listen",
    "new_event_loop",
    "open_datagram",
    "open_domain",
    "open_queue_pair",
    "open_shared_receive",
    "prepare_connection",
    "reconnecting",
    "resolve",
    "run",
    "statistics",
    "trace",
)

__version__ = "0.1.0"
"""The package's version. pyproject.toml takes it from here."""


def _name_after_the_package() -> None:
    """Set the module of each public class, so that messages, tracebacks and help() print the public
    name: `aiordma.ClosedError`, or `aiordma.verbs.DeviceCapability` for a class that only
    `aiordma.verbs` exports."""
    for module in (f"{__name__}.verbs", __name__):
        public = sys.modules[module]
        for each in [getattr(public, name) for name in public.__all__]:
            defined = getattr(each, "__module__", "")
            if defined.startswith(f"{__name__}.") and hasattr(each, "__name__"):
                each.__module__ = module


_name_after_the_package()
