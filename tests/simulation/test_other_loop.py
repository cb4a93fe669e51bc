"""Simulated hosts on the event loop of another simulation, which has no descriptors and threads."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

import aiordma
from aiordma.streams import open_connection, start_server
from aiordma.testing import Host, Simulation, SimulationError, simulate, simulated_network
from tests.simulation.other_loop import OtherLoop
from tests.simulation.planted import PLANTED
from tests.simulation.test_planted_faults import FOUND

pytestmark = pytest.mark.natively

Result = TypeVar("Result")

PORT = 7471
SEEDS = 50


def run(scenario: Callable[[Simulation], Coroutine[Any, Any, Result]], seed: int = 0) -> Result:
    async def main() -> Result:
        async with simulated_network(seed=seed) as simulation:
            return await scenario(simulation)

    loop = OtherLoop(seed)
    result = loop.run(main())
    assert not loop.errors
    return result


async def serve(host: Host) -> None:
    async def echo(connection: aiordma.Connection) -> None:
        async for message in connection:
            await connection.send(message)

    async with aiordma.listen(host.address, PORT) as listener:
        await listener.serve(echo)


async def ask(name: str) -> bytes:
    async with aiordma.connect(name, PORT) as connection:
        await connection.send(b"hello")
        return bytes(await connection.receive())


async def two_hosts(simulation: Simulation) -> tuple[Host, Host]:
    server, client = simulation.host("server"), simulation.host("client")
    server.run(serve, server)
    await asyncio.sleep(1)
    return server, client


def test_messages_take_the_loops_time() -> None:
    async def scenario(simulation: Simulation) -> tuple[bytes, float]:
        _, client = await two_hosts(simulation)
        simulation.link(latency=0.25)
        assert client.address == "10.0.0.2"
        answer = await client.run(ask, "server")
        assert simulation.now == asyncio.get_running_loop().time()
        return answer, simulation.now

    answer, ended = run(scenario)
    assert answer == b"hello"
    assert 2.5 <= ended < 2.6  # six ways; the seed delays completions


def test_streams_and_the_tasks_that_a_program_makes() -> None:
    async def scenario(simulation: Simulation) -> list[bytes]:
        server, client = simulation.host("server"), simulation.host("client")

        async def double(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(2 * await reader.readline())
            writer.close()

        async def listen() -> None:
            async with await start_server(double, "0.0.0.0", PORT) as listener:
                await listener.serve_forever()

        async def line(text: bytes) -> bytes:
            reader, writer = await open_connection("server", PORT)
            writer.write(text + b"\n")
            answer = await reader.read()
            writer.close()
            return answer

        async def lines() -> list[bytes]:
            return await asyncio.gather(*(asyncio.create_task(line(each)) for each in (b"1", b"2")))

        server.run(listen)
        await asyncio.sleep(1)
        return await client.run(lines)

    assert run(scenario) == [b"1\n1\n", b"2\n2\n"]


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_there_too(name: str) -> None:
    for seed in range(SEEDS):
        try:
            run(PLANTED[name](False), seed)
        except FOUND:
            return
    raise AssertionError(f"{SEEDS} seeds have not found it")


@pytest.mark.parametrize("name", PLANTED)
def test_a_mended_program_survives_there_too(name: str) -> None:
    for seed in range(SEEDS):
        run(PLANTED[name](True), seed)


def test_the_same_seeds_give_the_same_run() -> None:
    async def scenario(simulation: Simulation) -> list[str]:
        await PLANTED["done_twice"](True)(simulation)
        return simulation.trace

    first = run(scenario, 5)
    assert run(scenario, 5) == first
    assert run(scenario, 6) != first


def test_a_host_that_crashes_is_silent_and_comes_up_empty() -> None:
    async def scenario(simulation: Simulation) -> None:
        server, client = await two_hosts(simulation)

        async def wait_for_end() -> float:
            async with aiordma.connect("server", PORT, peer_timeout=5) as connection:
                began = simulation.now
                server.crash()
                await connection.ended()
            return simulation.now - began

        assert 5 <= await client.run(wait_for_end) < 20
        server.boot()
        server.run(serve, server)
        await asyncio.sleep(1)
        assert await client.run(ask, "server") == b"hello"

    run(scenario)


def test_the_program_of_a_crashed_host_has_no_device_any_more() -> None:
    async def scenario(simulation: Simulation) -> None:
        _, client = await two_hosts(simulation)

        async def crash() -> None:
            async with aiordma.connect("server", PORT) as connection:
                client.crash()
                await asyncio.sleep(1)
                with pytest.raises(aiordma.ForkError):
                    await connection.send(b"from the dead")

        await client.run(crash)

    run(scenario)


def test_a_task_that_enters_a_host_is_the_hosts() -> None:
    async def scenario(simulation: Simulation) -> None:
        _, client = await two_hosts(simulation)

        async def program() -> bytes:
            client.enter()
            return await asyncio.create_task(ask("server"))

        assert await asyncio.create_task(program()) == b"hello"

        async def enter() -> None:
            client.enter()

        client.crash()
        with pytest.raises(SimulationError, match="is down"):
            await asyncio.create_task(enter())

    run(scenario)

    async def elsewhere(simulation: Simulation) -> None:
        with pytest.raises(SimulationError, match="run"):
            simulation.host().enter()

    simulate(elsewhere)


def test_what_is_the_loops_own_is_refused() -> None:
    async def scenario(simulation: Simulation) -> None:
        host = simulation.host()
        with pytest.raises(SimulationError):
            host.freeze()
        with pytest.raises(SimulationError):
            host.set_clock_rate(2)

    run(scenario)


def test_an_error_that_nobody_awaits_fails_the_block_and_has_the_trace() -> None:
    async def scenario(simulation: Simulation) -> None:
        async def fail() -> None:
            raise LookupError("in a program")

        simulation.host("one").run(fail)
        await asyncio.sleep(1)

    with pytest.raises(LookupError, match="in a program") as caught:
        run(scenario, 7)
    (note,) = caught.value.__notes__
    assert "seed 7" in note
    assert "one: runs fail" in note


def test_the_loop_and_the_device_are_given_back() -> None:
    async def scenario(simulation: Simulation) -> None:
        _, client = await two_hosts(simulation)
        await client.run(ask, "server")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        methods = loop.call_soon, loop.call_later, loop.call_at, loop.create_task
        for seed in range(3):
            async with simulated_network(seed=seed) as simulation:
                await scenario(simulation)
        assert methods == (loop.call_soon, loop.call_later, loop.call_at, loop.create_task)
        await asyncio.sleep(1)

    OtherLoop(0).run(main())
    run(scenario)


@pytest.mark.promise("Each await can be cancelled at each suspension")
@pytest.mark.parametrize("after", [0, 0.5, 1, 1.5, 2, 2.5, 3, 5, 8])
def test_a_cancelled_block_leaves_nothing(after: float) -> None:
    """Before the block has begun, in it, and while its end waits for the hosts' tasks."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        own = loop.call_soon

        async def block() -> None:
            async with simulated_network() as simulation:
                _, client = await two_hosts(simulation)
                simulation.link(latency=0.25)
                await client.run(ask, "server")

        task = asyncio.create_task(block())
        await asyncio.sleep(after)
        was_over = task.done()
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            assert not was_over
        assert loop.call_soon == own
        assert asyncio.all_tasks() == {asyncio.current_task()}

    loop = OtherLoop(0)
    loop.run(main())
    assert not loop.errors
