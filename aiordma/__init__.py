"""RDMA for asyncio and trio: every posted work request is an awaitable.

    async with aiordma.connect("192.0.2.1", 7471) as connection:
        await connection.send(b"hello")
        print(await connection.receive())

Importing the package opens nothing. Libraries and devices are opened at their first use.
"""

import sys

from anyio import EndOfStream

from aiordma import types as types
from aiordma import verbs as verbs
from aiordma._base.enums import Access
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
    MulticastError,
    NoDeviceError,
    NotPostedError,
    NotSupportedError,
    PeerGoneError,
    QueueFullError,
    RdmaConnectionError,
    RdmaError,
    ReceiverNotReadyError,
    RejectedError,
    RemoteAccessError,
    RetryExceededError,
    RouteError,
    UnreachableError,
    VerbsCallError,
    WorkCompletionError,
)
from aiordma._base.options import ConnectionOptions
from aiordma._base.ranges import RemoteMemory
from aiordma._connection.blocks import Blocks
from aiordma._connection.connection import Connection
from aiordma._connection.connection_request import ConnectionRequest
from aiordma._connection.connector import connect, prepare_connection
from aiordma._connection.domain import Domain
from aiordma._connection.listener import Listener, listen
from aiordma._connection.open_domain import open_domain
from aiordma._connection.open_shared_receive import open_shared_receive
from aiordma._connection.rails import Rails, open_rails
from aiordma._connection.reconnecting import reconnecting
from aiordma._connection.shared_receive import SharedReceiveQueue
from aiordma._connection.unmanaged_connection import QueuePairAddress, open_queue_pair
from aiordma._datagram.datagram import Datagram
from aiordma._datagram.open_datagram import open_datagram
from aiordma._datagram.peer import DatagramPeer
from aiordma._loop.polling import new_event_loop, run
from aiordma._requests.request import WorkRequest
from aiordma._runtime.address_lookup import devices, resolve
from aiordma._runtime.device_statistics import statistics
from aiordma._runtime.tracing import trace
from aiordma.verbs.memory import MemoryRegion

__all__ = (
    "Access",
    "AddressError",
    "Blocks",
    "BusyError",
    "ClosedError",
    "ConnectTimeoutError",
    "Connection",
    "ConnectionOptions",
    "ConnectionRequest",
    "Datagram",
    "DatagramPeer",
    "DeviceEventError",
    "DeviceRemovedError",
    "DeviceRequirementError",
    "DisconnectedError",
    "Domain",
    "EndOfStream",
    "EventLoopError",
    "FlushedError",
    "ForkError",
    "Listener",
    "MemoryRegion",
    "MulticastError",
    "NoDeviceError",
    "NotPostedError",
    "NotSupportedError",
    "PeerGoneError",
    "QueueFullError",
    "QueuePairAddress",
    "Rails",
    "RdmaConnectionError",
    "RdmaError",
    "ReceiverNotReadyError",
    "RejectedError",
    "RemoteAccessError",
    "RemoteMemory",
    "RetryExceededError",
    "RouteError",
    "SharedReceiveQueue",
    "UnreachableError",
    "VerbsCallError",
    "WorkCompletionError",
    "WorkRequest",
    "connect",
    "devices",
    "listen",
    "new_event_loop",
    "open_datagram",
    "open_domain",
    "open_queue_pair",
    "open_rails",
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
    name, such as `aiordma.ClosedError` or `aiordma.verbs.QueuePair`."""
    for module in (f"{__name__}.types", f"{__name__}.verbs", __name__):
        public = sys.modules[module]
        for each in [getattr(public, name) for name in public.__all__]:
            defined = getattr(each, "__module__", "")
            if defined.startswith((f"{__name__}._", f"{__name__}.verbs.")):
                each.__module__ = module


_name_after_the_package()
