"""The client: runs one workload, and measures it.

The code is what a user would write for speed: it registers memory once, posts requests, and
awaits each one.
"""

import socket
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from mmap import mmap

import anyio

from aiordma import (
    Connection,
    ConnectionKeywords,
    Datagram,
    MemorySlice,
    RemoteMemory,
    WorkRequest,
    connect,
    open_datagram,
)
from aiordma.bench.meter import Measurement, Meter
from aiordma.bench.timing import (
    deadline,
    one_by_one,
    perf_counter_ns,
    pipelined,
    timed_pipeline,
)
from aiordma.bench.workload import Workload

__all__ = ("measure",)

SETTLE_SECONDS = 0.05
"""Delay before the first message, in which the server posts its receives. An earlier message would
end the connection on a device without receiver-not-ready (siw), and be retried on others."""

LOST_SECONDS = 0.5
"""Seconds after which a datagram without an answer counts as lost."""

Drive = Callable[[int, Meter], Awaitable[None]]


async def measure(
    host: str,
    port: int,
    work: Workload,
    seconds: float,
    *,
    device: str = "auto",
    timed: bool = True,
    warm_up: float | None = None,
) -> Measurement:
    """Measure a workload with a server of `serve`.

    Args:
        host: the server's address.
        port: its port.
        work: the workload.
        seconds: the duration of the measurement.
        device: "auto", or the name of the RDMA device.
        timed: record the time of each operation. If false and the depth is above 1, only count
            operations, which saves reading the clock twice for each.
        warm_up: seconds for which the workload runs before the measurement; None: a tenth of
            `seconds`.
    """
    if work.operation == "datagrams":
        local = _address_towards(host)
        async with await open_datagram(local, device=device, receive_buffers=256) as datagrams:
            return await _run(await _datagrams(datagrams, host, port, work), work, seconds, warm_up)
    connection = await connect(
        host, port, device=device, private_data=work.pack(), **_options(work)
    )
    async with connection:
        await anyio.sleep(SETTLE_SECONDS)
        return await _run(await _prepare(connection, work, timed), work, seconds, warm_up)


async def _run(drive: Drive, work: Workload, seconds: float, warm_up: float | None) -> Measurement:
    await drive(deadline(seconds / 10 if warm_up is None else warm_up), Meter("", work.size))
    meter = Meter(work.name, work.size)
    until = deadline(seconds)
    with meter:
        await drive(until, meter)
    return meter.result()


def _options(work: Workload) -> ConnectionKeywords:
    depth = work.depth
    if work.is_one_sided:
        return ConnectionKeywords(
            receive_buffers=2,
            receive_size=64,
            max_send_wr=max(2, depth),
            max_send_sge=1,
            max_recv_sge=1,
        )
    if work.operation == "messages":
        return ConnectionKeywords(
            receive_buffers=2 * depth + 2, receive_size=work.size, max_send_wr=depth + 1
        )
    receives = depth if work.operation == "echo" else 1
    return ConnectionKeywords(
        receive_buffers=0,
        max_recv_wr=receives,
        max_send_wr=depth + 1,
        max_send_sge=1,
        max_recv_sge=1,
    )


async def _prepare(connection: Connection, work: Workload, timed: bool) -> Drive:
    if work.operation == "messages":
        return partial(_messages, connection, work)
    if work.operation == "echo":
        memory = connection.register(bytearray(2 * work.size * work.depth))
        if work.depth == 1:
            return partial(_echo, connection, memory[: work.size], memory[work.size :])
        return partial(_echo_window, connection, work, memory[:])
    # Page-aligned, so that each packet's payload spans as few pages as possible.
    memory = connection.register(mmap(-1, work.size))
    local = memory[:]
    post: Callable[[], WorkRequest]
    if work.operation in ("send", "views"):
        post = partial(connection.post_send, local)
    else:
        await connection.send(b"where?")
        remote = RemoteMemory.unpack(await connection.receive())
        if work.operation == "chain":
            return partial(_chains, connection, work, local, remote)
        if work.operation == "read":
            post = partial(connection.post_read, remote, local)
        else:
            post = partial(connection.post_write, local, remote)
    if work.depth == 1:
        return partial(one_by_one, post)
    return partial(timed_pipeline if timed else pipelined, post, work.depth)


async def _echo(
    connection: Connection, ours: MemorySlice, place: MemorySlice, until: int, meter: Meter
) -> None:
    post_recv, post_send, samples = connection.post_recv, connection.post_send, meter.samples
    before = perf_counter_ns()
    while before < until:
        answer = post_recv(place)
        sent = post_send(ours)
        await answer
        await sent
        now = perf_counter_ns()
        samples.append(now - before)
        before = now


async def _echo_window(
    connection: Connection, work: Workload, memory: MemorySlice, until: int, meter: Meter
) -> None:
    size, samples = work.size, meter.samples
    post_recv, post_send = connection.post_recv, connection.post_send
    window: deque[tuple[int, MemorySlice, MemorySlice, WorkRequest, WorkRequest]] = deque()

    def start(ours: MemorySlice, place: MemorySlice) -> None:
        window.append((perf_counter_ns(), ours, place, post_recv(place), post_send(ours)))

    for i in range(work.depth):
        at = 2 * i * size
        start(memory[at : at + size], memory[at + size : at + 2 * size])
    now = 0
    while window:
        began, ours, place, answer, sent = window.popleft()
        await answer
        await sent
        now = perf_counter_ns()
        samples.append(now - began)
        if now < until:
            start(ours, place)


async def _messages(connection: Connection, work: Workload, until: int, meter: Meter) -> None:
    payload, samples = bytes(work.size), meter.samples
    began: deque[int] = deque()
    now = 0
    for _ in range(work.depth):
        began.append(perf_counter_ns())
        await connection.send(payload)
    while began:
        await connection.receive()
        now = perf_counter_ns()
        samples.append(now - began.popleft())
        if now < until:
            began.append(now)
            await connection.send(payload)


async def _chains(
    connection: Connection,
    work: Workload,
    local: MemorySlice,
    remote: RemoteMemory,
    until: int,
    meter: Meter,
) -> None:
    """Keep two chains in flight, each with half the depth."""
    length = max(1, work.depth // 2)
    chains: deque[list[WorkRequest]] = deque()

    def post() -> None:
        with connection.chain() as chain:
            for _ in range(length):
                chain.post_write(local, remote)
        chains.append(chain.requests)

    for _ in range(work.depth // length):
        post()
    while chains:
        requests = chains.popleft()
        for request in requests:
            await request
        meter.count += len(requests)
        if perf_counter_ns() < until:
            post()


async def _datagrams(datagrams: Datagram, host: str, port: int, work: Workload) -> Drive:
    server = await datagrams.resolve(host, port)
    payload = bytes(work.size)

    async def drive(until: int, meter: Meter) -> None:
        # A late answer is matched to a newer datagram: a sample is the time until some answer.
        began: deque[int] = deque()
        now = 0
        for _ in range(work.depth):
            began.append(perf_counter_ns())
            await datagrams.send(payload, server)
        while began:
            with anyio.move_on_after(LOST_SECONDS):
                await datagrams.receive()
                now = perf_counter_ns()
                meter.samples.append(now - began.popleft())
                if now < until:
                    began.append(now)
                    await datagrams.send(payload, server)
                continue
            now = perf_counter_ns()
            meter.lost += len(began)
            again, began = len(began), deque()
            if now < until:
                for _ in range(again):
                    began.append(perf_counter_ns())
                    await datagrams.send(payload, server)

    return drive


def _address_towards(host: str) -> str:
    """Return the local address from which Linux routes to the host. This sends nothing."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        found: str = probe.getsockname()[0]
    return found
