"""Classes for annotations: what the package's functions return or take, and no program makes."""

from aiordma._base.opening import Opening
from aiordma._base.options import ConnectionKeywords
from aiordma._base.statistics import DeviceStatistics, ListenerStatistics, RequestStatistics
from aiordma._connection.blocks import BlockTransfer
from aiordma._connection.reconnecting import Reconnecting, Session
from aiordma._datagram.message import DatagramArrival, DatagramReceive
from aiordma._datagram.multicast import MulticastGroup
from aiordma._requests.registrations import RegistrationCache
from aiordma._runtime.address_lookup import ResolvedAddress
from aiordma._runtime.tracing import Trace, TracedRequest

__all__ = (
    "BlockTransfer",
    "ConnectionKeywords",
    "DatagramArrival",
    "DatagramReceive",
    "DeviceStatistics",
    "ListenerStatistics",
    "MulticastGroup",
    "Opening",
    "Reconnecting",
    "RegistrationCache",
    "RequestStatistics",
    "ResolvedAddress",
    "Session",
    "Trace",
    "TracedRequest",
)
