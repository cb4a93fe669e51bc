"""listen(): connection requests, accepted or rejected, and served."""

import logging
import warnings
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Unpack

import anyio
from anyio.abc import Listener as AbstractListener
from anyio.abc import TaskGroup

from aiordma.address_lookup import numeric_address
from aiordma.connection import Connection, ConnectionInfo
from aiordma.connection_parameters import MAX_ACCEPT_PRIVATE_DATA, check_private_data
from aiordma.connection_request import ConnectionRequest
from aiordma.device_choice import with_device
from aiordma.enums import CmEventType
from aiordma.errors import ClosedError, DeviceRemovedError, RdmaConnectionError
from aiordma.event_loop import Waiter
from aiordma.options import ConnectionKeywords, ConnectionOptions
from aiordma.process import here, require_same_process
from aiordma.provider import Provider, wanted_device
from aiordma.rdmacm import Event, Identifier
from aiordma.reactor import Reactor, acquire_reactor
from aiordma.shared_receive import SharedReceiveQueue
from aiordma.shared_source import ListenerReceives
from aiordma.socket_address import SocketAddress
from aiordma.threads import outwait
from aiordma.verbs.device import require_device

__all__ = ("Listener", "listen")

logger = logging.getLogger("aiordma")

KERNEL_BACKLOG_RESERVE = 128


async def listen(
    host: str = "0.0.0.0",
    port: int = 0,
    *,
    backlog: int = 128,
    device: str = "auto",
    accept_timeout: float = 30.0,
    ipv6_only: bool | None = None,
    shared_receive: SharedReceiveQueue | int | None = None,
    **options: Unpack[ConnectionKeywords],
) -> "Listener":
    """Listen for connections, on every real RDMA device or on the one that has the address; on the
    built-in software device where there is none, or none has it.

    Args:
        host: a local address; "0.0.0.0" is all of IPv4's, "::" all of both versions'. A
            link-local one has its interface behind it: "fe80::1%eth0".
        port: in RDMA's TCP port space; 0 takes a free one (`listener.port`).
        backlog: connection requests that may wait to be accepted; further ones are rejected.
        device: "auto", or the name of the only device to accept on, "software" for the built-in.
        accept_timeout: seconds that a peer may take to finish an accepted connection.
        ipv6_only: with "::", leave IPv4's port of that number to others; None: as the system
            has it (sysctl net.ipv6.bindv6only).
        shared_receive: take the receives of all accepted connections from there; a number makes
            a queue of so many pooled receives, of receive_size bytes, per device.
        options: of every accepted connection: see ConnectionOptions.

    Raises:
        NoDeviceError: a real device is insisted on, and there is none of its name here.
        VerbsCallError: the address or port cannot be had; the message says why.
    """
    if backlog < 1:
        # Zero means a system default to rdma_listen, and dropping without a word beyond it.
        raise ValueError(f"backlog={backlog} is not 1 or more")
    if ipv6_only is not None and ":" not in host:
        raise ValueError(f"ipv6_only={ipv6_only}: {host!r} is no numeric IPv6 address")
    chosen = ConnectionOptions(**options)
    ListenerReceives(shared_receive, chosen.receive_size)  # what is wrong with these is said first
    wanted = wanted_device(device)
    if wanted is not None:
        require_device(wanted)
    numeric = await numeric_address(host)

    async def attempt(provider: Provider) -> Listener:
        receives = ListenerReceives(shared_receive, chosen.receive_size)
        reactor = await acquire_reactor(provider)
        try:
            identifier = Identifier(reactor.channel)
        except BaseException:
            reactor.release()
            raise
        listener = Listener(reactor, identifier, chosen, backlog, wanted, accept_timeout, receives)
        try:
            if chosen.tos is not None:
                identifier.set_tos(chosen.tos)
            if ipv6_only is not None:
                identifier.set_ipv6_only(ipv6_only)
            identifier.bind(numeric, port)
            # The kernel drops what is beyond its backlog without a word: ours rejects before that.
            identifier.listen(backlog + KERNEL_BACKLOG_RESERVE)
        except BaseException:
            await listener.aclose()
            raise
        return listener

    return await with_device(device, numeric, attempt)


class Listener(AbstractListener[Connection]):
    """Listens until closed: `accept` one by one, or `serve` all. An anyio Listener."""

    def __init__(
        self,
        reactor: Reactor,
        identifier: Identifier,
        options: ConnectionOptions,
        backlog: int,
        device: str | None,
        accept_timeout: float,
        receives: ListenerReceives,
    ) -> None:
        self._process = here.pid
        self.reactor = reactor
        self.options = options
        self.accept_timeout = accept_timeout
        self.receives = receives
        self._identifier = identifier
        self._backlog = backlog
        self._device = device
        self._requests: deque[ConnectionRequest] = deque()
        self._waiters: deque[Waiter] = deque()
        self._closed = False
        self._failure: DeviceRemovedError | None = None
        self._leaving = 0
        self._gave_back = anyio.Event()
        reactor.subscribe(identifier, self._handle, self)

    def __repr__(self) -> str:
        return f"<Listener on {'closed' if self._closed else self.local_address}>"

    @property
    def local_address(self) -> SocketAddress | None:
        """(host, port) that it is bound to."""
        return self._identifier.local_address

    @property
    def port(self) -> int:
        """The port that it listens on."""
        address = self.local_address
        return address[1] if address else 0

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """The typed attributes of anyio."""
        return {ConnectionInfo.local_address: lambda: self.local_address}

    def _handle(self, event: Event) -> None:
        if event.type is not CmEventType.CONNECT_REQUEST:
            if event.type is CmEventType.DEVICE_REMOVAL:
                self._failure = DeviceRemovedError(f"{self!r}: its RDMA device was removed")
                self._wake_all()
            return
        identifier = Identifier(self.reactor.channel, key=event.new_key)
        request = ConnectionRequest(
            self.reactor, self.options, self.accept_timeout, self.receives, identifier, event
        )
        self.reactor.subscribe(identifier, request.handle_event, request)
        if self._closed or len(self._requests) >= self._backlog or not self._is_ours(identifier):
            self._turn_away(request)
            return
        self._requests.append(request)
        if self._waiters:
            self._waiters.popleft().wake()

    def _is_ours(self, identifier: Identifier) -> bool:
        if self._device is None:
            return True
        context = identifier.context()
        try:
            return context.device_name == self._device
        finally:
            context.close()

    def _turn_away(self, request: ConnectionRequest) -> None:
        self._leaving += 1
        request.reject_later(self._has_left)

    def _has_left(self) -> None:
        self._leaving -= 1
        if not self._leaving and self._closed:
            self._gave_back.set()

    async def request(self) -> ConnectionRequest:
        """Return the next peer that wants to connect, to be accepted or rejected. A cancelled
        wait loses none.

        Raises:
            ClosedError: the listener was closed.
            DeviceRemovedError: its RDMA device was removed.
            ForkError: this is a child of the process that listens.
        """
        require_same_process(self._process, repr(self))
        while not self._requests:
            if self._closed:
                raise ClosedError("this listener is closed")
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            waiter = self.reactor.loop.waiter()
            self._waiters.append(waiter)
            try:
                await waiter.wait()
            except BaseException:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
                elif self._requests and self._waiters:
                    self._waiters.popleft().wake()  # pass on the wake-up that found us cancelled
                raise
        return self._requests.popleft()

    async def accept(self, *, private_data: bytes = b"") -> Connection:
        """Accept the next peer and return the established connection.

        Raises:
            ValueError: more than 196 bytes of private data; nobody was accepted.
            RdmaConnectionError: that peer went away; call again for the next.
            ClosedError: the listener was closed.
        """
        check_private_data(private_data, MAX_ACCEPT_PRIVATE_DATA, "an accept")
        request = await self.request()
        return await request.accept(private_data=private_data)

    async def serve(
        self,
        handler: Callable[[Connection], Any],
        task_group: TaskGroup | None = None,
    ) -> None:
        """Accept every peer, and run `handler(connection)` for each in a task of its own, until
        cancelled or closed.

        A connection is closed when its handler returns. What a handler raises ends its connection
        only: what the peer or the network did is logged briefly, all else with its traceback.

        Args:
            handler: an async function of one connection.
            task_group: where to run the handlers; None: a group of its own.
        """
        if task_group is not None:
            await self._serve(handler, task_group)
            return
        async with anyio.create_task_group() as own:
            await self._serve(handler, own)

    async def _serve(self, handler: Callable[[Connection], Any], group: TaskGroup) -> None:
        while True:
            try:
                request = await self.request()
            except ClosedError:
                return
            group.start_soon(self._handle_one, request, handler)

    async def _handle_one(
        self, request: ConnectionRequest, handler: Callable[[Connection], Awaitable[Any]]
    ) -> None:
        try:
            async with await request.accept() as connection:
                await handler(connection)
        except (RdmaConnectionError, anyio.BrokenResourceError, anyio.EndOfStream) as error:
            logger.info("%s ended: %s", request.peer_address, error)
        except Exception:
            logger.exception("the handler of %s failed", request.peer_address)

    async def aclose(self) -> None:
        """Stop listening; reject who waits. Accepted connections live on. Idempotent."""
        if self._process != here.pid:
            return  # all of it is the parent's
        if not self._closed:
            self._closed = True
            self.receives.close()
            self._wake_all()
            self._leaving += 1
            while self._requests:
                self._turn_away(self._requests.popleft())
            self.reactor.unsubscribe(self._identifier)
            self.reactor.destroy(
                self._identifier.close, lambda: self.reactor.release(self._has_left)
            )
        await outwait(self._gave_back)

    def _wake_all(self) -> None:
        while self._waiters:
            self._waiters.popleft().wake()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self._process == here.pid:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=1, source=self)
