"""Datagrams in order of arrival.

There is no flow control: the device drops a datagram for which no receive is posted.
"""

from aiordma._datagram.message import DatagramMessage, Senders
from aiordma._endpoint.arrivals import Arrivals
from aiordma._endpoint.endpoint import Endpoint


class DatagramQueue(Arrivals):
    """The pooled receives of one datagram socket, each of `size` bytes including the GRH."""

    def __init__(self, endpoint: Endpoint, size: int, senders: Senders) -> None:
        super().__init__(endpoint, size)
        self.queue.fed = bool(endpoint.options.receive_buffers)
        self._senders = senders

    async def receive(self) -> DatagramMessage:
        """Return the next datagram. A cancelled wait takes none.

        Raises: as `wait`.
        """
        await self.wait()
        message: DatagramMessage = self.queue.take_datagram(self._senders)
        return message
