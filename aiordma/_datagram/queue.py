"""Datagrams in order of arrival.

There is no flow control: the device drops a datagram for which no receive is posted.
"""

from aiordma._datagram.message import DatagramMessage, Senders
from aiordma._endpoint.arrivals import Arrivals
from aiordma._endpoint.endpoint import Endpoint
from aiordma._requests.pool import Lease
from aiordma.verbs import WorkCompletion

__all__ = ("DatagramQueue",)


class DatagramQueue(Arrivals[DatagramMessage]):
    """The pooled receives of one datagram socket, each of `size` bytes including the GRH."""

    def __init__(self, endpoint: Endpoint, size: int, senders: Senders) -> None:
        super().__init__(endpoint, size, pause=1)
        self._senders = senders

    def _read(self, lease: Lease, completion: WorkCompletion) -> DatagramMessage:
        return DatagramMessage(lease.memory.view, completion, self._senders)
