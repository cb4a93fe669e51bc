"""Multicast groups. Each group is joined, and left, with its own identifier.

librdmacm attaches a queue pair to a group only if the joining identifier created the queue pair.
The socket's identifier listens, to answer peers that resolve it, and a listening identifier cannot
join. So this module attaches the queue pair itself.
"""

import ipaddress
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import anyio

from aiordma._base.arguments import wrong_value
from aiordma._base.call_all import call_all
from aiordma._base.calls import UNSUPPORTED
from aiordma._base.enums import CmEventType, PortSpace
from aiordma._base.errors import (
    ClosedError,
    ConnectTimeoutError,
    MulticastError,
    NotSupportedError,
    VerbsCallError,
    detached,
)
from aiordma._connection.event_waiter import EventWaiter, failure_of
from aiordma._datagram.peer import DatagramPeer
from aiordma._endpoint.endpoint import Endpoint
from aiordma._loop.threads import Once, in_thread, outwait
from aiordma.verbs import QueuePair
from aiordma.verbs.identifier import Event, Identifier

logger: logging.Logger = logging.getLogger("aiordma")


def check_group(group: str, source: str) -> str:
    """Return a group's address in its canonical form.

    Raises:
        ValueError: `group` is not a multicast address, or not of the same IP version as the local
            address `source`.
    """
    try:
        address = ipaddress.ip_address(group)
    except ValueError as error:
        expected = "a numeric multicast address, because a group has no host name"
        raise wrong_value(group, "group", expected, "join") from error
    if not address.is_multicast:
        expected = "a multicast address, of 224.0.0.0/4 or ff00::/8"
        raise wrong_value(group, "group", expected, "join")
    version = ipaddress.ip_address(source).version
    if address.version != version:
        expected = f"an IPv{version} group, because the socket's local address is {source}"
        raise wrong_value(group, "group", expected, "join")
    return str(address)


class MulticastGroup:
    """A group that a datagram socket has joined: send to it with `socket.send(data, group)`.

    `socket.receive()` returns the datagrams that other members send to the group, unless it was
    joined with send_only. If the device loops multicast back, it also returns those of this socket.
    Made by `Datagram.join`. The socket leaves the group with `leave`, and when it closes.
    """

    def __init__(
        self, endpoint: Endpoint, identifier: Identifier, address: str, send_only: bool
    ) -> None:
        self.address = address
        """The group's numeric address."""
        self.send_only = send_only
        """Whether it was joined only to send."""
        self._endpoint = endpoint
        self._reactor = endpoint.reactor
        self._identifier = identifier
        self._waiter = EventWaiter(f"join {address}")
        self._peer: DatagramPeer | None = None
        self._failure: Exception | None = None
        self._attached: tuple[QueuePair, bytes, int] | None = None
        self._leaving = False
        self._has_left: Once = Once(endpoint.loop)
        self._on_left: Callable[[], object] = lambda: None
        self._reactor.subscribe(identifier, self._handle)

    def __repr__(self) -> str:
        return f"<MulticastGroup {self.address}{', left' if self._leaving else ''}>"

    @property
    def is_joined(self) -> bool:
        """Whether the group has been joined, was not left, and the membership has not ended."""
        return self._peer is not None and not self._leaving and self._failure is None

    @property
    def peer(self) -> DatagramPeer:
        """The destination of datagrams to all members.

        Raises:
            ClosedError: the group was left.
            MulticastError, DeviceRemovedError: the membership has ended; the error is the cause.
        """
        if self._failure is not None:
            raise detached(self._failure)
        if self._peer is None or self._leaving:
            raise ClosedError(f"the group {self.address} has been left")
        return self._peer

    def _handle(self, event: Event) -> None:
        self._waiter.handle(event)
        if self._peer is not None and event.type in (
            CmEventType.MULTICAST_ERROR,
            CmEventType.DEVICE_REMOVAL,
        ):
            self._failure = failure_of(f"the group {self.address}", event)
            logger.warning("%s", self._failure)

    async def _join(self, source: str) -> None:
        """Join the group. `join_group` calls this."""
        self._identifier.bind(source, 0)
        self._identifier.join_multicast(self.address, send_only=self.send_only)
        event = await self._waiter.until(CmEventType.MULTICAST_JOIN)
        if event.address is None or event.address.gid is None:
            raise MulticastError(
                f"join {self.address}: the connection manager reported no address of the group"
            )
        self._endpoint.require_usable()
        self._peer = DatagramPeer(event.address, event.qp_num, event.qkey)
        if not self.send_only:
            await in_thread(self._endpoint.loop, self._attach, blocks=self._reactor.blocks)

    def _attach(self) -> None:
        pair = self._endpoint.pair.raw
        assert pair is not None
        assert self._peer is not None
        gid, lid = self._peer.address.gid, self._peer.address.lid
        assert gid is not None
        pair.attach_multicast(gid, lid)
        self._attached = pair, gid, lid

    def _start_leaving(self) -> None:
        """Start `leave` in the background, which sets `_has_left` at its end. Idempotent."""
        if self._leaving:
            return
        self._leaving = True
        self._reactor.unsubscribe(self._identifier)
        if not self._reactor.loop.has_ended:  # else no task continues, and waking one fails
            self._waiter.fail(ClosedError(f"join {self.address}: the socket was closed"))

        leave = partial(call_all, [self._detach, self._leave_network])
        self._reactor.destroy(leave, self._finish_leaving)

    def _finish_leaving(self, error: BaseException | None) -> None:
        if error is not None:
            logger.error("leaving %s: %s", self.address, error)
        self._on_left()
        self._reactor.drop(self._identifier, self._has_left.set)

    def _detach(self) -> None:
        if self._attached is not None:
            pair, gid, lid = self._attached
            with suppress(ClosedError):  # the queue pair was already detached and destroyed
                pair.detach_multicast(gid, lid)

    def _leave_network(self) -> None:
        try:
            self._identifier.leave_multicast(self.address)
        except VerbsCallError as error:
            logger.debug("leaving %s: %s", self.address, error)  # the join had not completed

    async def leave(self) -> None:
        """Leave the group. The socket then receives no datagrams from it, and cannot send to it.
        Datagrams that were posted before are still sent. Idempotent.

        Raises:
            EventLoopError: called outside of its event loop; the message says what happens to the
                group.

        Cancellation: the group is still left, and the call returns once it is left.

        See: man rdma_leave_multicast.
        """
        if not self._has_left.is_set():
            self._reactor.require_here(self, self._start_leaving)
        self._start_leaving()
        await outwait(self._has_left)


async def join_group(
    endpoint: Endpoint,
    address: str,
    source: str,
    *,
    send_only: bool,
    timeout: float | None,
    groups: dict[str, MulticastGroup],
) -> MulticastGroup:
    """Join a group with a datagram endpoint. See `Datagram.join`. The group is in `groups` until it
    is left."""
    if address in groups:
        raise ValueError(f"join(): group={address!r} is joined already: leave it first")
    identifier = Identifier(endpoint.reactor.channel, PortSpace.UDP)
    group = MulticastGroup(endpoint, identifier, address, send_only)
    groups[address] = group
    group._on_left = lambda: groups.pop(address, None)
    try:
        with anyio.fail_after(timeout):
            await group._join(source)
    except BaseException as error:
        await group.leave()
        if isinstance(error, VerbsCallError) and error.errno in UNSUPPORTED:
            device = endpoint.hub.context.device_name
            raise NotSupportedError(
                f"multicast group {address}: the kernel joins no such group with {device} "
                "(Linux's connection manager joins none of IPv6 on RoCE v2)"
            ) from error
        if isinstance(error, VerbsCallError):
            raise MulticastError._of_call(f"join {address}", error) from error
        if isinstance(error, TimeoutError) and not isinstance(error, ConnectTimeoutError):
            raise ConnectTimeoutError(
                f"join {address}: the network did not confirm it within {timeout:g} s"
            ) from None
        raise
    return group
