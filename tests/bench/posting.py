"""The processor time of each kind of post and its await, on a device that takes no time."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

import anyio

from aiordma import (
    Access,
    Connection,
    ConnectionOptions,
    Datagram,
    RemoteMemory,
    connect,
    open_datagram,
    open_shared_receive,
)
from aiordma.bench.loops import run
from aiordma.bench.workload import Workload
from aiordma.types import DatagramMessage

from .candidates import Candidates
from .instant import instant, prepare
from .rows import Reading, Row, constant, together

__all__ = ("rows",)

WINDOW = 32
SIZE = 64
MOST_PARTS = 8
PLAIN = 1000
"""Bytes of a buffer that is not registered, and too long to go inline."""

Window: TypeAlias = Callable[[], list[Awaitable[object]]]
"""Posts WINDOW requests."""
Setup: TypeAlias = Callable[
    [Candidates], AbstractAsyncContextManager[tuple[Connection | Datagram, Window]]
]


def rows(here: Candidates) -> list[Row]:
    """Return two rows for each kind of post: its time, and its ratio to the plain WRITE's."""
    found = []
    for kind, setup in KINDS.items():
        pair = together(partial(_in_pairs, here, setup))
        found.append(
            Row(
                f"native/{kind}/completed_await",
                "us CPU",
                partial(pair, "kind"),
                "1 us",
                constant(1.0),
                limit=1.0,
                note="post and await, on a device that takes no time",
            )
        )
        found.append(
            Row(
                f"native/{kind}/beside_write",
                "us CPU",
                partial(pair, "kind again"),
                "a plain WRITE",
                partial(pair, "write"),
                limit=1.3,
                note="the same measurements, each between two of a plain WRITE",
            )
        )
    return found


def _in_pairs(here: Candidates, setup: Setup) -> dict[str, list[Reading]]:
    """Measure a kind and the plain WRITE in turn, once for both rows. The WRITE's time is the mean
    of the measurements before and after the kind's, because a processor's speed drifts."""

    def measured(setup: Setup) -> Reading:
        prepare()
        return run(partial(_main, here, setup))

    kinds, writes = [], []
    before = measured(PLAIN_WRITE)
    for _ in range(here.rounds):
        kinds.append(measured(setup))
        after = measured(PLAIN_WRITE)
        writes.append(_mean(before, after))
        before = after
    return {"kind": kinds, "kind again": kinds, "write": writes}


def _mean(first: Reading, second: Reading) -> Reading:
    assert first.value is not None
    assert second.value is not None
    extra = {"before": first.value, "after": second.value}
    return Reading((first.value + second.value) / 2, extra=extra)


async def _main(here: Candidates, setup: Setup) -> Reading:
    seconds = here.seconds / 4  # some hundred thousand posts
    async with setup(here) as (endpoint, window):
        with instant(endpoint):
            await _windows(window, seconds / 10)
            cpu = time.process_time()
            count = await _windows(window, seconds)
            cpu = time.process_time() - cpu
            await anyio.sleep(0.01)  # what completed after the last await is delivered
    return Reading(cpu / count * 1e6, extra={"count": count})


async def _windows(window: Window, seconds: float) -> int:
    until, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        for request in window():
            await request
        count += WINDOW
    return count


# -- a connection ---------------------------------------------------------------------------------


@asynccontextmanager
async def _connected(
    here: Candidates, receive_buffers: int
) -> AsyncIterator[tuple[Connection, RemoteMemory]]:
    async with await connect(
        here.host,
        here.ports("auto", True).rdma,
        device=here.device,
        private_data=Workload("write", SIZE, WINDOW).pack(),
        options=ConnectionOptions(
            max_send_wr=WINDOW, max_recv_wr=WINDOW, max_send_sge=MOST_PARTS, max_recv_sge=MOST_PARTS
        ),
        receive_buffers=receive_buffers,
        receive_size=64,
    ) as connection:
        if not receive_buffers:
            yield connection, RemoteMemory(0, 0, 0)
            return
        await connection.send(b"where?")
        yield connection, RemoteMemory.unpack(await connection.receive())


def _kind(choose: Callable[[Connection, RemoteMemory], Window], receive_buffers: int = 2) -> Setup:
    """Return the set-up of a kind of post of a connection."""

    @asynccontextmanager
    async def setup(here: Candidates) -> AsyncIterator[tuple[Connection, Window]]:
        async with _connected(here, receive_buffers) as (connection, remote):
            yield connection, choose(connection, remote)

    return setup


def _local(connection: Connection | Datagram, size: int = SIZE) -> Any:
    return connection.register(bytearray(size))[:]


def _parts(connection: Connection | Datagram, count: int) -> list[Any]:
    whole, size = _local(connection), SIZE // count
    return [whole[i * size : (i + 1) * size] for i in range(count)]


def _number(remote: RemoteMemory) -> RemoteMemory:
    """Return 8 bytes that are aligned to 8."""
    offset = -remote.address % 8
    return remote[offset : offset + 8]


# Each of these makes its calls as a program does: a functools.partial with keywords would cost as
# much as the call.


def _write(c: Connection, remote: RemoteMemory) -> Window:
    post, local = c.post_write, _local(c)
    return lambda: [post(local, remote) for _ in range(WINDOW)]


def _read(c: Connection, remote: RemoteMemory) -> Window:
    post, local = c.post_read, _local(c)
    return lambda: [post(local, remote) for _ in range(WINDOW)]


def _write_inline(c: Connection, remote: RemoteMemory) -> Window:
    post, data, place = c.post_write, b"x" * 32, remote[:32]
    return lambda: [post(data, place) for _ in range(WINDOW)]


def _write_keywords(c: Connection, remote: RemoteMemory) -> Window:
    post, local = c.post_write, _local(c)
    return lambda: [post(local=local, remote=remote, fence=False) for _ in range(WINDOW)]


def _write_immediate(c: Connection, remote: RemoteMemory) -> Window:
    post, local = c.post_write, _local(c)
    return lambda: [post(local, remote, immediate=7) for _ in range(WINDOW)]


def _send(c: Connection, remote: RemoteMemory) -> Window:
    post, local = c.post_send, _local(c)
    return lambda: [post(local) for _ in range(WINDOW)]


def _send_immediate(c: Connection, remote: RemoteMemory) -> Window:
    post, local = c.post_send, _local(c)
    return lambda: [post(local, immediate=7) for _ in range(WINDOW)]


def _send_flags(c: Connection, remote: RemoteMemory) -> Window:
    post, local = c.post_send, _local(c)
    return lambda: [post(local, fence=True, solicited=True) for _ in range(WINDOW)]


def _send_invalidate(c: Connection, remote: RemoteMemory) -> Window:
    post, local = c.post_send, _local(c)
    return lambda: [post(local, invalidate=7) for _ in range(WINDOW)]


def _writev2(c: Connection, remote: RemoteMemory) -> Window:
    post, parts = c.post_writev, _parts(c, 2)
    return lambda: [post(parts, remote) for _ in range(WINDOW)]


def _writev8(c: Connection, remote: RemoteMemory) -> Window:
    post, parts = c.post_writev, _parts(c, 8)
    return lambda: [post(parts, remote) for _ in range(WINDOW)]


def _writev2_immediate(c: Connection, remote: RemoteMemory) -> Window:
    post, parts = c.post_writev, _parts(c, 2)
    return lambda: [post(parts, remote, immediate=7) for _ in range(WINDOW)]


def _readv2(c: Connection, remote: RemoteMemory) -> Window:
    post, parts = c.post_readv, _parts(c, 2)
    return lambda: [post(parts, remote) for _ in range(WINDOW)]


def _sendv2(c: Connection, remote: RemoteMemory) -> Window:
    post, parts = c.post_sendv, _parts(c, 2)
    return lambda: [post(parts) for _ in range(WINDOW)]


def _sendv2_inline(c: Connection, remote: RemoteMemory) -> Window:
    post, parts = c.post_sendv, [b"x" * 16, b"y" * 16]
    return lambda: [post(parts) for _ in range(WINDOW)]


def _send_inline(c: Connection, remote: RemoteMemory) -> Window:
    post, data = c.post_send, b"x" * 32
    return lambda: [post(data) for _ in range(WINDOW)]


def _send_plain(c: Connection, remote: RemoteMemory) -> Window:
    post, data = c.post_send, b"x" * PLAIN
    return lambda: [post(data) for _ in range(WINDOW)]


def _write_plain(c: Connection, remote: RemoteMemory) -> Window:
    post, data = c.post_write, b"x" * PLAIN
    place = RemoteMemory(remote.address, PLAIN, remote.rkey)  # nothing is written to it
    return lambda: [post(data, place) for _ in range(WINDOW)]


def _sendv2_plain(c: Connection, remote: RemoteMemory) -> Window:
    post, parts = c.post_sendv, [b"x" * 4, b"y" * PLAIN]
    return lambda: [post(parts) for _ in range(WINDOW)]


def _compare_swap(c: Connection, remote: RemoteMemory) -> Window:
    post, local = c.post_compare_swap, _local(c, 8)
    number = _number(remote)
    return lambda: [post(local, number, 1, 2) for _ in range(WINDOW)]


def _fetch_add(c: Connection, remote: RemoteMemory) -> Window:
    post, local = c.post_fetch_add, _local(c, 8)
    number = _number(remote)
    return lambda: [post(local, number, 1) for _ in range(WINDOW)]


def _compare_swap_call(c: Connection, remote: RemoteMemory) -> Window:
    call, number = c.compare_swap, _number(remote)
    return lambda: [call(number, 1, 2) for _ in range(WINDOW)]


def _fetch_add_call(c: Connection, remote: RemoteMemory) -> Window:
    call, number = c.fetch_add, _number(remote)
    return lambda: [call(number, 1) for _ in range(WINDOW)]


def _recv(c: Connection, remote: RemoteMemory) -> Window:
    post, local = c.post_recv, _local(c)
    return lambda: [post(local) for _ in range(WINDOW)]


def _recvv2(c: Connection, remote: RemoteMemory) -> Window:
    post, parts = c.post_recvv, _parts(c, 2)
    return lambda: [post(parts) for _ in range(WINDOW)]


# -- messages -------------------------------------------------------------------------------------


@asynccontextmanager
async def _messages(
    here: Candidates, receive: Callable[[Connection], Callable[[], Awaitable[object]]]
) -> AsyncIterator[tuple[Connection, Window]]:
    async with await connect(
        here.host,
        here.ports("auto", True).rdma,
        device=here.device,
        private_data=Workload("messages", SIZE, WINDOW).pack(),
        receive_buffers=2 * WINDOW,
        receive_size=SIZE,
    ) as connection:
        # Each block that is posted again completes at once, so these messages never run out.
        for _ in range(WINDOW):
            await connection.send(bytes(SIZE))
        take = receive(connection)
        await take()
        yield connection, lambda: [take() for _ in range(WINDOW)]


def _receive(c: Connection) -> Callable[[], Awaitable[object]]:
    return c.receive


def _receive_message(c: Connection) -> Callable[[], Awaitable[object]]:
    return c.receive_message


def _receive_view(c: Connection) -> Callable[[], Awaitable[object]]:
    async def view() -> None:
        async with c.receive_view():
            pass

    return view


# -- other endpoints ------------------------------------------------------------------------------


@asynccontextmanager
async def _windows_of_memory(here: Candidates) -> AsyncIterator[tuple[Connection, Window]]:
    async with _connected(here, 2) as (connection, _):
        memory = connection.register(bytearray(SIZE), Access.MW_BIND | Access.LOCAL_WRITE)[:]
        access = Access.REMOTE_READ
        opened = [await connection.open_window() for _ in range(WINDOW // 2)]

        def bind_and_invalidate() -> list[Awaitable[object]]:
            posted: list[Awaitable[object]] = []
            for window in opened:
                posted.append(connection.post_bind_window(window, memory, access))
                posted.append(connection.post_invalidate(window))
            return posted

        yield connection, bind_and_invalidate


@asynccontextmanager
async def _shared_receives(
    here: Candidates, parts: int
) -> AsyncIterator[tuple[Connection, Window]]:
    async with (
        await open_shared_receive(
            here.host, device=here.device, depth=WINDOW, max_sge=MOST_PARTS
        ) as shared,
        _connected(here, 0) as (connection, _),
    ):
        receive = _parts(connection, parts) if parts > 1 else _local(connection)
        given = [receive for _ in range(WINDOW)]
        with instant(connection):
            await connection.post_recv(_local(connection))  # chooses the completion queue

        def post() -> list[Awaitable[object]]:
            return [*shared.post_srq_recv(given)]

        yield connection, post


@asynccontextmanager
async def _datagrams(
    here: Candidates, parts: int, is_receive: bool, is_plain: bool = False
) -> AsyncIterator[tuple[Datagram, Window]]:
    options: Any = {
        "device": here.device,
        "receive_buffers": 0,
        "options": ConnectionOptions(max_send_wr=WINDOW, max_recv_wr=WINDOW),
    }
    async with await open_datagram(here.host, **options) as datagram:
        if is_receive:
            region = datagram.register(bytearray(datagram.mtu))
            local, receive = region[:], datagram.post_recv
            yield datagram, lambda: [receive(local) for _ in range(WINDOW)]
        else:
            assert datagram.local_address is not None
            peer = await datagram.resolve(*datagram.local_address[:2])
            if is_plain:
                plain, data = datagram.post_ud_send, b"x" * PLAIN
                yield datagram, lambda: [plain(data, peer) for _ in range(WINDOW)]
            elif parts > 1:
                sendv, given = datagram.post_ud_sendv, _parts(datagram, parts)
                yield datagram, lambda: [sendv(given, peer) for _ in range(WINDOW)]
            else:
                send, local = datagram.post_ud_send, _local(datagram)
                yield datagram, lambda: [send(local, peer) for _ in range(WINDOW)]


@asynccontextmanager
async def _received_datagrams(
    here: Candidates, senders: int
) -> AsyncIterator[tuple[Datagram, list[DatagramMessage], Callable[[], Awaitable[object]]]]:
    """A socket, a message of each of several senders, and a function that has it send to itself."""
    async with AsyncExitStack() as stack:
        sockets = [
            await stack.enter_async_context(
                await open_datagram(
                    here.host,
                    device=here.device,
                    receive_buffers=WINDOW,
                    options=ConnectionOptions(max_send_wr=WINDOW),
                )
            )
            for _ in range(1 + senders)
        ]
        mine = sockets[0]
        assert mine.local_address is not None
        peer = await mine.resolve(*mine.local_address[:2])
        messages = []
        for sender in sockets[1:]:
            await sender.send(bytes(SIZE), peer)
            messages.append(await mine.receive())
        yield mine, messages, lambda: mine.send(bytes(SIZE), peer)


@asynccontextmanager
async def _datagram_receive(here: Candidates) -> AsyncIterator[tuple[Datagram, Window]]:
    async with _received_datagrams(here, 0) as (datagram, _, send):
        # Each block that is posted again completes at once, so these messages never run out.
        for _ in range(WINDOW):
            await send()
        await anyio.sleep(0.1)
        receive = datagram.receive
        yield datagram, lambda: [receive() for _ in range(WINDOW)]


@asynccontextmanager
async def _datagram_replies(here: Candidates) -> AsyncIterator[tuple[Datagram, Window]]:
    async with _received_datagrams(here, 4) as (datagram, messages, _):
        post, local = datagram.post_ud_send, _local(datagram)
        given = messages * (WINDOW // len(messages))
        yield datagram, lambda: [post(local, message.source) for message in given]


PLAIN_WRITE: Setup = _kind(_write)

KINDS: dict[str, Setup] = {
    "read": _kind(_read),
    "write_keywords": _kind(_write_keywords),
    "write_immediate": _kind(_write_immediate),
    "send": _kind(_send),
    "send_immediate": _kind(_send_immediate),
    "send_flags": _kind(_send_flags),
    "send_invalidate": _kind(_send_invalidate),
    "writev2": _kind(_writev2),
    "writev8": _kind(_writev8),
    "writev2_immediate": _kind(_writev2_immediate),
    "readv2": _kind(_readv2),
    "sendv2": _kind(_sendv2),
    "sendv2_inline": _kind(_sendv2_inline),
    "send_inline": _kind(_send_inline),
    "write_inline": _kind(_write_inline),
    "send_plain": _kind(_send_plain),
    "write_plain": _kind(_write_plain),
    "sendv2_plain": _kind(_sendv2_plain),
    "compare_swap": _kind(_compare_swap),
    "fetch_add": _kind(_fetch_add),
    "compare_swap_call": _kind(_compare_swap_call),
    "fetch_add_call": _kind(_fetch_add_call),
    "recv": _kind(_recv, receive_buffers=0),
    "recvv2": _kind(_recvv2, receive_buffers=0),
    "srq_recv": partial(_shared_receives, parts=1),
    "srq_recv2": partial(_shared_receives, parts=2),
    "ud_send": partial(_datagrams, parts=1, is_receive=False),
    "ud_sendv2": partial(_datagrams, parts=2, is_receive=False),
    "ud_send_plain": partial(_datagrams, parts=1, is_receive=False, is_plain=True),
    "ud_recv": partial(_datagrams, parts=1, is_receive=True),
    "ud_receive": _datagram_receive,
    "ud_reply": _datagram_replies,
    "bind_invalidate": _windows_of_memory,
    "receive": partial(_messages, receive=_receive),
    "receive_message": partial(_messages, receive=_receive_message),
    "receive_view": partial(_messages, receive=_receive_view),
}
