"""The client: runs one workload, and measures it.

The code is what a user would write for speed: it registers memory once, posts requests, and
awaits each one.
"""

import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from mmap import mmap
from typing import Any

import anyio
import anyio.abc

from aiordma import (
    Connection,
    ConnectionOptions,
    Datagram,
    RemoteMemory,
    WorkRequest,
    connect,
    open_datagram,
)
from aiordma.bench.conditions import Conditions
from aiordma.bench.meter import Measurement, Meter
from aiordma.bench.mistakes import first_error
from aiordma.bench.timing import (
    abandoning,
    deadline,
    one_by_one,
    perf_counter_ns,
    ping_pong,
    pipelined,
    timed_pipeline,
)
from aiordma.bench.workload import Workload
from aiordma.types import MemorySlice, Opening
from aiordma.verbs import LocalMemory

__all__ = ("measure",)

SETTLE_SECONDS = 0.05
"""Delay before the first message, in which the server posts its receives. An earlier message would
end the connection on a device without receiver-not-ready (siw), and be retried on others."""

FAR = 1 << 63
"""A deadline that never comes."""

BOTH_RECEIVES = 512
"""Receives that the client posts if the server sends, too: as many as the server posts."""

DATAGRAM_INLINE = 64
"""aiordma's default of `max_inline_data`."""

USUAL = Conditions()

LOST_SECONDS = 0.5
"""Seconds after which a datagram without an answer counts as lost."""

Drive = Callable[[int, Meter], Coroutine[Any, Any, None]]


async def measure(
    host: str,
    port: int,
    work: Workload,
    seconds: float,
    *,
    device: str = "auto",
    timed: bool = True,
    warm_up: float | None = None,
    conditions: Conditions = USUAL,
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
        conditions: the number of iterations, which replaces `seconds`, and others.

    Raises:
        ValueError: a condition cannot apply to the workload.
    """
    conditions.check([work])
    async with AsyncExitStack() as stack:
        if work.operation == "datagrams":
            sockets = [
                await stack.enter_async_context(_open_datagrams(host, device, work, conditions))
                for _ in range(conditions.queue_pairs)
            ]
            drives = [await _datagrams(each, host, port, work) for each in sockets]
            used = sockets[0].device_name
        else:
            options = replace(work.inlined(_options(work)), tos=conditions.tos)
            connections = [
                await stack.enter_async_context(
                    connect(host, port, device=device, private_data=work.pack(), options=options)
                )
                for _ in range(conditions.queue_pairs)
            ]
            await anyio.sleep(SETTLE_SECONDS)
            timed = timed or conditions.iterations is not None
            drives = [await _prepare(each, work, timed) for each in connections]
            used = connections[0].device_name
        return replace(await _run(drives, work, seconds, warm_up, conditions), device=used)


async def _run(
    drives: list[Drive],
    work: Workload,
    seconds: float,
    warm_up: float | None,
    conditions: Conditions,
) -> Measurement:
    iterations, count = conditions.iterations, len(drives)
    first = seconds / 10 if warm_up is None else warm_up
    if iterations is None:
        await _drive(drives, deadline(first), Meter("", work.size))
    else:
        await _drive(drives, FAR, Meter("", work.size, max(work.depth, iterations // 10)))
    meter = Meter(work.name if count == 1 else f"{work.name}/qp{count}", work.size, iterations)
    until = deadline(seconds) if iterations is None else FAR
    with meter:
        await _drive(drives, until, meter)
    return meter.result()


@asynccontextmanager
async def _tasks() -> AsyncIterator[anyio.abc.TaskGroup]:
    """A task group that raises its first error itself, not in a group."""
    try:
        async with anyio.create_task_group() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None


async def _drive(drives: list[Drive], until: int, meter: Meter) -> None:
    """Run the drives at the same time, with one meter."""
    if len(drives) == 1:
        await drives[0](until, meter)
        return
    async with _tasks() as group:
        for drive in drives:
            group.start_soon(drive, until, meter)


def _open_datagrams(
    host: str, device: str, work: Workload, conditions: Conditions
) -> Opening[Datagram]:
    return open_datagram(
        _address_towards(host),
        device=device,
        options=ConnectionOptions(
            receive_buffers=256,
            max_inline_data=DATAGRAM_INLINE if work.inline is None else work.inline,
        ),
        gid_index=conditions.gid_index,
        service_level=conditions.service_level,
    )


def _options(work: Workload) -> ConnectionOptions:
    depth = work.depth
    if work.is_one_sided:
        return ConnectionOptions(
            receive_buffers=2,
            receive_size=64,
            max_send_wr=max(2, depth),
            max_send_sge=1,
            max_recv_sge=1,
        )
    if work.operation == "messages":
        return ConnectionOptions(
            receive_buffers=2 * depth + 2,
            receive_size=work.size,
            max_send_wr=depth + 1,
            send_ahead=work.ahead,
        )
    receives = depth if work.operation == "echo" else 1
    if work.both:
        receives = max(BOTH_RECEIVES, 2 * depth)
    return ConnectionOptions(
        receive_buffers=0,
        max_recv_wr=receives,
        max_send_wr=depth + 1,
        max_send_sge=1,
        max_recv_sge=1,
    )


async def _prepare(connection: Connection, work: Workload, timed: bool) -> Drive:
    if work.operation == "messages":
        message = bytes(work.size)
        return partial(ping_pong, connection.send, connection.receive, message, work.depth)
    if work.operation == "echo":
        memory = connection.register(bytearray(2 * work.size * work.depth))
        if work.depth == 1:
            ours = bytes(work.size) if work.is_inline else memory[: work.size]
            return partial(_echo, connection, ours, memory[work.size :])
        return partial(_echo_window, connection, work, memory[:])
    # Page-aligned, so that each packet's payload spans as few pages as possible.
    memory = connection.register(mmap(-1, work.size))
    local: LocalMemory = bytes(work.size) if work.is_inline else memory[:]
    post: Callable[[], WorkRequest]
    if work.both:
        return _both(connection, work, local)
    if work.operation in ("send", "views"):
        post = partial(connection.post_send, local)
    else:
        await connection.send(b"where?")
        remote = RemoteMemory.unpack(await connection.receive())
        if work.operation == "chain":
            return partial(_chains, connection, work, local, remote)
        if work.operation == "read":
            post = partial(connection.post_read, memory[:], remote)
        else:
            post = partial(connection.post_write, local, remote)
    if work.depth == 1:
        return partial(one_by_one, post)
    return partial(timed_pipeline if timed else pipelined, post, work.depth)


async def _echo(
    connection: Connection, ours: LocalMemory, place: MemorySlice, until: int, meter: Meter
) -> None:
    post_recv, post_send, samples = connection.post_recv, connection.post_send, meter.samples
    before = perf_counter_ns()
    answer = sent = None
    with abandoning(lambda: (answer, sent)):
        for _ in meter.turns():
            if before >= until:
                break
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
    window: deque[tuple[int, LocalMemory, MemorySlice, WorkRequest, WorkRequest]] = deque()

    def start(ours: LocalMemory, place: MemorySlice) -> None:
        window.append((perf_counter_ns(), ours, place, post_recv(place), post_send(ours)))

    for i in range(work.depth):
        at = 2 * i * size
        to_send = bytes(size) if work.is_inline else memory[at : at + size]
        start(to_send, memory[at + size : at + 2 * size])
    turns = meter.turns(work.depth)
    sent = None
    with abandoning(lambda: (sent, *(each for _, _, _, *both in window for each in both))):
        while window:
            began, ours, place, answer, sent = window.popleft()
            await answer
            await sent
            now = perf_counter_ns()
            samples.append(now - began)
            if now < until and next(turns, False):
                start(ours, place)


async def _chains(
    connection: Connection,
    work: Workload,
    local: LocalMemory,
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
    turns = meter.turns(work.depth // length * length, length)
    with abandoning(lambda: (request for requests in chains for request in requests)):
        while chains:
            for request in chains[0]:
                await request
            meter.count += len(chains.popleft())
            if perf_counter_ns() < until and next(turns, False):
                post()


def _both(connection: Connection, work: Workload, local: LocalMemory) -> Drive:
    """Return a drive that sends while the server sends, too, and counts the messages of both."""
    place = connection.register(mmap(-1, work.size))[:]
    post_recv = connection.post_recv
    receives = deque(post_recv(place) for _ in range(connection.options.max_recv_wr))

    async def take(meter: Meter) -> None:
        while True:
            await receives[0]  # a cancelled drive leaves it to the next one
            receives.popleft()
            receives.append(post_recv(place))
            meter.received += 1

    async def drive(until: int, meter: Meter) -> None:
        async with _tasks() as group:
            group.start_soon(take, meter)
            await timed_pipeline(partial(connection.post_send, local), work.depth, until, meter)
            group.cancel_scope.cancel()

    return drive


async def _datagrams(datagrams: Datagram, host: str, port: int, work: Workload) -> Drive:
    server = await datagrams.resolve(host, port)
    payload = bytes(work.size)

    async def drive(until: int, meter: Meter) -> None:
        # A late answer is matched to a newer datagram: a sample is the time until some answer.
        began: deque[int] = deque()
        now, turns = 0, meter.turns(work.depth)
        for _ in range(work.depth):
            began.append(perf_counter_ns())
            await datagrams.send(payload, server)
        while began:
            with anyio.move_on_after(LOST_SECONDS):
                await datagrams.receive()
                now = perf_counter_ns()
                meter.samples.append(now - began.popleft())
                if now < until and next(turns, False):
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
