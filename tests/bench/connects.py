"""Rows of short connections, one after the other: each connects, sends a message, receives its echo
and closes.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import cache, partial

from aiordma import connect, open_domain
from aiordma.bench.loops import run
from aiordma.streams import open_connection

from . import default_server, same_work
from .candidates import Candidates
from .rows import MORE, Reading, Row, rate
from .stream_server import HEAD
from .streams import Peers, timed

SIZE = 64
MESSAGE = bytes(SIZE)

Connecting = Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]


def rows(here: Candidates) -> list[Row]:
    """Return those that are measured on this machine."""
    at = Peers(here)

    def beside_tcp(name: str, candidate: Callable[[], Reading]) -> Row:
        return _row(name, candidate, "asyncio TCP streams", partial(_by_tcp, at))

    beside_c = rxe_rows(here, "software")
    return [
        *beside_c,
        beside_tcp("software/connect/beside_tcp", beside_c[0].candidate),
        beside_tcp("software/stream/connect", partial(_by_rdma_streams, at)),
    ]


def rxe_rows(here: Candidates, where: str = "rxe") -> list[Row]:
    """Return those of the virtual machine, which the software device has, too."""
    server = cache(lambda: here.keep(default_server.serving(here.host, here.device, here.spin)))
    in_c = partial(same_work.connects, here.host, here.device, SIZE, here.seconds)

    def measure(keeps_open: bool) -> Reading:
        port = server().rdma
        return run(partial(_by_messages, here, port, keeps_open), spin=here.spin)

    def beside_c(name: str, keeps_open: bool) -> Row:
        return _row(name, partial(measure, keeps_open), "the same in C, sleeping", in_c)

    return [
        beside_c(f"{where}/connect", False),
        beside_c(f"{where}/connect/open_domain", True),
    ]


def _row(
    name: str, candidate: Callable[[], Reading], reference: str, refer: Callable[[], Reading]
) -> Row:
    return Row(name, "connections per second", candidate, reference, refer, better=MORE)


async def _by_messages(here: Candidates, port: int, keeps_open: bool) -> Reading:
    async def exchange() -> None:
        async with connect(here.host, port, device=here.device) as connection:
            await connection.send(MESSAGE)
            await connection.receive()

    if not keeps_open:
        return rate(await timed(exchange, here.seconds, SIZE))
    async with open_domain(here.host, device=here.device):
        return rate(await timed(exchange, here.seconds, SIZE))


def _by_rdma_streams(at: Peers) -> Reading:
    here, port = at.here, at.ports("auto")[1]
    opening = partial(open_connection, here.host, port, device=here.device)
    return run(partial(_by_streams, opening, here.seconds), spin=here.spin)


def _by_tcp(at: Peers) -> Reading:
    opening = partial(asyncio.open_connection, at.here.host, at.ports("asyncio")[2])
    return run(partial(_by_streams, opening, at.here.seconds), loop="asyncio")


async def _by_streams(opening: Callable[[], Connecting], seconds: float) -> Reading:
    async def exchange() -> None:
        reader, writer = await opening()
        writer.write(HEAD.pack(SIZE, True) + MESSAGE)
        await reader.readexactly(SIZE)
        writer.close()
        await writer.wait_closed()

    return rate(await timed(exchange, seconds, SIZE))
