"""listen(): a listener, which accepts or rejects connection requests, and serves connections."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar, Unpack

import anyio
from anyio.abc import Listener as AbstractListener
from anyio.abc import TaskGroup

from aiordma._base.arguments import wrong_type
from aiordma._base.connection_parameters import IN_ACCEPT, check_private_data
from aiordma._base.errors import (
    ClosedError,
)
from aiordma._base.opening import opens
from aiordma._base.options import (
    ConnectionKeywords,
    ConnectionOptions,
)
from aiordma._base.process import never_pickled
from aiordma._base.socket_address import SocketAddress
from aiordma._base.statistics import ListenerStatistics
from aiordma._connection.connection import Connection, ConnectionInfo
from aiordma._connection.connection_request import ConnectionRequest
from aiordma._connection.domain import DomainArgument
from aiordma._connection.handler_errors import log_failure
from aiordma._connection.handshakes import Acceptance
from aiordma._connection.listener_endpoint import ListenerEndpoint, open_listener
from aiordma._connection.shared_receive import SharedReceiveQueue

Accepted = TypeVar("Accepted")


class BaseListener(AbstractListener[Accepted]):
    """What `Listener` and `aiordma.streams.StreamListener` share."""

    _endpoint: ListenerEndpoint

    __reduce__ = never_pickled

    @property
    def local_address(self) -> SocketAddress | None:
        """The (host, port) that the listener is bound to, also after it was closed."""
        return self._endpoint.local_address

    @property
    def port(self) -> int:
        """The port that the listener listens on."""
        return self._endpoint.port

    async def aclose(self) -> None:
        """Stop listening, and reject the waiting peers. What it accepted stays open. Idempotent.

        Raises:
            EventLoopError: called outside of its event loop; the message says what happens to the
                listener.
            VerbsCallError: the driver refused to destroy the listener's identifier. Its port stays
                in use for the life of the process, and a second call raises the same error.

        Cancellation: the listener still closes, and the call returns once it is closed.
        """
        await self._endpoint.aclose()

    def _close_soon(self) -> None:
        """Stop listening, and close in the background. `aclose` waits for the end."""
        self._endpoint.teardown.close()


@opens
async def listen(
    host: str = "0.0.0.0",
    port: int = 0,
    *,
    backlog: int = 128,
    device: str = "auto",
    accept_timeout: float = 30.0,
    ipv6_only: bool | None = None,
    shared_receive: SharedReceiveQueue | int | None = None,
    domain: DomainArgument = None,
    options: ConnectionOptions | None = None,
    **keywords: Unpack[ConnectionKeywords],
) -> "Listener":
    """Listen for connections. Await the call, or enter it with `async with`.

    The listener uses every real RDMA device, or the real device that has the address. If there is
    no such device, it uses the built-in software device.

    Args:
        host: a local address; "0.0.0.0" is all IPv4 addresses, "::" all addresses of both versions.
            A link-local address includes its interface: "fe80::1%eth0". A listener has one address:
            of a name with several, the first one of IPv4, or else the first one. So "localhost" is
            127.0.0.1 only. Open a listener for each address to listen on all of them.
        port: the port in RDMA's TCP port space; 0 is any free port (`listener.port`). On iWARP
            (siw, the software device) these are TCP's ports, so a socket may already use the port;
            on RoCE and InfiniBand they are separate.
        backlog: the maximum number of connection requests that wait to be accepted. A further
            request is rejected. If another address (for IPv6: a /64) has more waiting requests than
            the further request's address would then have, the oldest request of the address with
            the most is rejected instead. The private data of the rejection states the reason.
        device: "auto", or the name or the class of the devices to accept on, as of `connect`.
        accept_timeout: seconds that a peer may take to finish the handshake after the accept.
        ipv6_only: with "::", do not listen on IPv4's port of the same number; None: the system's
            default (sysctl net.ipv6.bindv6only).
        shared_receive: a queue from which all accepted connections take their receives. A number
            creates one queue per device and domain, with as many pooled receives of receive_size
            bytes. None: each connection has receives of its own.
        domain: the protection domain of the accepted connections: None shares one with everything
            else on this event loop and device. "each" makes one for each connection, so that no
            peer can access memory that is registered for another one. With a Domain of
            `open_domain`, the listener accepts on the domain's device only.
        receive_buffers, receive_size, peer_timeout, keepalive, options: of every accepted
            connection: see ConnectionOptions.

    Raises:
        NoDeviceError: a real device is required by name, and there is no such device.
        DeviceRequirementError: `device` does not permit the device that has the address.
        AddressError: the host's name does not resolve, or another device than the required one has
            the address.
        TypeError, ValueError: an argument is invalid; the message names it and the expected value.
        VerbsCallError: the address or port is not available, or there are no file descriptors left;
            the message says why.
        ClosedError, EventLoopError: `domain` is closed, or belongs to another event loop.
        ForkError: this process is a forked child of a process that used real devices.

    Cancellation: nothing is left; no peer was accepted.

    See: man rdma_bind_addr, rdma_listen.
    """
    endpoint = await open_listener(
        "listen",
        ConnectionOptions._chosen(listen, options, keywords),
        host,
        port,
        backlog=backlog,
        device=device,
        accept_timeout=accept_timeout,
        ipv6_only=ipv6_only,
        shared_receive=shared_receive,
        domain=domain,
    )
    return Listener(endpoint)


class Listener(BaseListener[Connection]):
    """Listens for connections until it is closed. `accept` returns one connection, `serve` handles
    all. An anyio Listener.

    `async for request in listener` returns every ConnectionRequest until the listener is closed.
    """

    def __init__(self, endpoint: ListenerEndpoint) -> None:
        self._endpoint = endpoint

    def __repr__(self) -> str:
        return repr(self._endpoint)

    @property
    def options(self) -> ConnectionOptions:
        """The options of every accepted connection."""
        return self._endpoint.options

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """The typed attributes of anyio."""
        return {ConnectionInfo.local_address: lambda: self.local_address}

    def statistics(self) -> ListenerStatistics:
        """Return the counters of the listener's connection requests.

        Raises: nothing.
        """
        return self._endpoint.statistics()

    async def request(self) -> ConnectionRequest:
        """Return the next connection request, to be accepted or rejected.

        Raises:
            ClosedError: the listener was closed.
            DeviceRemovedError: its RDMA device was removed.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: no peer is lost; the next call returns it.
        """
        self._endpoint.require_here()
        return ConnectionRequest(await self._endpoint.request())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ConnectionRequest:
        try:
            return await self.request()
        except ClosedError:
            raise StopAsyncIteration from None

    @opens
    async def accept(self, *, private_data: bytes = b"") -> Connection:
        """Accept the next peer, and return the established connection.

        Handshakes run concurrently: while one is slow, other waiting peers are accepted. The call
        returns the first connection that is established. The next calls return the connections that
        are established afterwards. At most 128 handshakes are in progress. To begin one more, the
        oldest handshake with a slow peer, of the address with the most handshakes, is ended.

        Args:
            private_data: up to 196 bytes for the peer's program. Several peers can be sent these
                bytes, and one of them is returned. A later call with different private data ends
                the handshakes that this call has left.

        Raises:
            TypeError, ValueError: the private data is not bytes, or longer than 196; no peer was
                accepted.
            RdmaConnectionError: a peer withdrew, or did not finish within `accept_timeout`; call
                again for the next peer. If no call is waiting then, the error is logged.
            NotSupportedError: the listener has `shared_receive`, and the device has no shared
                receive queues.
            VerbsCallError: no thread could be started, or no file descriptors are left.
            ClosedError: the listener was closed.
            DeviceRemovedError: its RDMA device was removed.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: no peer is lost. Handshakes in progress continue, for the next call. They end
        when the listener is closed.

        See: man rdma_accept.
        """
        private_data = check_private_data(private_data, *IN_ACCEPT, "accept")
        self._endpoint.require_here()
        return (await self._endpoint.accept(private_data)).take()

    async def serve(
        self,
        handler: Callable[[Connection], Any],
        task_group: TaskGroup | None = None,
    ) -> None:
        """Accept every peer, and run `handler(connection)` for each in a task of its own, until
        cancelled or closed.

        A connection is closed when its handler returns. If a handler raises an error, only its
        connection ends, and the error is logged to the logger "aiordma". If the error is that this
        connection or its handshake has failed, because of the peer, the network or the device, it
        is logged in one line, with its first cause, at the level INFO. The same holds for an
        exception group of such errors. The level is WARNING if a message of the peer was longer
        than its receive. Any other error, such as that of another connection that the handler has
        opened, is logged with its traceback, at the level ERROR.

        At most 128 handshakes are in progress. To begin one more, the oldest handshake with a slow
        peer, of the address with the most handshakes, is ended.

        Args:
            handler: an async function of one connection.
            task_group: the task group to run the handlers in; None: `serve` creates one.

        Raises:
            TypeError: `handler` cannot be called, or `task_group` is not a task group.
            DeviceRemovedError: the listener's RDMA device was removed. Without `task_group`, it is
                in an ExceptionGroup.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: without `task_group`, the handlers are cancelled and their connections closed.
        No peer that waits to be accepted is lost. Handshakes in progress continue, for the next
        call of `serve` or `accept`.
        """
        if not callable(handler):
            raise wrong_type(handler, "handler", "an async function of one connection", "serve")
        if task_group is not None:
            if not hasattr(task_group, "start_soon"):
                raise wrong_type(task_group, "task_group", "a task group of anyio's", "serve")
            await self._endpoint.accept_all(task_group.start_soon, self._handle_one, handler)
            return
        self._endpoint.require_here()
        async with self._endpoint.reactor.loop.task_group() as start_soon:
            await self._endpoint.accept_all(start_soon, self._handle_one, handler)

    async def _handle_one(
        self, handler: Callable[[Connection], Awaitable[Any]], accepted: Acceptance
    ) -> None:
        try:
            async with accepted.take() as connection:
                try:
                    await handler(connection)
                except Exception as error:
                    # Before the close, which sets the cause of a connection that works.
                    log_failure(error, accepted.peer, connection)
                    connection._ahead.give_up()  # its end waits for no message
        except Exception as error:
            log_failure(error, accepted.peer)


@asynccontextmanager
async def serving(
    listener: Listener, handler: Callable[[Connection], Awaitable[Any]]
) -> AsyncIterator[None]:
    """Run `listener.serve` during the block. The block's error is raised itself, without a group.

    Cancellation: the handlers are cancelled, too.
    """
    failed: BaseException | None = None
    async with anyio.create_task_group() as group:
        group.start_soon(listener.serve, handler)
        try:
            yield
        except (anyio.get_cancelled_exc_class(), GeneratorExit):
            raise
        except BaseException as error:  # pytest's skip and fail are no Exceptions
            failed = error
        finally:
            group.cancel_scope.cancel()
    try:
        if failed is not None:
            raise failed
    finally:
        del failed  # its traceback holds this frame
