"""What only verbs have, at bad times: memory and devices that go, queues that are full, late CM
messages. And what the state machine has found."""

import asyncio
from contextlib import suppress

import anyio
import pytest

import aiordma
from aiordma import Access
from aiordma.testing import Faults, Simulation, simulate
from aiordma.verbs import AsyncEventType
from tests.internals import fail, hub_of, queues_of
from tests.simulation.test_simulation import PORT, ask, echo, two_hosts

pytestmark = pytest.mark.natively

WINDOWED = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.MW_BIND


def test_window_of_an_ended_connection_says_why() -> None:
    """The bind has completed, and the connection ends before the program looks at the window."""
    errors: list[str] = []

    async def scenario(simulation: Simulation) -> None:
        server, client = await two_hosts(simulation)

        async def program(steps: int) -> None:
            async with aiordma.connect(server.address, PORT, device="software") as connection:
                region = connection.register(bytearray(64), WINDOWED)
                binding = asyncio.create_task(connection.bind(region[:], Access.REMOTE_WRITE))

                async def use() -> aiordma.RemoteMemory:
                    return (await binding).remote

                using = asyncio.create_task(use())
                for _ in range(steps):
                    await asyncio.sleep(0)
                fail(connection, aiordma.RdmaError("it breaks"))
                try:
                    await using
                except Exception as error:
                    errors.append(repr(error))

        for steps in range(6):
            await client.run(program, steps)

    simulate(scenario)
    assert errors == ["RdmaError('it breaks')"] * 4


# -- memory that goes ------------------------------------------------------------------------


@pytest.mark.parametrize("is_granted", [False, True])
def test_no_byte_arrives_in_memory_that_is_taken_back(is_granted: bool) -> None:
    """A WRITE is in flight while its memory is deregistered, or its grant ends."""
    outcomes: set[str] = set()

    async def scenario(simulation: Simulation) -> None:
        memory = bytearray(600)

        async def lend(connection: aiordma.Connection) -> None:
            if is_granted:
                async with connection.grant(memory, Access.REMOTE_WRITE) as grant:
                    await connection.send(grant.remote.pack())
                    await asyncio.sleep(simulation.random.uniform(0.0, 0.01))
            else:
                region = connection.register(memory, Access.REMOTE_WRITE)
                await connection.send(region.remote().pack())
                await asyncio.sleep(simulation.random.uniform(0.0, 0.01))
                region.close()
            before = bytes(memory)
            outcomes.add(f"{before.count(1)} bytes")
            await asyncio.sleep(1)
            assert memory == before

        server, client = await two_hosts(simulation, lend)
        simulation.link(latency=0.001, jitter=0.005)

        async def write() -> None:
            async with aiordma.connect(server.address, PORT, device="software") as connection:
                remote = aiordma.RemoteMemory.unpack(await connection.receive())
                with suppress(aiordma.RemoteAccessError, aiordma.DisconnectedError):
                    await connection.write(b"\1" * 600, remote)
                    await connection.receive()

        with suppress(anyio.EndOfStream):
            await client.run(write)

    for seed in range(100):
        simulate(scenario, seed=seed)
    assert {"0 bytes", "600 bytes"} < outcomes  # and a part of it


# -- queues that are full --------------------------------------------------------------------


def test_a_completion_queue_that_overruns_ends_its_connections() -> None:
    async def scenario(simulation: Simulation) -> None:
        server, client = await two_hosts(simulation)

        async def program() -> None:
            async with aiordma.connect(server.address, PORT, device="software") as connection:
                with Faults() as faults:
                    queue = queues_of(hub_of(connection))[0].queue
                    faults.raise_event(AsyncEventType.CQ_ERR, queue)
                with pytest.raises(aiordma.DeviceEventError, match="CQ_ERR"):
                    await connection.receive()

        await client.run(program)

    simulate(scenario)


def test_connects_wait_while_a_backlog_is_full() -> None:
    """The listener accepts nothing for a time. Then all are connected, or were told."""

    async def scenario(simulation: Simulation) -> int:
        server = simulation.host()
        clients = [simulation.host() for _ in range(12)]
        simulation.link(latency=0.001, jitter=0.01)

        async def accept() -> None:
            async with aiordma.listen(
                server.address, PORT, device="software", backlog=2
            ) as listener:
                await asyncio.sleep(2)
                await listener.serve(echo)

        async def program() -> bool:
            try:
                await ask(server)
            except (aiordma.RejectedError, aiordma.ConnectTimeoutError):
                return False
            return True

        server.run(accept)
        await asyncio.sleep(0.1)
        answers = await asyncio.gather(*(each.run(program) for each in clients))
        return answers.count(True)

    assert 2 <= simulate(scenario) <= 12


# -- retries ---------------------------------------------------------------------------------


def test_a_message_without_a_receive_waits_for_one() -> None:
    async def scenario(simulation: Simulation) -> float:
        server, client = simulation.host(), simulation.host()

        async def receive_late(connection: aiordma.Connection) -> None:
            await asyncio.sleep(3)
            memory = connection.register(bytearray(10), Access.LOCAL_WRITE)
            assert (await connection.post_recv(memory[:])).byte_len == 5

        async def accept() -> None:
            options = aiordma.ConnectionOptions(receive_buffers=0, max_recv_wr=4)
            async with aiordma.listen(
                server.address, PORT, device="software", options=options
            ) as listener:
                await listener.serve(receive_late)

        async def send() -> float:
            async with aiordma.connect(server.address, PORT, device="software") as connection:
                began = asyncio.get_running_loop().time()
                await connection.send(b"12345")
                return asyncio.get_running_loop().time() - began

        server.run(accept)
        await asyncio.sleep(0.1)
        return await client.run(send)

    assert simulate(scenario) >= 3


@pytest.mark.parametrize("seconds", [0.5, 600])
def test_requests_survive_a_short_silence_only(seconds: float) -> None:
    """The retries of TCP are the device's: they last for as long as the peer_timeout."""

    async def scenario(simulation: Simulation) -> float:
        server, client = await two_hosts(simulation)

        async def program() -> float:
            async with aiordma.connect(
                server.address, PORT, device="software", peer_timeout=5
            ) as connection:
                simulation.link(client, server, cut=True)
                began = asyncio.get_running_loop().time()
                with suppress(aiordma.PeerGoneError):
                    await connection.send(b"is anybody there?")
                    assert await connection.receive() == b"is anybody there?"
                return asyncio.get_running_loop().time() - began

        took = client.run(program)
        await asyncio.wait([took], timeout=seconds)
        simulation.heal()
        return await took

    assert simulate(scenario) == pytest.approx(0.5 if seconds < 5 else 5, abs=1)


# -- devices and CM messages -----------------------------------------------------------------


def test_a_removed_device_ends_the_connections_of_both_sides() -> None:
    async def scenario(simulation: Simulation) -> None:
        server, client = await two_hosts(simulation)

        async def program() -> None:
            async with aiordma.connect(server.address, PORT, device="software") as connection:
                with pytest.raises((anyio.EndOfStream, aiordma.DisconnectedError)):
                    await connection.receive()

        async def remove() -> None:
            with Faults() as faults:
                faults.raise_event(AsyncEventType.DEVICE_FATAL)

        using = client.run(program)
        await asyncio.sleep(1)
        await server.run(remove)
        await asyncio.wait_for(using, 5)

    simulate(scenario)


@pytest.mark.parametrize("to_server", [False, True])
def test_late_messages_of_the_handshake_only_delay_it(to_server: bool) -> None:
    async def scenario(simulation: Simulation) -> float:
        server, client = await two_hosts(simulation)
        way = (client, server) if to_server else (server, client)
        asking = client.run(ask, server)
        await asyncio.sleep(simulation.random.uniform(0, 0.005))
        simulation.link(*way, cut=True)
        await asyncio.sleep(0.5)
        simulation.heal()
        await asking
        return simulation.now

    times = [simulate(scenario, seed=seed) for seed in range(20)]
    assert 0.6 < max(times) < 10


@pytest.mark.parametrize("heals", [False, True])
def test_a_late_or_lost_disconnect(heals: bool) -> None:
    """A late one ends the connection in an orderly way. Without it, a keepalive does."""

    async def scenario(simulation: Simulation) -> tuple[str, float]:
        async def leave(connection: aiordma.Connection) -> None:
            simulation.partition(server, client)
            await connection.aclose()

        server, client = await two_hosts(simulation, leave)

        async def program() -> str:
            async with aiordma.connect(
                server.address, PORT, device="software", keepalive=3, peer_timeout=3
            ) as connection:
                try:
                    await connection.receive()
                except (anyio.EndOfStream, aiordma.PeerGoneError) as error:
                    return type(error).__name__
                return ""

        ending = client.run(program)
        await asyncio.sleep(1)
        if heals:
            simulation.heal()
        return await ending, simulation.now

    error, now = simulate(scenario)
    if heals:
        assert error == "EndOfStream"
        assert 1 < now < 5
    else:
        assert error != "EndOfStream"
        assert 3 < now < 12
