"""Classes that programs seldom name, except in annotations: what a method returns, or takes."""

from aiordma._base.opening import Opening
from aiordma._base.options import ConnectionKeywords
from aiordma._base.statistics import DeviceStatistics, ListenerStatistics, RequestStatistics
from aiordma._connection.blocks import BlockTransfer
from aiordma._connection.chain import Chain
from aiordma._connection.connection import ConnectionInfo
from aiordma._connection.counter import Counter
from aiordma._connection.grant import Grant
from aiordma._connection.messages import Message
from aiordma._connection.reconnecting import Reconnecting, Session
from aiordma._connection.unmanaged_connection import UnmanagedConnection
from aiordma._datagram.message import DatagramMessage, DatagramReceive
from aiordma._datagram.multicast import MulticastGroup
from aiordma._endpoint.windows import BoundWindow
from aiordma._native import DatagramFields as DatagramArrival
from aiordma._requests.registrations import RegistrationCache
from aiordma._runtime.address_lookup import ResolvedAddress
from aiordma._runtime.tracing import Trace, TracedRequest
from aiordma.verbs.memory import MemorySlice

__all__ = (
    "BlockTransfer",
    "BoundWindow",
    "Chain",
    "ConnectionInfo",
    "ConnectionKeywords",
    "Counter",
    "DatagramArrival",
    "DatagramMessage",
    "DatagramReceive",
    "DeviceStatistics",
    "Grant",
    "ListenerStatistics",
    "MemorySlice",
    "Message",
    "MulticastGroup",
    "Opening",
    "Reconnecting",
    "RegistrationCache",
    "RequestStatistics",
    "ResolvedAddress",
    "Session",
    "Trace",
    "TracedRequest",
    "UnmanagedConnection",
)
