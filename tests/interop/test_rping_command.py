"""`aiordma ping` as people run it: options, output, exit status."""

import signal
import sys

import anyio
import pytest

import aiordma
from aiordma.cli import rping
from tests.devices import ADDRESS
from tests.forked import python
from tests.interop.programs import running, running_rping
from tests.interop.test_rping import connect, damaged_answer, listen, rounds_shown, target
from tests.ports import free_port

pytestmark = [pytest.mark.anyio, pytest.mark.natively]

COMMAND = ("-c", "from aiordma.cli.main import main; main()", "ping")


def ours(*arguments: str | int) -> tuple[str | int, ...]:
    return (*python(), *COMMAND, *arguments)


async def test_our_server_and_a_c_client() -> None:
    port = free_port()
    async with running(*ours("-s", "-a", ADDRESS, "-p", port, "-V", "-v")) as server:
        await server.listens(port)
        command = (*target(port), "-C", 7, "-S", 500, "-V", "-v")
        async with running_rping(*command) as client:
            pass
    assert rounds_shown(client) == 7
    sent = [rping.payload(number, 500)[:-1].decode() for number in range(7)]
    assert [line for line in server.output.splitlines() if "data" in line] == [
        f"server ping data: {text}" for text in sent
    ]
    assert "left after 7 rounds" in server.output


async def test_our_client_and_a_c_server_at_the_default_port() -> None:
    async with running_rping("-s", "-S", 500, "-v") as server:
        await server.listens(rping.PORT)
        # Started as people start it; the others are forked.
        command = (sys.executable, *COMMAND, "-c", "-a", ADDRESS, "-C", 7, "-S", 500, "-V", "-v")
        async with running(*command) as client:
            pass
    sent = [rping.payload(number, 500)[:-1].decode() for number in range(7)]
    shown = client.output.splitlines()
    assert [line for line in shown if "data" in line] == [f"ping data: {text}" for text in sent]
    assert shown[0].startswith(f"connected to {ADDRESS}:{rping.PORT} through ")
    assert shown[-1].startswith("7 rounds of 500 bytes: min ")
    assert [line for line in server.output.splitlines() if "data" in line] == [
        f"server ping data: {text}" for text in sent
    ]


async def test_our_persistent_server_serves_on_whatever_a_client_does() -> None:
    async def run_client() -> None:
        async with running_rping(*target(port), "-C", 5, "-V", "-v") as client:
            pass
        assert rounds_shown(client) == 5

    port = free_port()
    async with running(*ours("-s", "-P", "-V", "-a", ADDRESS, "-p", port), status=130) as server:
        await server.listens(port)
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(run_client)
        async with await connect(port) as connection:
            await send_something_else(connection)
        await run_client()
        await server.has_written("left after 5 rounds", times=4)
        await server.has_written("round 0: the client's data is not the text of that round")
        server.stop(signal.SIGINT)


async def test_our_server_ends_with_1_on_a_mismatch() -> None:
    port = free_port()
    async with running(*ours("-s", "-a", ADDRESS, "-p", port, "-V"), status=1) as server:
        await server.listens(port)
        async with await connect(port) as connection:
            await send_something_else(connection)
    assert "aiordma ping: round 0: the client's data is not the text of that round" in server.output


async def send_something_else(connection: aiordma.Connection) -> None:
    """The client's side of half a round, with another text than rping's."""
    wrong = connection.register(b"not what rping sends", aiordma.Access.REMOTE_READ)
    await connection.send(rping.describe(wrong.remote()))
    assert [message async for message in connection] == [rping.GO_AHEAD]


async def test_our_client_ends_with_1_on_a_mismatch() -> None:
    async with (
        await listen() as listener,
        running(*ours(*target(listener.port), "-C", 2, "-V"), status=1) as client,
        await listener.accept() as connection,
    ):
        await damaged_answer(connection)
    assert client.output.splitlines()[-1] == "aiordma ping: round 0: data mismatch"
