"""Hosts that crash, or cannot be reached, while others wait for them; and who hears of errors."""

import asyncio
import threading
from contextlib import suppress
from typing import Any

import pytest

import aiordma
from aiordma.testing import Host, Simulation, SimulationError, simulate
from tests.simulation.test_simulation import PORT, ask, echo, two_hosts

pytestmark = pytest.mark.natively


@pytest.mark.parametrize("boots", [False, True])
def test_a_cancelled_run_of_a_crashed_host_wakes_nothing_there(boots: bool) -> None:
    went_on: list[str] = []

    async def scenario(simulation: Simulation) -> None:
        server, client = await two_hosts(simulation)

        async def program() -> None:
            try:
                await ask(server, 1000, 0.01)
            finally:
                went_on.append("a task of a crashed host")

        running = client.run(program)
        await asyncio.sleep(1)
        client.crash()
        if boots:
            client.boot()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(running, 5)
        await asyncio.sleep(5)

    simulate(scenario)
    assert not went_on


def test_a_host_crashes_another_and_goes_on() -> None:
    async def scenario(simulation: Simulation) -> float:
        server, client = await two_hosts(simulation)
        other = simulation.host()

        async def program() -> float:
            async with aiordma.connect(server.address, PORT, device="software") as connection:
                other.crash()
                await connection.send(b"1")
                assert await connection.receive() == b"1"
            return await ask(server)

        return await client.run(program)

    assert simulate(scenario) < 0.1


def test_a_host_crashes_itself_at_its_next_await() -> None:
    went_on: list[str] = []

    async def scenario(simulation: Simulation) -> bool:
        server, client = await two_hosts(simulation)

        async def program() -> None:
            async with aiordma.connect(server.address, PORT, device="software") as connection:
                client.crash()
                await connection.send(b"1")
                await asyncio.sleep(0)
                went_on.append("a task of a crashed host")

        client.run(program)
        await asyncio.sleep(1)
        was_up = client.is_up
        client.boot()
        assert await client.run(ask, server) < 0.1
        return was_up

    assert not simulate(scenario)
    assert not went_on


def test_a_host_crashes_while_connections_wait_at_its_listener() -> None:
    async def scenario(simulation: Simulation) -> float:
        server, client = await two_hosts(simulation)
        server.freeze()
        asking = [client.run(ask, server) for _ in range(5)]
        await asyncio.sleep(1)
        server.crash()
        for each in asking:
            each.cancel()
        await asyncio.sleep(1)
        return simulation.now

    assert simulate(scenario) > 2


@pytest.mark.timeout(60)
def test_a_reset_that_is_lost_takes_time_without_latency() -> None:
    async def scenario(simulation: Simulation) -> None:
        server, client = await two_hosts(simulation)
        simulation.link(latency=0.0)

        async def program() -> None:
            async with aiordma.connect(server.address, PORT, device="software") as connection:
                await asyncio.sleep(2)
                await connection.send(b"nobody has this connection there")
                with pytest.raises(aiordma.RdmaError):
                    await connection.receive()

        running = client.run(program)
        await asyncio.sleep(1)
        server.crash()
        server.boot()
        simulation.link(server, client, cut=True)
        with suppress(aiordma.RdmaError):
            await running

    simulate(scenario)


# -- errors ----------------------------------------------------------------------------------


async def fails() -> None:
    raise ValueError("it fails")


def test_gather_and_wait_take_note_of_an_error() -> None:
    async def scenario(simulation: Simulation) -> list[object]:
        host: Host = simulation.host()
        one = await asyncio.gather(host.run(fails), return_exceptions=True)
        waited = host.run(fails)
        await asyncio.wait([waited])
        return [*one, waited.exception()]

    assert [repr(each) for each in simulate(scenario)] == ["ValueError('it fails')"] * 2


def test_wait_alone_does_not() -> None:
    async def scenario(simulation: Simulation) -> None:
        await asyncio.wait([simulation.host().run(fails)])

    with pytest.raises(ValueError, match="it fails"):
        simulate(scenario)


# -- clocks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "ends"), [(0.5, 19), (2, 5.5)])
def test_the_clock_rate_changes_while_a_program_sleeps(rate: float, ends: float) -> None:
    async def scenario(simulation: Simulation) -> float:
        host = simulation.host()
        sleeping = host.run(asyncio.sleep, 10)
        await asyncio.sleep(1)
        host.set_clock_rate(rate)
        await sleeping
        return simulation.now

    assert simulate(scenario) == pytest.approx(ends)


@pytest.mark.parametrize("rate", [0, -1, float("inf"), float("nan")])
def test_a_clock_rate_that_is_not_positive(rate: float) -> None:
    async def scenario(simulation: Simulation) -> None:
        simulation.host().set_clock_rate(rate)

    with pytest.raises(ValueError, match="rate"):
        simulate(scenario)


# -- programs that never wait ----------------------------------------------------------------


def test_time_passes_for_a_program_that_polls() -> None:
    async def scenario(simulation: Simulation) -> float:
        server, client = await two_hosts(simulation)

        async def program() -> None:
            asking = asyncio.create_task(ask(server, 10, 0.5))
            while not asking.done():
                await asyncio.sleep(0)

        await client.run(program)
        return simulation.now

    assert simulate(scenario) > 5


def test_a_program_that_polls_for_ever_ends_the_run() -> None:
    async def scenario(simulation: Simulation) -> None:
        async def program() -> None:
            while True:
                await asyncio.sleep(0)

        await simulation.host().run(program)

    with pytest.raises(SimulationError, match="loops without waiting"):
        simulate(scenario)


# -- the order at the end --------------------------------------------------------------------


def test_tasks_are_cancelled_in_the_order_of_their_beginning() -> None:
    ended: list[int] = []

    async def scenario(simulation: Simulation) -> None:
        async def program(number: int) -> None:
            try:
                await asyncio.sleep(100)
            finally:
                ended.append(number)

        host = simulation.host()
        for number in range(20):
            host.run(program, number)
        await asyncio.sleep(1)

    simulate(scenario)
    assert ended == list(range(20))


# -- the program's own device ----------------------------------------------------------------


def test_a_connection_of_the_program_outlives_a_simulation() -> None:
    asyncio.run(asyncio.wait_for(_exchange_before_and_after(), 60))


async def _exchange_before_and_after() -> None:
    async def scenario(simulation: Simulation) -> None:
        server, client = await two_hosts(simulation)
        await client.run(ask, server, 3)
        client.crash()

    async with (
        aiordma.listen("127.0.0.1", 0, device="software") as listener,
        asyncio.TaskGroup() as group,
    ):
        serving = group.create_task(listener.serve(echo))
        async with aiordma.connect("127.0.0.1", listener.port, device="software") as connection:
            for _ in range(2):
                await connection.send(b"1")
                assert await asyncio.wait_for(connection.receive(), 10) == b"1"
                await _in_a_thread_that_blocks_this_one(scenario)
        serving.cancel()


async def _in_a_thread_that_blocks_this_one(scenario: Any) -> None:
    thread = threading.Thread(target=simulate, args=(scenario,))
    thread.start()
    thread.join()
