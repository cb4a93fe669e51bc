"""The life of a datagram socket: its queue pair, receives, address handles, groups, and its end.

This module also answers peers that resolve the socket's port, with the queue pair's number. No
connection results, and the identifier of each request is destroyed at once.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import anyio

from aiordma._base.call_all import call_all
from aiordma._base.connection_parameters import ConnectionParameters
from aiordma._base.enums import CmEventType, QueuePairType
from aiordma._base.errors import ClosedError, VerbsCallError
from aiordma._base.options import ConnectionOptions
from aiordma._base.socket_address import address_text
from aiordma._base.states import ConnectionState
from aiordma._datagram.address_handles import AddressHandles, close_all
from aiordma._datagram.local_gid import find_gid, gid_of
from aiordma._datagram.message import Senders
from aiordma._datagram.multicast import MulticastGroup
from aiordma._datagram.peer import UDP_QKEY, DatagramPeer
from aiordma._datagram.queue import DatagramQueue
from aiordma._endpoint.domain_state import DomainState
from aiordma._endpoint.endpoint import Endpoint
from aiordma._endpoint.handshake import Handshake
from aiordma._loop.threads import outwait
from aiordma._runtime.hub import DeviceHub
from aiordma._runtime.reactor import Reactor
from aiordma.verbs import GRH_BYTES, AddressVector
from aiordma.verbs.identifier import Event, Identifier

logger: logging.Logger = logging.getLogger("aiordma")

Result = TypeVar("Result")

BACKLOG = 128


class DatagramEndpoint(Endpoint):
    """See the module. Call `start` before using it, and `aclose` in every case."""

    header_parts = 1

    # Set by `start`:
    senders: Senders
    received: DatagramQueue
    gid: bytes
    gid_index: int
    lid: int
    mtu: int
    _requested_gid_index: int | None

    qkey: int = UDP_QKEY
    service_level: int | None = None

    def __init__(
        self,
        reactor: Reactor,
        hub: DeviceHub,
        identifier: Identifier,
        options: ConnectionOptions,
        private_data: bytes,
        most_handles: int,
        domain: DomainState | None = None,
    ) -> None:
        no_handshake = Handshake(reactor.loop, ConnectionState.ESTABLISHED)
        super().__init__(reactor, hub, identifier, options, no_handshake, domain)
        self.handles: AddressHandles = AddressHandles(
            self.loop, self.memory.domain, most_handles, domain, blocks=reactor.blocks
        )
        self.groups: dict[str, MulticastGroup] = {}
        self._identifier = identifier
        self._private_data = private_data
        self._most_handles = most_handles
        self._resolving: set[anyio.CancelScope] = set()

    def __repr__(self) -> str:
        state = "" if self.cause is None else f": {self.state.value}"
        name = self.hub.context.device_name
        return f"<Datagram {self.pair.number:#x} at {self.local_address} on {name}{state}>"

    @property
    def name(self) -> str:
        """The socket's name for messages."""
        return f"the datagram socket at {address_text(self.local_address)}"

    async def start(
        self, host: str, qkey: int, gid_index: int | None, service_level: int | None
    ) -> None:
        """Create the queue pair, post its receives, and answer peers that resolve its port.

        Args:
            host, qkey, gid_index, service_level: as of `open_datagram`.

        Raises:
            ValueError: an option exceeds the device's limit; the message has both.
            VerbsCallError: the driver refused.
        """
        self._requested_gid_index, self.service_level = gid_index, service_level
        context, port = self.hub.context, self.identifier.port
        attributes = await self.calls.run(lambda: context.query_port(port))
        self.mtu = attributes.active_mtu.bytes
        self.lid = attributes.lid
        self.gid_index, self.gid = await self.calls.run(
            lambda: (
                find_gid(context, port, host)
                if gid_index is None
                else (gid_index, gid_of(context, port, gid_index))
            ),
        )
        await self.open(QueuePairType.UD)
        self.work.port.max_datagram = self.mtu
        pair = self.pair.raw
        assert pair is not None
        if qkey != UDP_QKEY:
            await self.calls.run(lambda: pair.modify(qkey=qkey))
            self.qkey = qkey
        self.senders = Senders(
            context,
            port,
            self.gid_index,
            qkey=self.qkey,
            most=self._most_handles,
            service_level=service_level,
        )
        self.work.port.set_senders(self.senders)
        self.received = DatagramQueue(self, GRH_BYTES + self.mtu, self.senders)
        self.teardown.on_closed.insert(0, self.received.queue.discard)
        if self.options.receive_buffers:
            self.received.fill()
        if qkey == UDP_QKEY:
            # Only with this key: the connection manager sends it to peers in any case.
            self._identifier.listen(BACKLOG)

    # -- answering peers ----------------------------------------------------------------------

    def _handle_event(self, event: Event) -> None:
        if event.type is CmEventType.CONNECT_REQUEST:
            identifier = Identifier(self.reactor.channel, key=event.new_key)
            try:
                self._accept(identifier)
            finally:
                self.reactor.drop(identifier)
        else:
            super()._handle_event(event)

    def _accept(self, identifier: Identifier) -> None:
        if self.cause is not None:
            return
        answer = ConnectionParameters(private_data=self._private_data, qp_num=self.pair.number)
        try:
            identifier.accept(answer)
        except VerbsCallError as error:
            # The peer repeats its request, or times out.
            logger.debug("answering %s: %s", identifier.peer_address, error)

    # -- resolving peers ----------------------------------------------------------------------

    def path(self, resolved: AddressVector) -> AddressVector:
        """Return a path that the connection manager resolved, with the gid_index and service_level
        of `open_datagram` if these were given."""
        gid_index, service_level = self._requested_gid_index, self.service_level
        return replace(
            resolved,
            gid_index=resolved.gid_index if gid_index is None else gid_index,
            service_level=resolved.service_level if service_level is None else service_level,
        )

    async def resolve(self, resolving: Awaitable[DatagramPeer]) -> DatagramPeer:
        """Await a resolution until the socket ends. If it ends first, raise its cause."""
        scope = anyio.CancelScope()
        self._resolving.add(scope)
        try:
            with scope:
                return await resolving
        finally:
            self._resolving.remove(scope)
        self.require_usable()
        raise ClosedError("this datagram socket is at its end")

    # -- the end --------------------------------------------------------------------------------

    def _flush(self) -> None:
        if not self.loop.has_ended:  # else no task continues, and cancelling one fails
            for scope in self._resolving:
                scope.cancel()
        for group in list(self.groups.values()):
            group._start_leaving()
        super()._flush()

    def require_usable(self) -> None:
        """Do nothing while requests may be posted. Otherwise raise as `Endpoint.require_usable`."""
        self.require_same_process()
        if self.state is ConnectionState.CLOSED:
            raise ClosedError("this datagram socket is closed")
        super().require_usable()

    def _release(self) -> Callable[[], object] | None:
        handles, rest = self.handles.detach(), super()._release()
        if not handles:
            return rest
        closing = partial(close_all, handles)
        return closing if rest is None else partial(call_all, [closing, rest])

    async def aclose(self) -> None:
        """Close, and wait for the end, also if the task is cancelled. The wait is short."""
        groups = list(self.groups.values())
        await self.teardown.aclose()
        if not self.is_inherited and not self.loop.has_ended:
            for group in groups:
                await outwait(group._has_left)
