"""Connections over RoCE, by hand and by the connection manager, on networks that lose, repeat and
reorder packets: all bytes and all requests arrive, once and in order, or the request ends with its
error."""

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aiordma
from aiordma import Access, RetryExceededError
from aiordma.testing import Host, Simulation, simulate
from aiordma.verbs import Device, Mtu, PeerFlushedError

pytestmark = pytest.mark.natively

DEVICE = "software_roce"
SEEDS = 60
REMOTE = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
SIZES = (0, 1, 255, 256, 257, 1024, 5000, 40_000)


def gid_index(address: str) -> int:
    with Device(DEVICE).open() as context:
        wanted = b"\0" * 10 + b"\xff\xff" + ipaddress.IPv4Address(address).packed
        return next(entry.index for entry in context.gid_table() if entry.gid == wanted)


@contextlib.asynccontextmanager
async def connected(
    host: Host, table: dict[str, Any], name: str, peer: str, mtu: Mtu, **options: Any
) -> AsyncIterator[aiordma.types.UnmanagedConnection]:
    async with aiordma.open_queue_pair(
        DEVICE, gid_index=gid_index(host.address), **options
    ) as pair:
        table[name] = pair.address
        while peer not in table:
            await asyncio.sleep(0.01)
        await pair.connect_to(table[peer], path_mtu=mtu)
        table[f"{name} is ready"] = True
        while f"{peer} is ready" not in table:
            await asyncio.sleep(0.01)
        yield pair


def pattern(number: int, size: int) -> bytes:
    return bytes((number * 31 + at * 7) & 0xFF for at in range(size))


async def everything(
    host: Host, table: dict[str, Any], name: str, peer: str, mtu: Mtu, messages: int
) -> None:
    """WRITEs, READs, atomics and messages to a peer that does the same."""
    own = bytearray(messages * 64 * 1024 + 8)
    async with connected(
        host, table, name, peer, mtu, receive_buffers=4, receive_size=65536
    ) as pair:
        region = pair.register(own, REMOTE)
        counter = -region.address % 8
        table[f"{name}'s"] = region[:].remote(), region[counter : counter + 8].remote()
        while f"{peer}'s" not in table:
            await asyncio.sleep(0.01)
        theirs, their_counter = table[f"{peer}'s"]

        async def send() -> None:
            for number in range(messages):
                size = SIZES[number % len(SIZES)]
                start = 8 + number * 64 * 1024 + 8
                data = pattern(number, size)
                write = pair.post_write(data, theirs[start : start + size])
                message = pair.post_send(data, immediate=number)
                read = pair.post_read(bytearray(size), theirs[start : start + size])
                await write
                await message
                await read
                assert await pair.read_bytes(theirs[start : start + size]) == data
                assert await pair.fetch_add(their_counter, 1) == number

        async def receive() -> None:
            for number in range(messages):
                message = await pair.receive_message()
                assert message.immediate == number
                assert bytes(message.data) == pattern(number, SIZES[number % len(SIZES)])
                # What was written before the message is there with it.
                start = 8 + number * 64 * 1024 + 8
                assert own[start : start + len(message.data)] == message.data

        await asyncio.gather(send(), receive())
        table[f"{name} is done"] = True
        while f"{peer} is done" not in table:
            await asyncio.sleep(0.01)
        await asyncio.sleep(1)  # the peer's last acknowledgement


@pytest.mark.parametrize("seed", range(SEEDS))
def test_all_bytes_and_requests_arrive_once_and_in_order(seed: int) -> None:
    async def scenario(simulation: Simulation) -> None:
        one, two = simulation.host("one"), simulation.host("two")
        simulation.link(
            latency=0.001,
            jitter=simulation.random.choice([0.0, 0.003]),
            loss=simulation.random.choice([0.0, 0.02, 0.1]),
        )
        table: dict[str, Any] = {}
        mtu = simulation.random.choice([Mtu.MTU_256, Mtu.MTU_1024, Mtu.MTU_4096])
        await asyncio.gather(
            one.run(everything, one, table, "one", "two", mtu, 12),
            two.run(everything, two, table, "two", "one", mtu, 12),
        )

    simulate(scenario, seed=seed)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_connections_are_made_and_ended_though_messages_get_lost(seed: int) -> None:
    """Ten connections at a time: each echoes, and both sides learn of the end, if need be by
    keepalive: a side that has gone does not repeat its goodbye."""

    async def serve(host: Host) -> None:
        async with aiordma.listen(host.address, 7000, device=DEVICE, keepalive=5.0) as listener:

            async def echo() -> None:
                # The peer has gone, and its last acknowledgement or its goodbye was lost.
                ends = contextlib.suppress(PeerFlushedError, RetryExceededError)
                async with await listener.accept() as connection:
                    with ends:
                        async for message in connection:
                            await connection.send(message)

            await asyncio.gather(*(echo() for _ in range(10)))

    async def use(host: Host, server: str, number: int) -> None:
        async with await aiordma.connect(server, 7000, device=DEVICE, timeout=60) as connection:
            data = pattern(number, SIZES[number % 6])
            await connection.send(data)
            assert await connection.receive() == data

    async def scenario(simulation: Simulation) -> None:
        one, two = simulation.host("one"), simulation.host("two")
        simulation.link(latency=0.001, jitter=0.003, loss=simulation.random.choice([0.0, 0.1, 0.2]))
        await asyncio.gather(
            one.run(serve, one), *(two.run(use, two, one.address, i) for i in range(10))
        )

    simulate(scenario, seed=seed)


def test_a_peer_that_is_not_ready_for_long_is_not_a_dead_one() -> None:
    """Each NAK is an answer: with rnr_retry_count=7 the sender waits as long as it takes."""

    async def late(host: Host, table: dict[str, Any]) -> bytes:
        options = aiordma.ConnectionOptions(min_rnr_timer=1)
        async with connected(
            host, table, "late", "early", Mtu.MTU_1024, receive_buffers=0, options=options
        ) as pair:
            buffer = bytearray(5000)
            await asyncio.sleep(60)
            completion = await pair.post_recv(buffer)
            return bytes(buffer[: completion.byte_len])

    async def early(host: Host, table: dict[str, Any]) -> None:
        async with connected(host, table, "early", "late", Mtu.MTU_1024) as pair:
            await pair.send(pattern(1, 5000))

    async def scenario(simulation: Simulation) -> None:
        one, two = simulation.host("one"), simulation.host("two")
        simulation.link(latency=0.001)
        table: dict[str, Any] = {}
        received, _ = await asyncio.gather(one.run(late, one, table), two.run(early, two, table))
        assert received == pattern(1, 5000)

    simulate(scenario, seed=1)
