"""The server: the peer of each workload, and TCP echo servers for comparison."""

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from mmap import mmap

import anyio

from aiordma import (
    Access,
    Connection,
    ConnectionOptions,
    ConnectionRequest,
    Datagram,
    DisconnectedError,
    NotSupportedError,
    RdmaError,
    VerbsCallError,
    WorkRequest,
    listen,
    open_datagram,
)
from aiordma.bench.tcp import serve_protocol, serve_streams
from aiordma.bench.workload import Workload
from aiordma.types import MemorySlice

__all__ = ("RECEIVES", "serve")

logger: logging.Logger = logging.getLogger("aiordma")

MOST_REASON_BYTES = 148
"""What goes with a refusal: man rdma_reject."""

RECEIVES = 512
"""Receives posted for a workload without answers: as many as perftest posts."""

VIEWED_BYTES = 2 << 20
"""Blocks for a workload of views, unless more of them are in flight: what a cache holds."""

MOST_BYTES = 1 << 30
"""Limit of the memory for one client: the client chooses sizes, and must not exhaust the server."""


async def serve(
    host: str, port: int, announce: Callable[[int, int, int, int], None], *, device: str = "auto"
) -> None:
    """Serve benchmark clients until cancelled.

    Args:
        host: a local address.
        port: the RDMA port, for connections and datagrams; 0 takes a free port.
        announce: called with the RDMA port, the port of TCP streams, the port of a TCP protocol
            and the port of streams over RDMA, once the server listens on all of them.
        device: "auto", or the name of the RDMA device.
    """
    async with (
        anyio.create_task_group() as group,
        await listen(host, port, device=device) as listener,
        serve_streams(host, port + 1 if port else 0) as streams,
        serve_protocol(host, port + 2 if port else 0) as protocol,
        serve_streams(host, port + 3 if port else 0, device) as over_rdma,
    ):
        await group.start(_answer_datagrams, host, listener.port, device)
        announce(listener.port, streams, protocol, over_rdma)
        while True:
            group.start_soon(_serve_one, await listener.request())


async def _serve_one(request: ConnectionRequest) -> None:
    name = "a request"
    try:
        work = _wanted(request.private_data)
        name = work.name
        async with request.accept(options=work.inlined(_options(work))) as connection:
            if work.is_one_sided:
                await _offer_memory(connection, work)
            elif work.operation == "echo":
                await _echo(connection, work)
            elif work.operation == "messages":
                await _echo_messages(connection)
            elif work.operation == "views":
                await _take_views(connection)
            elif work.both:
                await _exchange(connection, work)
            else:
                await _take(connection, work)
    except DisconnectedError:
        pass  # clients end by disconnecting
    except (RdmaError, ValueError, OSError, MemoryError) as error:  # the server keeps running
        logger.info("%s of %s ended: %s", name, request.peer_address, error)
    except _UnwantedError as refusal:
        with suppress(RdmaError):  # the peer has left
            await request.reject(str(refusal).encode()[:MOST_REASON_BYTES])
    finally:
        await request.aclose()  # rejects a request that was not accepted


class _UnwantedError(Exception):
    """A client asks for what this server does not do."""


def _wanted(private_data: bytes) -> Workload:
    """Return the workload that a client asks for.

    Raises:
        _UnwantedError: it is none, or takes too much memory; the text is for the client.
    """
    try:
        work = Workload.unpack(private_data)
    except ValueError as error:
        raise _UnwantedError(str(error)) from error
    needed = _memory(work)
    if needed > MOST_BYTES:
        raise _UnwantedError(
            f"{work.name} takes {needed} bytes here, and a client gets {MOST_BYTES}"
        )
    return work


def _memory(work: Workload) -> int:
    """Return the bytes of buffers that a client's workload takes on the server."""
    if work.operation == "echo":
        return work.size * _echo_receives(work.depth)
    if work.operation == "messages":
        return work.size * _message_receives(work.depth)
    if work.operation == "views":
        return work.size * _view_receives(work)
    return work.size


def _options(work: Workload) -> ConnectionOptions:
    depth = work.depth
    if work.is_one_sided:
        return ConnectionOptions(receive_buffers=2, receive_size=64, max_send_wr=2)
    if work.operation == "echo":
        return ConnectionOptions(
            receive_buffers=0,
            max_recv_wr=_echo_receives(depth),
            max_send_wr=depth + 1,
            max_send_sge=1,
            max_recv_sge=1,
        )
    if work.operation == "messages":
        return ConnectionOptions(
            receive_buffers=_message_receives(depth),
            receive_size=work.size,
            max_send_wr=depth + 1,
            send_ahead=work.ahead,
        )
    if work.operation == "views":
        return ConnectionOptions(
            receive_buffers=_view_receives(work), receive_size=work.size, max_send_wr=2
        )
    return ConnectionOptions(
        receive_buffers=0,
        max_recv_wr=_taken_receives(depth),
        max_send_wr=depth + 1 if work.both else 2,
        max_send_sge=1,
        max_recv_sge=1,
    )


def _taken_receives(depth: int) -> int:
    return max(RECEIVES, 2 * depth)


def _message_receives(depth: int) -> int:
    return 2 * depth + 2


def _view_receives(work: Workload) -> int:
    # A sender can be far ahead of the server: iWARP ends a connection that has no receive left.
    # Large messages come slowly, and many blocks of them miss the processor's cache (the row
    # software/views/65536/in_c of `make bench`).
    enough = _message_receives(work.depth)
    return max(enough, min(_taken_receives(work.depth), VIEWED_BYTES // work.size))


def _echo_receives(depth: int) -> int:
    # `depth` messages can be in flight to the server, and `depth` answers can be unacknowledged.
    return 2 * depth + 1


async def _offer_memory(connection: Connection, work: Workload) -> None:
    memory = await connection.register_in_thread(
        mmap(-1, work.size), Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE
    )
    # The client sends first: on iWARP, the accepting side must not.
    async for _ in connection:
        await connection.send(memory.remote().pack())


async def _echo(connection: Connection, work: Workload) -> None:
    size, depth = work.size, work.depth
    count = _echo_receives(depth)
    memory = await connection.register_in_thread(mmap(-1, size * count))
    places = [memory[i * size : (i + 1) * size] for i in range(count)]
    post_recv, post_send = connection.post_recv, connection.post_send
    receives = deque((place, post_recv(place)) for place in places)
    sends: deque[tuple[MemorySlice, WorkRequest]] = deque()
    plain = bytes(size) if work.is_inline else None
    try:
        while True:
            place, arrival = receives.popleft()
            await arrival
            sends.append((place, post_send(plain if plain is not None else place)))
            if len(sends) > depth:
                place, answer = sends.popleft()
                await answer
                receives.append((place, post_recv(place)))
    finally:
        for _, answer in sends:
            answer.add_done_callback(WorkRequest.exception)  # it may be flushed


async def _echo_messages(connection: Connection) -> None:
    async for message in connection:
        await connection.send(message)


async def _take_views(connection: Connection) -> None:
    with suppress(anyio.EndOfStream):
        while True:
            async with connection.receive_view():
                pass


async def _take(connection: Connection, work: Workload) -> None:
    # All receives share one buffer, because its contents are not used.
    region = await connection.register_in_thread(mmap(-1, work.size))
    await _keep_taking(connection, region[:], lambda: None)


async def _keep_taking(
    connection: Connection, place: MemorySlice, on_first: Callable[[], None]
) -> None:
    post_recv = connection.post_recv
    receives = deque(post_recv(place) for _ in range(connection.options.max_recv_wr))
    await receives.popleft()
    on_first()
    while True:
        receives.append(post_recv(place))
        await receives.popleft()


async def _exchange(connection: Connection, work: Workload) -> None:
    """Receive, and send in the same way from the first message on: on iWARP, the accepting side
    must not send before."""
    place = (await connection.register_in_thread(mmap(-1, work.size)))[:]
    memory = (await connection.register_in_thread(mmap(-1, work.size)))[:]
    ours = bytes(work.size) if work.is_inline else memory

    async def send() -> None:
        window = deque(connection.post_send(ours) for _ in range(work.depth))
        try:
            while True:
                await window[0]
                window.popleft()
                window.append(connection.post_send(ours))
        except RdmaError:
            pass  # the end of the connection, which ends the receives, too
        finally:
            for request in window:
                request.add_done_callback(WorkRequest.exception)  # expected to be flushed

    async with anyio.create_task_group() as group:

        def answer() -> None:
            group.start_soon(send)

        with suppress(RdmaError):
            await _keep_taking(connection, place, answer)
        group.cancel_scope.cancel()


async def _answer_datagrams(
    host: str, port: int, device: str, *, task_status: anyio.abc.TaskStatus[None]
) -> None:
    try:
        socket: Datagram = await open_datagram(host, port, device=device, receive_buffers=256)
    except (NotSupportedError, ValueError) as error:
        logger.info("no datagrams: %s", error)
        task_status.started()
        return
    async with socket:
        task_status.started()
        while True:
            message = await socket.receive()
            try:
                await socket.send(message.data, message.source)
            except VerbsCallError as error:
                logger.info("a datagram was not answered: %s", error)
