"""Connects to a Valkey server, with asyncio's reader and writer over the channel."""

import asyncio
from typing import Any, NoReturn, TypedDict, Unpack

import anyio

from aiordma._base.arguments import whole_number
from aiordma._base.errors import ConnectTimeoutError
from aiordma._base.options import ConnectionOptions
from aiordma._connection.connection import Connection
from aiordma._connection.connector import Attempt, LocalAddresses
from aiordma._loop.event_loop import asyncio_event_loop
from aiordma.integrations.valkey.channel import (
    CONTROL_SLOTS,
    DATA_SLOTS,
    RECEIVES,
    ValkeyChannel,
)
from aiordma.integrations.valkey.control import CONTROL_BYTES, ValkeyProtocolError
from aiordma.streams.client import LIMIT
from aiordma.streams.settings import taken_close_timeout
from aiordma.streams.transport import StreamTransport

__all__ = ("ValkeyOptions", "ValkeyTransport", "open_connection")

PORT = 6379
BUFFER_BYTES = 1024 * 1024
_LEAST_BUFFER_BYTES = 64 * 1024
_MOST_BUFFER_BYTES = 16 * 1024 * 1024


class ValkeyOptions(TypedDict, total=False):
    """The keyword arguments of `open_connection` that set up the connection."""

    buffer_size: int
    close_timeout: float
    tos: int | None
    ack_timeout: int
    retry_count: int
    peer_timeout: float | None
    keepalive: float | None


class ValkeyTransport(StreamTransport):
    """A connection to a Valkey server as an asyncio.Transport. The protocol has no half-close."""

    # TLS inside it would be bytes that no server expects.
    _start_tls_compatible = False

    def can_write_eof(self) -> bool:
        """False.

        Raises: nothing.
        """
        return False

    def write_eof(self) -> NoReturn:
        """Not supported.

        Raises:
            NotImplementedError: always, as asyncio's transports raise it.
        """
        raise NotImplementedError("Valkey's protocol over RDMA cannot end one direction: close()")


async def open_connection(
    host: str,
    port: int = PORT,
    *,
    limit: int = LIMIT,
    source: tuple[str, int] | None = None,
    timeout: float | None = 30.0,
    device: str = "auto",
    **options: Unpack[ValkeyOptions],
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a Valkey server, and return asyncio's own reader and writer.

    The server was started with `--rdma-bind` and `--rdma-port`. What is written and read is RESP,
    as over TCP.

    Args:
        host, source, device: as of `aiordma.connect`.
        port: the server's `rdma-port`.
        limit: as of asyncio.open_connection.
        timeout: same as `aiordma.connect`. The last step is the server's first control message.
        buffer_size: bytes that the server can send before this side has read them: 64 KiB to
            16 MiB, as of the server's `rdma-rx-size`.
        close_timeout: seconds in which a close waits until the server's device has everything that
            was written, 0 to 3,600.
        tos, ack_timeout, retry_count, peer_timeout, keepalive: see ConnectionOptions.

    Raises:
        as `aiordma.connect`.
        NotSupportedError: the device has no immediate data (iWARP).
        ValkeyProtocolError: the program at that port is no Valkey server.

    Cancellation: nothing is left; the server's connection ends, if it was established.

    See: valkey.io/topics/RDMA.
    """
    call = "open_connection"
    loop = asyncio_event_loop(call, "valkey-py has no client")
    others: dict[str, Any] = {**options}
    buffer_bytes = whole_number(
        others.pop("buffer_size", BUFFER_BYTES),
        "buffer_size",
        _LEAST_BUFFER_BYTES,
        _MOST_BUFFER_BYTES,
        call,
    )
    close_timeout = taken_close_timeout(others, call)
    chosen = ConnectionOptions._of(
        open_connection,
        ValkeyOptions.__annotations__,
        others,
        receive_buffers=RECEIVES,
        receive_size=CONTROL_BYTES,
        max_send_wr=DATA_SLOTS + CONTROL_SLOTS,
        rnr_retry_count=7,
        responder_resources=0,
        initiator_depth=0,
    )

    attempt = Attempt(call, chosen, host, port, source, timeout, device)

    async def connect_to(address: str, local: LocalAddresses) -> tuple[Connection, ValkeyChannel]:
        connection = await attempt.prepare(address, local)
        try:
            channel = ValkeyChannel(connection, buffer_bytes, close_timeout)
            await connection.establish()
            try:
                with anyio.fail_after(attempt.limit.left()):
                    await channel.begin()
            except TimeoutError:
                raise ConnectTimeoutError(
                    f"connect to {attempt.target}: the peer accepted, and announced no memory "
                    f"within {attempt.limit.seconds:g} s: it may be no Valkey server"
                ) from None
            except ValkeyProtocolError as error:
                raise ValkeyProtocolError(f"connect to {attempt.target}: {error}") from None
        except BaseException:
            await connection.aclose()
            raise
        return connection, channel

    connection, channel = await attempt.of_name(connect_to)
    reader = asyncio.StreamReader(limit=limit, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport = ValkeyTransport(loop, connection, channel, protocol)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)
