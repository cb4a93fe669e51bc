"""Rows of streams: rsockets' protocol by our ByteStream and by our asyncio transport, beside
asyncio's TCP streams here and C's rstream in the virtual machine.
"""

import asyncio
import json
import socket
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

import anyio

from aiordma.bench.loops import run
from aiordma.bench.meter import Measurement, Meter
from aiordma.bench.processes import announcing
from aiordma.bench.timing import deadline, one_by_one, perf_counter_ns
from aiordma.streams import connect_stream
from aiordma.streams import open_connection as open_rdma_connection
from tests.ports import free_port

from .candidates import Candidates
from .perftest import against_itself
from .processor import ended_processor_seconds, of_both
from .rows import MORE, Reading, Row, bandwidth, latency
from .stream_server import COUNT, HEAD

Exchange = Callable[[], Awaitable[None]]

ECHO_SIZES = (64, 8192)
WRITE_SIZES = (65_536, 1_048_576)
MEGABYTE, GIB = 1e6, 1 << 30
PERCENT = 99
SECONDS_TO_START = 0.1
"""Of an exchange before it is measured, as a part of the measurement's time."""


def rows(here: Candidates) -> list[Row]:
    """Return those that are measured on this machine."""
    at = Peers(here)
    return [
        *(_echo(at, "software", size, limit=0.5) for size in ECHO_SIZES),
        *(_echo_by_asyncio(at, "software", size) for size in ECHO_SIZES),
        *(_writes(at, "software", size, limit=0.95) for size in WRITE_SIZES),
        *(_writes_by_asyncio(at, "software", size) for size in WRITE_SIZES),
        *(row for size in WRITE_SIZES for row in _processor_times(at, size)),
    ]


def rxe_rows(here: Candidates) -> list[Row]:
    """Return those of the virtual machine: round trips beside TCP, and bandwidth beside C."""
    at = Peers(here)
    return [
        *(_echo(at, "rxe", size, limit=0.7) for size in ECHO_SIZES),
        *(_echo_by_asyncio(at, "rxe", size) for size in ECHO_SIZES),
        *(_echo_beside_rstream(at, size) for size in ECHO_SIZES),
        *(_beside_rstream(at, size) for size in WRITE_SIZES),
        *(_writes(at, "rxe", size, limit=None) for size in WRITE_SIZES),
    ]


class Server(NamedTuple):
    """The ports for our ByteStream, our transport and TCP, and the pid."""

    stream: int
    transport: int
    tcp: int
    pid: int


class Peers:
    """The servers for each kind of loop, started when they are needed."""

    def __init__(self, here: Candidates) -> None:
        self.here = here
        self._known: dict[str, Server] = {}

    def server(self, loop: str) -> Server:
        """Return the one on such a loop."""
        if loop not in self._known:
            here = self.here
            settings = {
                "host": here.host, "device": here.device, "loop": loop, "spin": here.spin,
            }  # fmt: skip
            words = [sys.executable, "-m", "tests.bench.stream_server", json.dumps(settings)]
            ports, pid = here.keep(announcing(words))
            self._known[loop] = Server._make([*ports, pid])
        return self._known[loop]


# -- round trips ----------------------------------------------------------------------------------


def _echo(at: Peers, where: str, size: int, limit: float | None) -> Row:
    return Row(
        f"{where}/stream/echo/{size}",
        "us",
        lambda: latency(_run(at, _echo_byte_stream, size)),
        "asyncio TCP streams",
        lambda: latency(_run_tcp(at, _echo_asyncio, size)),
        limit,
    )


def _echo_by_asyncio(at: Peers, where: str, size: int) -> Row:
    return Row(
        f"{where}/stream/echo/{size}/open_connection",
        "us",
        lambda: latency(_run_rdma(at, _echo_asyncio, size)),
        "asyncio TCP streams",
        lambda: latency(_run_tcp(at, _echo_asyncio, size)),
        limit=0.5,
    )


async def _echo_byte_stream(here: Candidates, port: int, size: int) -> Measurement:
    payload, answer = bytes(size), memoryview(bytearray(size))
    async with await connect_stream(here.host, port, device=here.device) as stream:
        await stream.send(HEAD.pack(size, True))

        async def exchange() -> None:
            await stream.send(payload)
            missing = size
            while missing:
                missing -= await stream.receive_into(answer[size - missing :])

        return await timed(exchange, here.seconds, size)


async def _echo_asyncio(
    here: Candidates, connected: tuple[asyncio.StreamReader, asyncio.StreamWriter], size: int
) -> Measurement:
    reader, writer = connected
    writer.write(HEAD.pack(size, True))
    payload = bytes(size)

    async def exchange() -> None:
        writer.write(payload)
        await reader.readexactly(size)

    return await timed(exchange, here.seconds, size)


async def timed(exchange: Exchange, seconds: float, size: int) -> Measurement:
    await one_by_one(exchange, deadline(seconds * SECONDS_TO_START), Meter("", size))
    meter = Meter(f"stream/{size}", size)
    until = deadline(seconds)
    with meter:
        await one_by_one(exchange, until, meter)
    return meter.result()


def tcp_beside_stream(here: Candidates) -> Row:
    """Return what `software/echo/64/beside_stream` is for asyncio's TCP streams."""
    at = Peers(here)

    def slowest() -> Reading:
        found = _run_tcp(at, _echo_asyncio, 64)
        return Reading(found.percentile_us(PERCENT), extra=found.as_dict())

    def beside_stream() -> Reading:
        port = at.server("asyncio").tcp
        words = [sys.executable, "-m", "tests.bench.streaming", str(port), "tcp"]
        with announcing(words):
            return slowest()

    return Row(
        "software/echo/64/beside_stream/tcp",
        "us",
        beside_stream,
        "the same without that peer",
        slowest,
        note=f"p{PERCENT}; asyncio TCP streams, and a peer that sends without pause by TCP",
    )


# -- one direction --------------------------------------------------------------------------------


def _writes(at: Peers, where: str, size: int, limit: float | None) -> Row:
    return Row(
        f"{where}/stream/write/{size}" + ("" if where == "software" else "/beside_tcp"),
        "MB/s",
        lambda: bandwidth(_run(at, _write_byte_stream, size)),
        "asyncio TCP streams",
        lambda: bandwidth(_run_tcp(at, _write_asyncio, size)),
        limit,
        MORE,
    )


def _writes_by_asyncio(at: Peers, where: str, size: int) -> Row:
    return Row(
        f"{where}/stream/write/{size}/open_connection",
        "MB/s",
        lambda: bandwidth(_run_rdma(at, _write_asyncio, size)),
        "asyncio TCP streams",
        lambda: bandwidth(_run_tcp(at, _write_asyncio, size)),
        limit=0.95,
        better=MORE,
    )


def _processor_times(at: Peers, size: int) -> list[Row]:
    """Return rows of what the writes cost both sides together."""

    def row(name: str, candidate: Callable[[], Measurement]) -> Row:
        return Row(
            f"software/stream/write/{size}{name}/processor_time",
            "s per GiB",
            lambda: each_gib(candidate(), size),
            "asyncio TCP streams",
            lambda: each_gib(tcp_writes(at, size), size),
            limit=1.5,
            note="of both sides",
        )

    return [
        row("", lambda: _run(at, _write_byte_stream, size)),
        row("/open_connection", lambda: _run_rdma(at, _write_asyncio, size)),
    ]


def each_gib(found: Measurement, size: int) -> Reading:
    """Return the processor time for a GiB of writes of so many bytes."""
    return Reading(found.cpu_seconds / (found.count * size) * GIB, extra=found.as_dict())


def tcp_writes(at: Peers, size: int) -> Measurement:
    """Measure writes by asyncio's TCP streams."""
    return _run_tcp(at, _write_asyncio, size)


async def _write_byte_stream(here: Candidates, port: int, size: int) -> Measurement:
    payload = bytes(size)
    async with await connect_stream(here.host, port, device=here.device) as stream:
        await stream.send(HEAD.pack(size, False))

        async def finish() -> bytes:
            await stream.send_eof()
            answer = b""
            while len(answer) < COUNT.size:
                answer += await stream.receive(COUNT.size)
            return answer

        return await _counted(lambda: stream.send(payload), finish, here.seconds, size)


async def _write_asyncio(
    here: Candidates, connected: tuple[asyncio.StreamReader, asyncio.StreamWriter], size: int
) -> Measurement:
    reader, writer = connected
    writer.write(HEAD.pack(size, False))
    payload = bytes(size)

    async def write() -> None:
        writer.write(payload)
        await writer.drain()

    async def finish() -> bytes:
        writer.write_eof()
        return await reader.readexactly(COUNT.size)

    return await _counted(write, finish, here.seconds, size)


async def _counted(
    write: Exchange, finish: Callable[[], Awaitable[bytes]], seconds: float, size: int
) -> Measurement:
    """Write until the time is over; the measurement ends when the peer has counted all."""
    meter = Meter(f"stream/{size}", size)
    until = deadline(seconds)
    with meter:
        while perf_counter_ns() < until:
            await write()
            meter.count += 1
        (found,) = COUNT.unpack(await finish())
    if found != meter.count * size:
        raise ValueError(f"the peer counted {found} bytes of {meter.count * size}")
    return meter.result()


# -- rstream --------------------------------------------------------------------------------------

RSTREAM_BYTES = 16 << 20
"""In each direction, in one burst after the other; about a second's work of the guest."""


def _beside_rstream(at: Peers, size: int) -> Row:
    return Row(
        f"rxe/stream/write/{size}",
        "MB/s",
        lambda: bandwidth(_run(at, _write_byte_stream, size)),
        "C's rstream",
        partial(_rstream, at.here.host, size),
        limit=0.7,
        better=MORE,
    )


RSTREAM_ECHOES = 1000


def _echo_beside_rstream(at: Peers, size: int) -> Row:
    return Row(
        f"rxe/stream/echo/{size}/beside_rstream",
        "us",
        lambda: latency(_run(at, _echo_byte_stream, size)),
        "C's rstream",
        partial(_rstream_round_trip, at.here.host, size),
    )


def _rstream_round_trip(host: str, size: int) -> Reading:
    found, cpu_us = _rstream_fields(host, size, 1, RSTREAM_ECHOES)
    extra = {"printed": " ".join(found)}
    return Reading(2 * float(found[-1]), extra=extra, cpu_us=cpu_us / RSTREAM_ECHOES)


def _rstream(host: str, size: int) -> Reading:
    """Return the bandwidth that rstream prints: both sides send in turn."""
    count = 8
    rounds = max(1, RSTREAM_BYTES // size // count)
    found, cpu_us = _rstream_fields(host, size, count, rounds)
    extra = {"printed": " ".join(found)}
    both_directions = 2 * size * count * rounds / MEGABYTE
    return Reading(float(found[-2]) * 1e9 / 8 / MEGABYTE, "", extra, cpu_us / both_directions)


def _rstream_fields(host: str, size: int, count: int, rounds: int) -> tuple[list[str], float]:
    """Return what rstream prints: name, bytes, transfers, iterations, total, seconds, Gb/s, and the
    us for a transfer, of which there are as many in each direction; and the processor time of both
    its processes, from their starts, in microseconds."""
    words = ["-p", str(free_port()), "-S", str(size), "-C", str(count), "-I", str(rounds)]
    before = ended_processor_seconds()
    printed = against_itself(["rstream"], ["-s", host, *words], words).split()
    return printed, (ended_processor_seconds() - before) * 1e6


# -- where they run -------------------------------------------------------------------------------


def _run(
    at: Peers, measure: Callable[[Candidates, int, int], Awaitable[Measurement]], size: int
) -> Measurement:
    server = at.server("auto")
    main = partial(measure, at.here, server.stream, size)
    return of_both(partial(run, main, spin=at.here.spin), server.pid)


OverAsyncio = Callable[
    [Candidates, tuple[asyncio.StreamReader, asyncio.StreamWriter], int], Awaitable[Measurement]
]


def _run_rdma(at: Peers, measure: OverAsyncio, size: int) -> Measurement:
    server = at.server("auto")

    async def connected() -> Measurement:
        pair = await open_rdma_connection(at.here.host, server.transport, device=at.here.device)
        return await _and_close(at.here, measure, pair, size)

    return of_both(partial(run, connected, spin=at.here.spin), server.pid)


def _run_tcp(at: Peers, measure: OverAsyncio, size: int) -> Measurement:
    server = at.server("asyncio")

    async def connected() -> Measurement:
        pair = await asyncio.open_connection(at.here.host, server.tcp)
        below = pair[1].get_extra_info("socket")
        below.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return await _and_close(at.here, measure, pair, size)

    return of_both(partial(run, connected, loop="asyncio"), server.pid)


async def _and_close(
    here: Candidates,
    measure: OverAsyncio,
    pair: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    size: int,
) -> Measurement:
    try:
        return await measure(here, pair, size)
    finally:
        pair[1].close()
        with anyio.move_on_after(1):
            await pair[1].wait_closed()
