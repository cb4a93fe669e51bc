"""rping of rdma-core and aiordma's, each as the server of the other."""

import contextlib
import signal

import anyio
import pytest

import aiordma
from aiordma.cli import rping
from tests.devices import ADDRESS
from tests.interop.programs import Program, every_loop, running_rping
from tests.ports import free_port

pytestmark = pytest.mark.anyio

LEAST = 23  # what the C program's -S takes, as its client and as its server
FAILED = 255  # its status for -1


async def listen() -> aiordma.Listener:
    return await aiordma.listen(ADDRESS, 0, options=rping.OPTIONS)


async def connect(port: int) -> aiordma.Connection:
    return await aiordma.connect(ADDRESS, port, options=rping.OPTIONS)


def target(port: int) -> tuple[str | int, ...]:
    """The arguments of a client, ours and theirs."""
    return ("-c", "-a", ADDRESS, "-p", port)


def rounds_shown(client: Program) -> int:
    # The status alone would not tell: rping also ends with 0 when it is disconnected too early.
    return client.output.count("ping data: rdma-ping-")


async def serve_one_client(size: int, rounds: int, *more: str) -> None:
    options: tuple[str | int, ...] = ("-S", size, "-C", rounds, "-V", "-v", *more)
    async with (
        await listen() as listener,
        running_rping(*target(listener.port), *options) as client,
        await listener.accept() as connection,
    ):
        assert await rping.answer(connection, verify=True) == rounds
    assert rounds_shown(client) == rounds


async def be_one_client(size: int, rounds: int, *more: str) -> None:
    port = free_port()
    # A server's -S is the size of its buffer.
    command = ("-s", "-a", ADDRESS, "-p", port, "-S", max(size, LEAST))
    async with running_rping(*command, "-V", "-v", *more) as server:
        await server.listens(port)
        async with await connect(port) as connection:
            await rping.ping(connection, count=rounds, size=size, verify=True)
    assert server.output.count("server ping data: ") == rounds


@every_loop
@pytest.mark.loop_and_device
async def test_a_c_client_pings_our_server() -> None:
    await serve_one_client(64, 100)


@every_loop
@pytest.mark.loop_and_device
async def test_our_client_pings_a_c_server() -> None:
    await be_one_client(64, 100)


@pytest.mark.natively
@pytest.mark.parametrize("size", [LEAST, 1000, 4096, rping.MOST])
async def test_a_c_client_pings_our_server_with_every_size(size: int) -> None:
    await serve_one_client(size, 5)


@pytest.mark.natively
@pytest.mark.parametrize("size", [1, 2, 16, LEAST, 1000, 4096, rping.MOST])
async def test_our_client_pings_a_c_server_with_every_size(size: int) -> None:
    await be_one_client(size, 5)


@pytest.mark.natively
@pytest.mark.parametrize("size", [LEAST - 1, rping.MOST + 1])
async def test_the_c_program_takes_no_other_sizes(size: int) -> None:
    async with running_rping(*target(rping.PORT), "-S", size, status=22) as client:
        pass
    assert f"Invalid size {size}" in client.output


@pytest.mark.natively
async def test_several_c_clients_at_once_on_our_server() -> None:
    rounds: list[int] = []
    all_served = anyio.Event()

    async def serve(connection: aiordma.Connection) -> None:
        rounds.append(await rping.answer(connection, verify=True))
        if len(rounds) == 6:
            all_served.set()

    async def run_client(port: int, count: int) -> None:
        async with running_rping(*target(port), "-C", count, "-V", "-v") as client:
            pass
        assert rounds_shown(client) == count

    async with await listen() as listener, anyio.create_task_group() as servers:
        servers.start_soon(listener.serve, serve)
        async with anyio.create_task_group() as clients:
            for count in range(10, 15):
                clients.start_soon(run_client, listener.port, count)
        await run_client(listener.port, 3)  # and one more after them
        with anyio.fail_after(10):
            await all_served.wait()
        servers.cancel_scope.cancel()
    assert sorted(rounds) == [3, 10, 11, 12, 13, 14]


@pytest.mark.natively
async def test_several_of_our_clients_at_once_on_a_persistent_c_server() -> None:
    port = free_port()
    command = ("-s", "-P", "-a", ADDRESS, "-p", port, "-v")
    async with running_rping(*command, status=-signal.SIGTERM) as server:
        await server.listens(port)
        connections: list[aiordma.Connection] = []
        try:
            # One after the other: two requests at once make rping of rdma-core 44 lose one. The
            # pings then run side by side.
            for _ in range(4):
                connections.append(await connect(port))
            async with anyio.create_task_group() as group:
                for number, connection in enumerate(connections):
                    group.start_soon(ping_rounds, connection, 10 + number)
        finally:
            for connection in connections:
                await connection.aclose()
        async with await connect(port) as connection:  # and one more after them
            await ping_rounds(connection, 3)
        server.stop(signal.SIGTERM)
    assert server.output.count("server ping data: ") == 10 + 11 + 12 + 13 + 3


async def ping_rounds(connection: aiordma.Connection, count: int) -> None:
    await rping.ping(connection, count=count, verify=True)


async def damaged_answer(connection: aiordma.Connection) -> None:
    """The server's side of one round, with one bit of the data turned over."""
    source = rping.described(await connection.receive())
    text = bytearray(await connection.read_bytes(source))
    text[len(text) // 2] ^= 1
    await connection.send(rping.GO_AHEAD)
    sink = rping.described(await connection.receive())
    await connection.write(text, sink)
    sent = connection.post_send(rping.GO_AHEAD)
    assert [message async for message in connection] == []
    sent.exception()  # the client leaves as soon as it has the message: it can be flushed


@pytest.mark.natively
async def test_a_c_client_notices_one_wrong_bit() -> None:
    async with (
        await listen() as listener,
        running_rping(*target(listener.port), "-C", 2, "-V", status=FAILED) as client,
        await listener.accept() as connection,
    ):
        await damaged_answer(connection)
    assert "data mismatch!" in client.output


@pytest.mark.natively
async def test_a_c_client_that_is_killed_ends_its_rounds_on_our_server() -> None:
    async with (
        await listen() as listener,
        running_rping(*target(listener.port), "-v", status=-signal.SIGKILL) as client,
        await listener.accept() as connection,
        anyio.create_task_group() as group,
    ):
        group.start_soon(answer_until_gone, connection)
        await client.has_written("ping data: rdma-ping-5: ")
        client.stop(signal.SIGKILL)
    assert not connection.is_connected


async def answer_until_gone(connection: aiordma.Connection) -> None:
    # Between two rounds that is a regular end, in the middle of one it is not.
    with contextlib.suppress(anyio.BrokenResourceError, aiordma.DisconnectedError):
        assert await rping.answer(connection, verify=True) > 0


@pytest.mark.natively
async def test_a_c_server_that_is_killed_ends_our_client() -> None:
    port = free_port()
    command = ("-s", "-a", ADDRESS, "-p", port, "-v")
    async with running_rping(*command, status=-signal.SIGKILL) as server:
        await server.listens(port)
        async with await connect(port) as connection, anyio.create_task_group() as group:
            group.start_soon(ping_until_gone, connection)
            await server.has_written("server ping data: rdma-ping-5: ")
            server.stop(signal.SIGKILL)
    assert not connection.is_connected


async def ping_until_gone(connection: aiordma.Connection) -> None:
    with pytest.raises((anyio.BrokenResourceError, aiordma.DisconnectedError)):
        await rping.ping(connection, verify=True)


@pytest.mark.natively
async def test_a_c_server_with_too_small_a_buffer_ends_our_client() -> None:
    port = free_port()
    command = ("-s", "-a", ADDRESS, "-p", port, "-S", 64)
    # Its threads note the failure and our leaving in one variable; the last one is the status.
    async with running_rping(*command, status=None) as server:
        await server.listens(port)
        async with await connect(port) as connection:
            with pytest.raises((anyio.BrokenResourceError, aiordma.DisconnectedError)):
                await rping.ping(connection, count=1, size=65)
    assert "cq completion failed" in server.output


@pytest.mark.capability("rdma_establish")
async def test_a_c_client_that_makes_its_own_queue_pair() -> None:
    await serve_one_client(64, 5, "-q")


async def test_a_c_server_that_makes_its_own_queue_pair() -> None:
    await be_one_client(64, 5, "-q")
