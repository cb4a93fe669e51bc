"""RoCE of the built-in device and of the kernel's rxe, each as the server of the other: C programs,
on two hosts (tests.interop.beside_rxe)."""

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from functools import partial

import anyio
import pytest

from tests.interop.beside_rxe import OUR_ADDRESS, RXE, RXE_ADDRESS, Wire, wire
from tests.interop.programs import REFUSED, UNACKNOWLEDGED, Program, again_if
from tests.interop.programs import running as running_as
from tests.ports import free_port

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Wire]:
    with wire() as made:
        yield made


@pytest.fixture(scope="module")
def damaged(two_hosts: Wire) -> Iterator[Wire]:
    """From its first use on: it takes the emulated machine seconds."""
    with two_hosts.damaged():
        yield two_hosts


def running(*words: str | int) -> AbstractAsyncContextManager[Program]:
    """As this user: the wire's words say whose a program is."""
    return running_as(*words, as_nobody=False)


async def play(
    wire: Wire, *words: str | int, index: str, we_serve: bool, damaged_for: float = 0.0
) -> tuple[str, str]:
    """Run a program as both ends; index: its option for the local address's index in the table,
    which is 1 on both: rxe has a link-local one before it, our device 127.0.0.1. damaged_for: the
    wire is damaged for so many seconds of the program's, at least."""
    port = free_port()
    program, *options = words
    rest = (*options, index, 1, "-p", port)
    ours, rxe = (wire.ours, "software_roce"), (wire.rxe, RXE)
    (serve, here), (connect, there) = (ours, rxe) if we_serve else (rxe, ours)
    async with AsyncExitStack() as ends:
        first = await ends.enter_async_context(running(*serve(program, "-d", here, *rest)))
        await wire.has_socket(serve, "t", port)
        address = OUR_ADDRESS if we_serve else RXE_ADDRESS
        client = running(*connect(program, "-d", there, *rest, address))
        with wire.damaged() if damaged_for else nullcontext():
            second = await ends.enter_async_context(client)
            await anyio.sleep(damaged_for)
    return first.output, second.output


both_ways = pytest.mark.parametrize("we_serve", [True, False], ids=["we serve", "rxe serves"])


@both_ways
@pytest.mark.parametrize("service", ["rc", "uc", "srq", "ud"])
async def test_pingpong(two_hosts: Wire, service: str, we_serve: bool) -> None:
    size = 1000 if service == "ud" else 10_000
    checks = () if service == "srq" else ("-c",)
    words = (f"ibv_{service}_pingpong", "-e", "-n", 50, "-s", size, *checks)
    run = partial(play, two_hosts, *words, index="-g", we_serve=we_serve)
    for output in await (again_if(UNACKNOWLEDGED, run) if we_serve else run()):
        assert "50 iters in" in output
        assert "invalid data" not in output


@both_ways
@pytest.mark.parametrize("program", ["ib_send_bw", "ib_write_bw", "ib_read_bw", "ib_atomic_bw"])
async def test_perftest(two_hosts: Wire, program: str, we_serve: bool) -> None:
    for output in await play(two_hosts, program, "-F", "-n", 50, index="-x", we_serve=we_serve):
        assert "Failed" not in output


# Connections by the connection manager: the server's words end with its own address, the client's
# with the server's.
UDADDYS_PORT = 7174
GROUP = "239.7.1.36"
MANAGED = {
    "rping": ("rping -v -C 20 -S 200 -s -a", "rping -v -C 20 -S 200 -c -a", "ping data"),
    "ucmatose": ("ucmatose -C 10 -S 2000 -b", "ucmatose -C 10 -S 2000 -s", "return status 0"),
    "udaddy": ("udaddy -C 10 -b", "udaddy -C 10 -s", "return status 0"),
    "many": ("ucmatose -c 8 -C 2 -b", "ucmatose -c 8 -C 2 -s", "return status 0"),
}


async def play_managed(wire: Wire, server: str, client: str, we_serve: bool) -> tuple[str, str]:
    address = OUR_ADDRESS if we_serve else RXE_ADDRESS
    first, second = (wire.ours, wire.rxe) if we_serve else (wire.rxe, wire.ours)
    port = UDADDYS_PORT if server.startswith("udaddy") else free_port()
    options = () if port == UDADDYS_PORT else ("-p", port)
    async with running(*first(*server.split(), address, *options)) as one:
        await (wire.has_socket(first, "u", port) if we_serve else wire.rxe_listens(port))
        async with running(*second(*client.split(), address, *options)) as two:
            pass
    return one.output, two.output


@both_ways
@pytest.mark.parametrize("name", MANAGED)
async def test_connection_manager(two_hosts: Wire, name: str, we_serve: bool) -> None:
    server, client, written = MANAGED[name]
    for output in await play_managed(two_hosts, server, client, we_serve):
        assert written in output


@both_ways
@pytest.mark.parametrize("program", ["ib_send_lat", "ib_write_bw", "ib_read_bw", "ib_atomic_bw"])
async def test_perftest_by_the_manager(two_hosts: Wire, program: str, we_serve: bool) -> None:
    ours, rxe = two_hosts.ours, two_hosts.rxe
    server, client = (ours, rxe) if we_serve else (rxe, ours)
    address = OUR_ADDRESS if we_serve else RXE_ADDRESS

    async def once() -> tuple[str, str]:
        words = (program, "-R", "-F", "-n", 50, "-p", free_port())
        async with running(*server(*words)) as first:
            await first.has_written("Waiting for client")
            async with running(*client(*words, address)) as second:
                pass
            assert "REJECTED" not in second.output, second.output
        return first.output, second.output

    for output in await again_if(REFUSED, once):
        assert "Failed" not in output


@both_ways
async def test_groups(two_hosts: Wire, we_serve: bool) -> None:
    words = ("mckey", "-m", GROUP, "-C", 10, "-b")
    ours, rxe = (two_hosts.ours, OUR_ADDRESS), (two_hosts.rxe, RXE_ADDRESS)
    (receive, here), (send, there) = (ours, rxe) if we_serve else (rxe, ours)
    async with running(*receive(*words, here)) as first:
        await first.has_written("joined dgid")
        async with running(*send(*words, there, "-s")) as second:
            pass
    for program in (first, second):
        assert "return status 0" in program.output


@both_ways
async def test_connection_manager_on_a_damaged_wire(two_hosts: Wire, we_serve: bool) -> None:
    # The wire is mended before the end: a lost goodbye is repeated by neither side, and rping waits
    # for it without a limit.
    serve, connect = (
        (two_hosts.ours, two_hosts.rxe) if we_serve else (two_hosts.rxe, two_hosts.ours)
    )
    port = free_port()
    words = ("-v", "-C", 200, "-a", OUR_ADDRESS if we_serve else RXE_ADDRESS, "-p", port)
    async with AsyncExitStack() as ends:
        server = await ends.enter_async_context(running(*serve("rping", "-s", *words)))
        await (two_hosts.has_socket(serve, "u", port) if we_serve else two_hosts.rxe_listens(port))
        with two_hosts.damaged():
            client = await ends.enter_async_context(running(*connect("rping", "-c", *words)))
            await client.has_written("ping data", 3)
    assert client.output.count("ping data") == server.output.count("ping data") == 200


@both_ways
async def test_messages_on_a_damaged_wire(two_hosts: Wire, we_serve: bool) -> None:
    # The wire is mended before the end: a side that has all messages ends at once, and if its last
    # acknowledgement is lost, nobody is left that could repeat it.
    words = ("ibv_rc_pingpong", "-e", "-n", 500, "-s", 8000, "-m", 1024, "-c")
    for output in await play(two_hosts, *words, index="-g", we_serve=we_serve, damaged_for=5.0):
        assert "500 iters in" in output
        assert "invalid data" not in output


@both_ways
@pytest.mark.parametrize("program", ["ib_write_bw", "ib_read_bw", "ib_atomic_bw"])
async def test_one_sided_operations_on_a_damaged_wire(
    damaged: Wire, program: str, we_serve: bool
) -> None:
    size = () if program == "ib_atomic_bw" else ("-s", 8000)
    words = (program, "-F", "-n", 10, "-u", 16, *size)
    for output in await play(damaged, *words, index="-x", we_serve=we_serve):
        assert "Failed" not in output
