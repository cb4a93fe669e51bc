"""RDMA for asyncio and trio: every posted work request is an awaitable.

    async with await aiordma.connect("192.0.2.1", 7471) as connection:
        await connection.send(b"hello")
        print(await connection.receive())

Importing opens nothing; the libraries and devices are opened at first use.
"""

from aiordma.address_lookup import ResolvedAddress, devices, resolve
from aiordma.chain import Chain
from aiordma.connection import Connection, ConnectionInfo
from aiordma.connection_parameters import ConnectionParameters, Ece
from aiordma.connection_request import ConnectionRequest
from aiordma.connector import connect
from aiordma.datagram import Datagram, open_datagram
from aiordma.datagram_message import DatagramArrival, DatagramMessage, DatagramReceive
from aiordma.datagram_peer import DatagramPeer
from aiordma.enums import (
    Access,
    AsyncEventType,
    CmEventType,
    GidType,
    MemoryWindowType,
    Mtu,
    PortSpace,
    QueuePairState,
    QueuePairType,
    SendFlag,
    WorkCompletionFlag,
    WorkCompletionOpcode,
    WorkCompletionStatus,
    WorkRequestOpcode,
)
from aiordma.errors import (
    AddressError,
    BusyError,
    ClosedError,
    ConnectTimeoutError,
    DeviceRemovedError,
    DisconnectedError,
    FlushedError,
    LocalAccessError,
    LocalLengthError,
    LocalProtectionError,
    LocalQueuePairError,
    MulticastError,
    NoDeviceError,
    NotSupportedError,
    PartialPostError,
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
    UnreachableError,
    VerbsCallError,
    WorkCompletionError,
)
from aiordma.event_channel import Event as CmEvent
from aiordma.event_channel import EventChannel
from aiordma.listener import Listener, listen
from aiordma.messages import Message
from aiordma.multicast import MulticastGroup
from aiordma.options import ConnectionKeywords, ConnectionOptions
from aiordma.queue_pairs import QueuePairAddress, UnmanagedConnection, open_queue_pair
from aiordma.ranges import RemoteMemory
from aiordma.rdmacm import Identifier
from aiordma.request import WorkRequest
from aiordma.verbs import (
    GRH_BYTES,
    AddressHandle,
    AddressVector,
    Capacity,
    CompletionChannel,
    CompletionQueue,
    Context,
    Device,
    DeviceAttributes,
    MemoryRegion,
    MemorySlice,
    MemoryWindow,
    PortAttributes,
    ProtectionDomain,
    QueuePair,
    RawSharedReceiveQueue,
    Resource,
    SendWork,
    WorkCompletion,
)
from aiordma.windows import BoundWindow

__all__ = (
    "GRH_BYTES",
    "Access",
    "AddressError",
    "AddressHandle",
    "AddressVector",
    "AsyncEventType",
    "BoundWindow",
    "BusyError",
    "Capacity",
    "Chain",
    "ClosedError",
    "CmEvent",
    "CmEventType",
    "CompletionChannel",
    "CompletionQueue",
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
    "DeviceRemovedError",
    "DisconnectedError",
    "Ece",
    "EventChannel",
    "FlushedError",
    "GidType",
    "Identifier",
    "Listener",
    "LocalAccessError",
    "LocalLengthError",
    "LocalProtectionError",
    "LocalQueuePairError",
    "MemoryRegion",
    "MemorySlice",
    "MemoryWindow",
    "MemoryWindowType",
    "Message",
    "Mtu",
    "MulticastError",
    "MulticastGroup",
    "NoDeviceError",
    "NotSupportedError",
    "PartialPostError",
    "PortAttributes",
    "PortSpace",
    "ProtectionDomain",
    "QueueFullError",
    "QueuePair",
    "QueuePairAddress",
    "QueuePairState",
    "QueuePairType",
    "RawSharedReceiveQueue",
    "RdmaConnectionError",
    "RdmaError",
    "ReceiverNotReadyError",
    "RejectedError",
    "RemoteAccessError",
    "RemoteInvalidRequestError",
    "RemoteMemory",
    "RemoteOperationError",
    "ResolvedAddress",
    "Resource",
    "RetryExceededError",
    "RouteError",
    "SendFlag",
    "SendWork",
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
    "open_datagram",
    "open_queue_pair",
    "resolve",
)
