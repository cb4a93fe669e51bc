"""Byte streams over RDMA, for programs that use sockets: rsockets' protocol as anyio streams and as
asyncio transports.

    async with aiordma.streams.listen_stream("192.0.2.1", 7472) as listener: ...
    async with aiordma.streams.connect_stream("192.0.2.1", 7472) as stream: ...
    reader, writer = await aiordma.streams.open_connection("192.0.2.1", 7472)
"""

from aiordma._base.errors import StreamProtocolError
from aiordma.streams.client import create_connection, open_connection
from aiordma.streams.connecting import connect_stream
from aiordma.streams.listener import StreamListener, listen_stream
from aiordma.streams.loop import StreamEventLoop, new_event_loop
from aiordma.streams.server import StreamServer, create_server, start_server
from aiordma.streams.settings import StreamOptions
from aiordma.streams.sockets import StreamSocket
from aiordma.streams.stream import Stream
from aiordma.streams.transport import StreamTransport

__all__ = (
    "Stream",
    "StreamEventLoop",
    "StreamListener",
    "StreamOptions",
    "StreamProtocolError",
    "StreamServer",
    "StreamSocket",
    "StreamTransport",
    "connect_stream",
    "create_connection",
    "create_server",
    "listen_stream",
    "new_event_loop",
    "open_connection",
    "start_server",
)
