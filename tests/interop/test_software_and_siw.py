"""The built-in software device and the kernel's siw, each as the server of the other: two makes of
iWARP on one address, over TCP of the same host.

C programs run on siw, which is the only device that they know; our side is on the software device.
"""

import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Unpack

import anyio
import pytest

import aiordma
from aiordma import Access
from aiordma.cli import rping
from aiordma.cli.exec import FOLDER
from aiordma.testing import software_objects
from aiordma.types import ConnectionKeywords
from tests.devices import ADDRESS, DEVICE, DeviceUnderTest
from tests.interop.peers import (
    MESSAGE,
    be_ucmatose_client,
    converse_with_rdma_client,
    converse_with_rdma_server,
)
from tests.interop.programs import REFUSED, RPING_ENDS, again_if, running, running_rping
from tests.ports import free_port

pytestmark = [pytest.mark.anyio, pytest.mark.capability("iwarp")]

SOFTWARE = "software"
MOST = 65536
MEBIBYTE = 1 << 20
PEER = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE


@pytest.fixture(autouse=True)
def nothing_of_the_software_device_is_left() -> Iterator[None]:
    before = software_objects()
    yield
    gc.collect()
    # A context and its channel stay open once used.
    kept = {name: count for name, count in software_objects().items() if count > before[name]}
    assert set(kept) <= {"contexts"}


# -- C programs on siw ------------------------------------------------------------------------


async def serve_rping(size: int, rounds: int) -> None:
    options = ("-C", rounds, "-S", size, "-V", "-v")
    async with (
        await aiordma.listen(ADDRESS, 0, device=SOFTWARE, options=rping.OPTIONS) as listener,
        running_rping("-c", "-a", ADDRESS, "-p", listener.port, *options) as client,
        await listener.accept() as connection,
    ):
        assert connection.device_name == SOFTWARE
        assert await rping.answer(connection, verify=True) == rounds
    assert client.output.count("ping data: rdma-ping-") == rounds


async def ping_rping(size: int, rounds: int) -> None:
    port = free_port()
    command = ("-s", "-a", ADDRESS, "-p", port, "-S", max(size, 64), "-V", "-v")
    async with running_rping(*command) as server:
        await server.listens(port)
        async with await aiordma.connect(
            ADDRESS, port, device=SOFTWARE, options=rping.OPTIONS
        ) as connection:
            await rping.ping(connection, count=rounds, size=size, verify=True)
    assert server.output.count("server ping data: ") == rounds


async def test_rping_on_siw_pings_our_server() -> None:
    await serve_rping(64, 100)


async def test_our_client_pings_rping_on_siw() -> None:
    await ping_rping(64, 100)


@pytest.mark.parametrize("size", [23, 1000, 4096, rping.MOST])
async def test_rping_on_siw_pings_our_server_with_every_size(size: int) -> None:
    await serve_rping(size, 5)


@pytest.mark.parametrize("size", [1, 23, 1000, 4096, rping.MOST])
async def test_our_client_pings_rping_on_siw_with_every_size(size: int) -> None:
    await ping_rping(size, 5)


async def test_rdma_client_on_siw_and_our_server() -> None:
    async with (
        await aiordma.listen(ADDRESS, 0, device=SOFTWARE) as listener,
        running("rdma_client", "-s", ADDRESS, "-p", listener.port) as client,
        await listener.accept() as connection,
    ):
        assert await converse_with_rdma_client(connection, b"sixteen bytes ok") == MESSAGE
    assert client.output == "rdma_client: start\nrdma_client: end 0\n"


async def test_our_client_and_rdma_server_on_siw() -> None:
    async with running("rdma_server", "-s", ADDRESS) as server:
        await server.listens(7471)
        async with await aiordma.connect(ADDRESS, 7471, device=SOFTWARE) as connection:
            assert await converse_with_rdma_server(connection, b"sixteen bytes ok") == MESSAGE
    assert server.output == "rdma_server: start\nrdma_server: end 0\n"


async def test_ten_connections_of_ucmatose_on_siw_to_our_server() -> None:
    # Without messages: its server would speak first, which iWARP's accepting side must not.
    ended = 0

    async def serve_one(connection: aiordma.Connection) -> None:
        nonlocal ended
        await connection.aclose()
        ended += 1

    async with (
        await aiordma.listen(ADDRESS, 0, device=SOFTWARE) as listener,
        anyio.create_task_group() as servers,
    ):
        servers.start_soon(listener.serve, serve_one)
        target = ("-s", ADDRESS, "-p", listener.port, "-c", 10, "-C", 0)
        async with running("ucmatose", *target) as client:
            pass
        servers.cancel_scope.cancel()
    assert client.output.endswith("test complete\nreturn status 0\n")
    assert ended == 10


async def say_again(connection: aiordma.Connection) -> None:
    """Write nothing, now and then: siw may have missed our announcement while it was accepting
    us, and then reads it with what comes next (`heard_at_once` in tests/devices.py). About one in
    five hundred connections; this let all of them go on."""
    with suppress(aiordma.DisconnectedError):  # it has done what it was there for
        while True:
            await anyio.sleep(2)
            await connection.write(b"", aiordma.RemoteMemory(0, 0, 0))


@pytest.mark.parametrize("count", [0, 10])
async def test_our_ten_connections_to_ucmatose_on_siw(count: int) -> None:
    # Its server speaks first: our client has announced itself by then (RFC 6581).
    received: list[list[bytes]] = []
    port = free_port()

    async def run_client() -> None:
        async with (
            await aiordma.connect(ADDRESS, port, device=SOFTWARE) as connection,
            anyio.create_task_group() as beside,
        ):
            beside.start_soon(say_again, connection)
            received.append(await be_ucmatose_client(connection, count))
            beside.cancel_scope.cancel()

    async with running("ucmatose", "-p", port, "-c", 10, "-C", count, "-S", 100) as server:
        await server.listens(port)
        async with anyio.create_task_group() as clients:
            for _ in range(10):
                clients.start_soon(run_client)
    assert server.output.endswith("disconnected\ntest complete\nreturn status 0\n")
    assert [[len(message) for message in messages] for messages in received] == [[100] * count] * 10


EXEC = ("env", f"LD_LIBRARY_PATH={FOLDER}", f"AIORDMA_DEVICE={SOFTWARE}")
PERFTEST = "-R -F -n 50"


@pytest.mark.parametrize("we_serve", [True, False], ids=["we serve", "siw serves"])
@pytest.mark.parametrize(
    ("both", "server", "client", "written"),
    [
        ("rping -V -v -C 10 -S 5000", f"-s -a {ADDRESS}", "-c -a", "ping data: rdma-ping-9"),
        ("ucmatose -c 5 -C 0", "", "-s", "return status 0"),  # without messages, as above
        (f"ib_write_bw {PERFTEST}", "", "", " 65536 "),
        (f"ib_read_lat {PERFTEST} -s 10000", "", "", " 10000 "),
        (f"ib_send_lat {PERFTEST}", "", "", " 2 "),
    ],
    ids=["rping", "ucmatose", "ib_write_bw", "ib_read_lat", "ib_send_lat"],
)
async def test_c_program_under_exec_and_on_siw(
    both: str, server: str, client: str, written: str, we_serve: bool
) -> None:
    serve, connect = (EXEC, ()) if we_serve else ((), EXEC)

    async def output() -> str:
        port = free_port()
        words: list[str | int] = [*both.split(), "-p", port]
        listening = running(*serve, *words, *server.split(), last_words=RPING_ENDS)
        connecting = running(*connect, *words, *client.split(), ADDRESS, last_words=RPING_ENDS)
        async with listening as first:
            await first.listens(port, SOFTWARE if we_serve else DEVICE)
            async with connecting as second:
                pass
        return second.output

    assert written in await again_if(REFUSED, output)


# -- our own on both sides ----------------------------------------------------------------------


@pytest.fixture(params=["software to siw", "siw to software"])
def direction(request: pytest.FixtureRequest, device: DeviceUnderTest) -> tuple[str, str]:
    """The device of the side that connects, and that of the side that listens."""
    names = (SOFTWARE, device.name)
    return names if request.param == "software to siw" else names[::-1]


@asynccontextmanager
async def connected(
    direction: tuple[str, str], private_data: bytes = b"", **options: Unpack[ConnectionKeywords]
) -> AsyncIterator[tuple[aiordma.Connection, aiordma.Connection]]:
    """A connection between the two devices: the connecting side, the accepting side."""
    found: list[aiordma.Connection] = []

    async def speak_first() -> None:
        # siw's accepting side is connected only when it has received something.
        client = await aiordma.connect(
            ADDRESS, listener.port, device=direction[0], private_data=private_data, **options
        )
        found.append(client)
        await client.send(b"first")

    async with await aiordma.listen(ADDRESS, 0, device=direction[1], **options) as listener:
        async with anyio.create_task_group() as group:
            group.start_soon(speak_first)
            server = await listener.accept()
        async with found[0] as client, server:
            assert (client.device_name, server.device_name) == direction
            assert await server.receive() == b"first"
            yield client, server


async def test_messages_come_back(direction: tuple[str, str]) -> None:
    async with connected(direction) as (client, server):
        for number in range(200):
            message = bytes([number]) * (number * 37 % 16384)
            await client.send(message)
            assert await server.receive() == message
            await server.send(message[::-1])
            assert await client.receive() == message[::-1]


async def test_many_messages_at_once(direction: tuple[str, str]) -> None:
    messages = [number.to_bytes(4, "big") * 1000 for number in range(300)]

    async def send_all(connection: aiordma.Connection) -> None:
        for message in messages:
            await connection.send(message)

    # siw ends a connection whose message finds no receive.
    async with (
        connected(direction, receive_buffers=400) as (client, server),
        anyio.create_task_group() as group,
    ):
        group.start_soon(send_all, client)
        group.start_soon(send_all, server)
        for connection in (client, server):
            for message in messages:
                assert await connection.receive() == message


@pytest.mark.parametrize("size", [1, 4095, 65537, MEBIBYTE])
async def test_memory_is_read_and_written(direction: tuple[str, str], size: int) -> None:
    async with connected(direction) as (client, server):
        for one, other in ((client, server), (server, client)):
            there = bytearray(number * 11 % 251 for number in range(size))
            before = bytes(there)
            remote = other.register(there, PEER).remote()
            assert await one.read_bytes(remote) == before
            await one.write(before[::-1], remote)
            # siw's WRITE may complete before the bytes are there; a READ is behind it.
            assert await one.read_bytes(remote) == before[::-1]
            assert bytes(there) == before[::-1]


async def test_private_data_goes_along(direction: tuple[str, str]) -> None:
    async with (
        await aiordma.listen(ADDRESS, 0, device=direction[1]) as listener,
        anyio.create_task_group() as group,
    ):

        async def serve() -> None:
            request = await listener.request()
            assert bytes(request.private_data)[:7] == b"ticket!"
            async with await request.accept(private_data=b"welcome") as server:
                assert await server.receive() == b"x"

        group.start_soon(serve)
        async with await aiordma.connect(
            ADDRESS, listener.port, device=direction[0], private_data=b"ticket!"
        ) as client:
            assert client.private_data[:7] == b"welcome"
            await client.send(b"x")


async def test_a_request_is_rejected(direction: tuple[str, str]) -> None:
    async with (
        await aiordma.listen(ADDRESS, 0, device=direction[1]) as listener,
        anyio.create_task_group() as group,
    ):

        async def refuse() -> None:
            await (await listener.request()).reject(b"go away")

        group.start_soon(refuse)
        with pytest.raises(aiordma.RejectedError) as caught:
            await aiordma.connect(ADDRESS, listener.port, device=direction[0])
    assert caught.value.private_data[:7] == b"go away"


async def test_disconnect_reaches_the_peer(direction: tuple[str, str]) -> None:
    async with connected(direction) as (client, server):
        await server.aclose()
        assert [message async for message in client] == []
    async with connected(direction) as (client, server):
        await client.aclose()
        assert [message async for message in server] == []


@pytest.mark.parametrize("who", ["client", "server"])
async def test_reading_what_must_not_be_read_ends_both(
    direction: tuple[str, str], who: str
) -> None:
    async with connected(direction) as (client, server):
        one, other = (client, server) if who == "client" else (server, client)
        remote = other.register(bytearray(100), PEER).remote()
        wrong = aiordma.RemoteMemory(remote.address + 50, 100, remote.rkey)
        with pytest.raises(aiordma.RdmaError):
            await one.read_bytes(wrong)
        with pytest.raises((anyio.BrokenResourceError, anyio.EndOfStream, aiordma.RdmaError)):
            await other.receive()
        assert not one.is_connected
        assert not other.is_connected
