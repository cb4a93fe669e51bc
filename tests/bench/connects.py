"""Rows of short connections: each connects, sends a message, receives its echo and closes: one
after the other, or 200 at the same time.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import cache, partial
from time import perf_counter_ns

import anyio

from aiordma import connect, open_domain
from aiordma.bench.loops import run
from aiordma.bench.processes import Ports
from aiordma.streams import open_connection

from . import default_server, same_work
from .candidates import Candidates
from .rows import MORE, Reading, Row, rate
from .stream_server import HEAD
from .streams import Peers, timed

SIZE = 64
MESSAGE = bytes(SIZE)
AT_ONCE = 200

Connecting = Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]


def rows(here: Candidates) -> list[Row]:
    """Return those that are measured on this machine."""
    at = Peers(here)
    server = _server(here)

    def beside_tcp(name: str, candidate: Callable[[], Reading], limit: float) -> Row:
        return _row(name, candidate, "asyncio TCP streams", partial(_by_tcp, at), limit)

    def at_once() -> Reading:
        return run(partial(_messages_at_once, here, server().rdma), spin=here.spin)

    beside_c = _beside_c(here, "software", server, limit=0.5)
    name = f"software/connect/{AT_ONCE}_at_once"
    in_c = partial(same_work.connects_at_once, here.host, here.device, SIZE, AT_ONCE)
    return [
        *beside_c,
        beside_tcp("software/connect/beside_tcp", beside_c[0].candidate, 0.2),
        beside_tcp("software/stream/connect", partial(_by_rdma_streams, at), 0.15),
        Row(name, "ms", at_once, "asyncio TCP streams", partial(_tcp_at_once, at), limit=5.0),
        Row(f"{name}/in_c", "ms", at_once, "the same in C, sleeping", in_c),
    ]


def rxe_rows(here: Candidates) -> list[Row]:
    """Return those of the virtual machine."""
    return _beside_c(here, "rxe", _server(here), limit=0.2)


def _server(here: Candidates) -> Callable[[], Ports]:
    return cache(lambda: here.keep(default_server.serving(here.host, here.device, here.spin)))


def _beside_c(here: Candidates, where: str, server: Callable[[], Ports], limit: float) -> list[Row]:
    in_c = partial(same_work.connects, here.host, here.device, SIZE, here.seconds)

    def measure(keeps_open: bool) -> Reading:
        port = server().rdma
        return run(partial(_by_messages, here, port, keeps_open), spin=here.spin)

    def beside_c(name: str, keeps_open: bool, limit: float | None) -> Row:
        return _row(name, partial(measure, keeps_open), "the same in C, sleeping", in_c, limit)

    return [
        beside_c(f"{where}/connect", False, limit),
        beside_c(f"{where}/connect/open_domain", True, None),
    ]


def _row(
    name: str,
    candidate: Callable[[], Reading],
    reference: str,
    refer: Callable[[], Reading],
    limit: float | None,
) -> Row:
    return Row(name, "connections per second", candidate, reference, refer, limit, better=MORE)


async def _by_messages(here: Candidates, port: int, keeps_open: bool) -> Reading:
    async def exchange() -> None:
        async with connect(here.host, port, device=here.device) as connection:
            await connection.send(MESSAGE)
            await connection.receive()

    if not keeps_open:
        return rate(await timed(exchange, here.seconds, SIZE))
    async with open_domain(here.host, device=here.device):
        return rate(await timed(exchange, here.seconds, SIZE))


async def _messages_at_once(here: Candidates, port: int) -> Reading:
    async def exchange(stack: AsyncExitStack) -> None:
        connecting = connect(here.host, port, device=here.device)
        connection = await stack.enter_async_context(connecting)
        await connection.send(MESSAGE)
        await connection.receive()

    return await _slowest(exchange)


def _tcp_at_once(at: Peers) -> Reading:
    host, port = at.here.host, at.server("asyncio").tcp

    async def exchange(stack: AsyncExitStack) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        stack.push_async_callback(writer.wait_closed)
        stack.callback(writer.close)
        writer.write(HEAD.pack(SIZE, True) + MESSAGE)
        await reader.readexactly(SIZE)

    return run(partial(_slowest, exchange), loop="asyncio")


async def _slowest(exchange: Callable[[AsyncExitStack], Awaitable[None]]) -> Reading:
    """Measure how long the slowest of AT_ONCE clients takes, in milliseconds. They begin together,
    after one that is not measured, and close when all have their echoes."""
    times: list[float] = []

    async def timed_exchange(stack: AsyncExitStack) -> None:
        await exchange(stack)
        times.append((perf_counter_ns() - began) / 1e6)

    async with AsyncExitStack() as stack:
        await exchange(stack)
        began = perf_counter_ns()
        async with anyio.create_task_group() as group:
            for _ in range(AT_ONCE):
                group.start_soon(timed_exchange, stack)
    return Reading(max(times), extra={"median_ms": sorted(times)[len(times) // 2]})


def _by_rdma_streams(at: Peers) -> Reading:
    here, port = at.here, at.server("auto").transport
    opening = partial(open_connection, here.host, port, device=here.device)
    return run(partial(_by_streams, opening, here.seconds), spin=here.spin)


def _by_tcp(at: Peers) -> Reading:
    opening = partial(asyncio.open_connection, at.here.host, at.server("asyncio").tcp)
    return run(partial(_by_streams, opening, at.here.seconds), loop="asyncio")


async def _by_streams(opening: Callable[[], Connecting], seconds: float) -> Reading:
    async def exchange() -> None:
        reader, writer = await opening()
        writer.write(HEAD.pack(SIZE, True) + MESSAGE)
        await reader.readexactly(SIZE)
        writer.close()
        await writer.wait_closed()

    return rate(await timed(exchange, seconds, SIZE))
