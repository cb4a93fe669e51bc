"""Byte streams over RDMA, for programs that use sockets: rsockets' protocol as anyio streams.

async with aiordma.streams.listen_stream("192.0.2.1", 7472) as listener: ...
async with aiordma.streams.connect_stream("192.0.2.1", 7472) as stream: ...
"""

from aiordma.streams.opening import (
    StreamListener,
    StreamOptions,
    connect_stream,
    listen_stream,
)
from aiordma.streams.stream import Stream

__all__ = (
    "Stream",
    "StreamListener",
    "StreamOptions",
    "connect_stream",
    "listen_stream",
)
