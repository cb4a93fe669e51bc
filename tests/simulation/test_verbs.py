"""What only verbs have, at bad times: memory and devices that go, queues that are full, late CM
messages. And what the state machine has found."""

import asyncio

import pytest

import aiordma
from aiordma import Access
from aiordma.testing import Simulation, simulate
from tests.internals import fail
from tests.simulation.test_simulation import PORT, two_hosts

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
