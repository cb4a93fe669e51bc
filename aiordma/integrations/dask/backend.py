"""The classes of a backend: comm, connector, listener."""

import asyncio
import inspect
import logging
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

import dask
from dask.utils import parse_bytes, parse_timedelta
from distributed.comm.addressing import parse_host_port, unparse_host_port
from distributed.comm.core import (
    BaseListener,
    Comm,
    CommClosedError,
    Connector,
    FatalCommClosedError,
)
from distributed.comm.registry import Backend
from distributed.comm.utils import ensure_concrete_host, from_frames, to_frames
from distributed.system import MEMORY_LIMIT
from distributed.utils import ensure_ip, get_ip

from aiordma._base.arguments import shown
from aiordma._base.errors import ClosedError, NoDeviceError, RdmaError, RejectedError
from aiordma._base.options import ConnectionKeywords
from aiordma._base.socket_address import SocketAddress
from aiordma._connection.connection import Connection
from aiordma._connection.connection_request import ConnectionRequest
from aiordma._connection.connector import connect
from aiordma._connection.listener import Listener, listen
from aiordma.integrations.dask.channel import BROKEN, Channel
from aiordma.integrations.dask.frames import CONTROLS, CREDITS, HELLO, MESSAGE_BYTES

__all__ = ("RdmaBackend", "RdmaComm", "RdmaConnector", "RdmaListener")

logger: logging.Logger = logging.getLogger("aiordma")

MAX_MESSAGE_SIZE = "distributed.comm.rdma.max-message-size"
"""Dask's configuration: the most bytes of a message that is received."""

LONGEST = 3600.0
"""The longest peer_timeout, in seconds."""

OTHER_PROTOCOL = b"this listener is one of Dask's, and expects " + HELLO


def _options() -> ConnectionKeywords:
    """Return the options of a connection. A peer that does not answer is detected within Dask's
    distributed.comm.timeouts.tcp, half of which is the time until it is asked."""
    limit = parse_timedelta(dask.config.get("distributed.comm.timeouts.tcp"), default="seconds")
    half = min(limit / 2, LONGEST)
    return {
        "receive_buffers": CREDITS + CONTROLS,
        "receive_size": MESSAGE_BYTES,
        "keepalive": half,
        "peer_timeout": half,
    }


def _most_bytes() -> int:
    """Return the most bytes of a message that is received.

    Raises:
        ValueError: what Dask's configuration says is no number of bytes.
    """
    configured = dask.config.get(MAX_MESSAGE_SIZE, default=None)
    if configured is None:
        return int(MEMORY_LIMIT // 2)
    most = 0
    if isinstance(configured, str | int | float) and not isinstance(configured, bool):
        with suppress(ValueError, OverflowError):
            most = int(parse_bytes(configured))
    if most < 1:
        raise ValueError(
            f"{MAX_MESSAGE_SIZE} in Dask's configuration is {shown(configured)}: expected a "
            'positive number of bytes, such as "20GiB" or 21474836480'
        )
    return most


def _refuse_encryption(address: str, connection_args: dict[str, Any]) -> None:
    if connection_args.get("require_encryption"):
        raise RuntimeError(
            f"Dask's configuration requires encryption, and {address!r} has none: use tls://, or "
            "set require_encryption=False and keep the RDMA network private"
        )


def _text(address: SocketAddress | None) -> str:
    return unparse_host_port(*address[:2]) if address else "unknown"


class RdmaComm(Comm):
    """A comm over one RDMA connection.

    A write returns when the peer's device has the message, and waits while the peer's program does
    not read. See docs/dask.md.
    """

    max_shard_size: ClassVar[int] = parse_bytes(dask.config.get("distributed.comm.shard"))
    prefix: ClassVar[str] = "rdma://"

    def __init__(
        self,
        connection: Connection,
        local_address: str,
        peer_address: str,
        deserialize: bool = True,
        *,
        is_first: bool,
        most: int,
    ) -> None:
        super().__init__(deserialize=deserialize)
        self._local_addr = local_address  # the names that distributed's connect() reads
        self._peer_addr = peer_address
        self._channel = Channel(connection, most, is_first)
        self._closed = False
        loop = asyncio.get_running_loop()
        self._finalizer = weakref.finalize(self, _abandon, self._channel, loop, repr(self))
        self._finalizer.atexit = False

    @property
    def local_address(self) -> str:
        """This side's rdma://host:port."""
        return self._local_addr

    @property
    def peer_address(self) -> str:
        """The peer's rdma://host:port."""
        return self._peer_addr

    async def read(self, deserializers: Any = None) -> Any:
        """Return the next message.

        Args:
            deserializers: as of distributed's Comm.

        Raises:
            CommClosedError: the comm has ended, or the peer violates the protocol.

        Cancellation: aborts the comm, as a part of the message may have arrived.
        """
        try:
            frames = await self._channel.read()
        except BROKEN as error:
            raise self._broken(error) from error
        except BaseException:
            self.abort()
            raise
        try:
            return await from_frames(
                frames,
                deserialize=self.deserialize,
                deserializers=deserializers,
                allow_offload=self.allow_offload,
            )
        except EOFError as error:
            raise self._broken(error) from error

    async def write(self, msg: Any, serializers: Any = None, on_error: str = "message") -> int:
        """Send a message, and return its number of bytes.

        Args:
            msg, serializers, on_error: as of distributed's Comm.

        Raises:
            CommClosedError: the comm has ended, or the peer violates the protocol.

        Cancellation: aborts the comm, as a part of the message may have been sent.
        """
        if self.closed():
            raise CommClosedError(f"in {self!r}: the comm is closed")
        frames = await to_frames(
            msg,
            allow_offload=self.allow_offload,
            serializers=serializers,
            on_error=on_error,
            context={
                "sender": self.local_info,
                "recipient": self.remote_info,
                **self.handshake_options,
            },
            frame_split_size=self.max_shard_size,
        )
        try:
            return await self._channel.write(frames)
        except BROKEN as error:
            raise self._broken(error) from error
        except BaseException:
            self.abort()
            raise

    def _broken(self, error: Exception) -> CommClosedError:
        text = f"in {self!r}: {type(error).__name__}: {error}"
        self.abort()
        return CommClosedError(text)

    async def close(self) -> None:
        """Close. A message that another task is writing is sent first, if that takes no longer than
        some seconds. Idempotent.

        Raises: nothing.

        Cancellation: the comm is closed all the same.
        """
        self._closed = True
        self._finalizer.detach()
        await self._channel.aclose()

    def abort(self) -> None:
        """Close at once, in the background.

        Raises: nothing.
        """
        self._closed = True
        self._finalizer.detach()
        self._channel.abort()

    def closed(self) -> bool:
        """Whether the comm was closed, or the connection has ended and everything that arrived has
        been read."""
        return self._closed or self._channel.has_ended


def _abandon(channel: Channel, loop: asyncio.AbstractEventLoop, comm: str) -> None:
    """Close the connection of a comm that the program has dropped. Any thread."""
    if channel.cause is None and not loop.is_closed():
        logger.warning("closing %s, which was dropped without a close()", comm)
        loop.call_soon_threadsafe(channel.abort)


class RdmaConnector(Connector):
    """Connects comms."""

    comm_class: ClassVar[type[RdmaComm]] = RdmaComm

    async def connect(
        self, address: str, deserialize: bool = True, **connection_args: Any
    ) -> RdmaComm:
        """Connect to host:port.

        Args:
            address: host:port.
            deserialize: as of distributed's Connector.
            connection_args: Dask's; only require_encryption has an effect.

        Raises:
            CommClosedError: the peer could not be reached. distributed tries again.
            FatalCommClosedError: it makes no sense to try again: no device is permitted, or the
                peer is none of Dask's.
            RuntimeError: Dask's configuration requires encryption.
            ValueError: max-message-size in Dask's configuration is no number of bytes.

        Cancellation: nothing is left.
        """
        prefix = self.comm_class.prefix
        _refuse_encryption(prefix + address, connection_args)
        most = _most_bytes()
        host, port = parse_host_port(address)
        try:
            connection = await connect(host, port, private_data=HELLO, timeout=None, **_options())
        except (RdmaError, OSError) as error:
            is_final = isinstance(error, NoDeviceError) or (
                isinstance(error, RejectedError) and error.private_data.startswith(OTHER_PROTOCOL)
            )
            kind = FatalCommClosedError if is_final else CommClosedError
            raise kind(f"{prefix}{address}: {type(error).__name__}: {error}") from error
        if not connection.private_data.startswith(HELLO):
            await connection.aclose()
            raise FatalCommClosedError(
                f"{prefix}{address}: the peer's private data are {connection.private_data!r}, and "
                f"of a comm they would be {HELLO!r}: another program, or another version of aiordma"
            )
        local = prefix + _text(connection.local_address)
        return self.comm_class(
            connection, local, prefix + address, deserialize, is_first=True, most=most
        )


class RdmaListener(BaseListener):
    """Listens for comms. The arguments are those of distributed's listeners."""

    comm_class: ClassVar[type[RdmaComm]] = RdmaComm

    def __init__(
        self,
        address: str,
        comm_handler: Callable[[RdmaComm], Any],
        deserialize: bool = True,
        allow_offload: bool = True,
        default_host: str | None = None,
        default_port: int = 0,
        **connection_args: Any,
    ) -> None:
        super().__init__()
        self.prefix: str = self.comm_class.prefix
        _refuse_encryption(self.prefix + address, connection_args)
        self.ip: str
        self.port: int
        self.ip, self.port = parse_host_port(address, default_port)
        self.default_host = default_host
        self.comm_handler = comm_handler
        self.deserialize = deserialize
        self.allow_offload = allow_offload
        self._listener: Listener | None = None
        self._bound: tuple[str, int] | None = None
        self._most = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the address or the port is not available.
            NoDeviceError: no device is permitted, or the one that was required is missing.
            ValueError: max-message-size in Dask's configuration is no number of bytes.

        Cancellation: nothing is left.
        """
        self._most = _most_bytes()
        seconds = parse_timedelta(
            dask.config.get("distributed.comm.timeouts.connect"), default="seconds"
        )
        backlog = int(dask.config.get("distributed.comm.socket-backlog"))
        self._listener = await listen(
            self.ip or "0.0.0.0",
            self.port,
            backlog=backlog,
            accept_timeout=seconds,
            **_options(),
        )
        address = self._listener.local_address
        assert address is not None
        self._bound = address[0], address[1]
        self._start(self._serve(self._listener))

    def stop(self) -> "asyncio.Task[None] | None":
        """Stop listening. Comms that were accepted stay open.

        Returns:
            A task that ends when the port is free.

        Raises: nothing.
        """
        listener, self._listener = self._listener, None
        if listener is None:
            return None
        listener._close_soon()
        return self._start(listener.aclose())

    def _start(self, coroutine: Any) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _serve(self, listener: Listener) -> None:
        try:
            async for request in listener:
                self._start(self._accept(request))
        except RdmaError as error:  # its device was removed
            logger.warning("%s%s: %s", self.prefix, _text(self._bound), error)

    async def _accept(self, request: ConnectionRequest) -> None:
        peer = self.prefix + _text(request.peer_address)
        try:
            if not request.private_data.startswith(HELLO):
                await request.reject(OTHER_PROTOCOL)
                logger.info("%s was rejected: it is none of Dask's", peer)
                return
            connection = await request.accept(private_data=HELLO)
        except (RdmaError, OSError) as error:
            logger.info("%s could not be accepted: %s", peer, error)
            return
        local = self.prefix + _text(connection.local_address)
        comm = self.comm_class(
            connection, local, peer, self.deserialize, is_first=False, most=self._most
        )
        comm.allow_offload = self.allow_offload
        await self._handle(comm)

    async def _handle(self, comm: RdmaComm) -> None:
        if self._listener is None:  # it was stopped during the accept
            comm.abort()
            return
        try:
            await self.on_connection(comm)
        except CommClosedError as error:
            logger.info("%s ended before the handshake: %s", comm.peer_address, error)
            return
        except Exception:
            comm.abort()  # what it sent is no handshake, or of another version of distributed
            logger.warning("the handshake of %s failed", comm.peer_address, exc_info=True)
            return
        result = self.comm_handler(comm)
        if inspect.isawaitable(result):
            await result

    def get_host_port(self) -> tuple[str, int]:
        """The (host, port) that is listened on.

        Raises:
            ClosedError: it was never started.
        """
        if self._bound is None:
            raise ClosedError("this listener has not been started")
        return self._bound

    @property
    def listen_address(self) -> str:
        """The address that is listened on."""
        return self.prefix + unparse_host_port(*self.get_host_port())

    @property
    def contact_address(self) -> str:
        """The address for peers: another one if all addresses are listened on."""
        host, port = self.get_host_port()
        host = ensure_concrete_host(host, default_host=self.default_host)
        return self.prefix + unparse_host_port(host, port)


class RdmaBackend(Backend):
    """The backend of rdma:// addresses, distributed's entry point."""

    _connector_class: ClassVar[type[RdmaConnector]] = RdmaConnector
    _listener_class: ClassVar[type[RdmaListener]] = RdmaListener

    def get_connector(self) -> RdmaConnector:
        """Return a connector.

        Raises: nothing.
        """
        return self._connector_class()

    def get_listener(
        self,
        loc: str,
        handle_comm: Callable[[RdmaComm], Any],
        deserialize: bool,
        **connection_args: Any,
    ) -> RdmaListener:
        """Return a listener, not started.

        Args:
            loc: host:port; an empty host is every IPv4 address.
            handle_comm: is called with each comm.
            deserialize, connection_args: as of distributed's Backend.

        Raises:
            RuntimeError: Dask's configuration requires encryption.
        """
        return self._listener_class(loc, handle_comm, deserialize, **connection_args)

    def get_address_host(self, loc: str) -> str:
        """Return the host of host:port.

        Args:
            loc: host:port.

        Raises:
            ValueError: it is none.
        """
        return str(parse_host_port(loc)[0])

    def get_address_host_port(self, loc: str) -> tuple[str, int]:
        """Return host and port of host:port.

        Args:
            loc: host:port.

        Raises:
            ValueError: it is none.
        """
        host, port = parse_host_port(loc)
        return host, port

    def resolve_address(self, loc: str) -> str:
        """Return host:port with the host's numeric address.

        Args:
            loc: host:port.

        Raises:
            ValueError: it is none.
            OSError: the name does not resolve.
        """
        host, port = parse_host_port(loc)
        return str(unparse_host_port(ensure_ip(host), port))

    def get_local_address_for(self, loc: str) -> str:
        """Return the address of this machine from which host:port is reached.

        Args:
            loc: host:port.

        Raises:
            ValueError: it is none.
            OSError: the name does not resolve, or no route leads there.
        """
        host = ensure_ip(parse_host_port(loc)[0])
        return str(unparse_host_port(get_ip(host), None))
