"""RoCE of the built-in device and of the kernel's rxe, each as the server of the other: C programs
in two network namespaces, which a veth pair joins, because each has the port 4791 of its own."""

import subprocess
from collections.abc import Iterator

import anyio
import pytest

from tests.devices import DEVICE
from tests.interop.programs import running
from tests.ports import free_port
from tests.unit.sources import ROOT

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(
        not DEVICE.startswith("rxe"), reason="the virtual machine has rxe and its root (test-rxe)"
    ),
]

SPACE, RXE = "aiordma-roce", "rxe_veth"
RXE_ADDRESS, OUR_ADDRESS = "10.9.7.1", "10.9.7.2"
IN_SPACE = ("ip", "netns", "exec", SPACE)
LIBRARIES = f"LD_LIBRARY_PATH={ROOT / 'aiordma/_native/exported'}"
OURS = (*IN_SPACE, "env", LIBRARIES, "AIORDMA_DEVICE=software_roce")
DAMAGE = ["loss", "3%", "delay", "2ms", "1ms", "reorder", "10%", "duplicate", "3%", "corrupt", "2%"]

SETUP = f"""
ip netns add {SPACE}
ip link add veth-rxe type veth peer name veth-own netns {SPACE}
ip addr add {RXE_ADDRESS}/24 dev veth-rxe
ip link set veth-rxe up
ip -n {SPACE} addr add {OUR_ADDRESS}/24 dev veth-own
ip -n {SPACE} link set veth-own up
ip -n {SPACE} link set lo up
rdma link add {RXE} type rxe netdev veth-rxe
"""


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def two_spaces() -> Iterator[None]:
    try:
        for line in SETUP.strip().splitlines():
            run(*line.split())
        yield
    finally:
        subprocess.run(["rdma", "link", "delete", RXE], capture_output=True)
        subprocess.run(["ip", "netns", "delete", SPACE], capture_output=True)


@pytest.fixture
def damaged_wire(two_spaces: None) -> Iterator[None]:
    run("modprobe", "sch_netem")
    ends = [("veth-rxe", ()), ("veth-own", IN_SPACE)]
    for name, where in ends:
        run(*where, "tc", "qdisc", "add", "dev", name, "root", "netem", *DAMAGE)
    yield
    for name, where in ends:
        run(*where, "tc", "qdisc", "delete", "dev", name, "root")


async def play(*words: str | int, index: str, we_serve: bool) -> tuple[str, str]:
    """Run a program as both ends; index: its option for the local address's index in the table,
    which is 1 on both: rxe has a link-local one before it, our device 127.0.0.1."""
    rest = (*words[1:], index, 1, "-p", free_port())
    rxe = (words[0], "-d", RXE, *rest)
    ours = (*OURS, words[0], "-d", "software_roce", *rest)
    server, client = (ours, (*rxe, OUR_ADDRESS)) if we_serve else (rxe, (*ours, RXE_ADDRESS))
    async with running(*server) as first:
        await first.has_written("local address" if index == "-g" else "Waiting for client")
        async with running(*client) as second:
            pass
    return first.output, second.output


both_ways = pytest.mark.parametrize("we_serve", [True, False], ids=["we serve", "rxe serves"])


@both_ways
@pytest.mark.parametrize("service", ["rc", "uc", "srq", "ud"])
async def test_pingpong(two_spaces: None, service: str, we_serve: bool) -> None:
    size = 1000 if service == "ud" else 10_000
    checks = () if service == "srq" else ("-c",)
    words = (f"ibv_{service}_pingpong", "-e", "-n", 50, "-s", size, *checks)
    for output in await play(*words, index="-g", we_serve=we_serve):
        assert "50 iters in" in output
        assert "invalid data" not in output


@both_ways
@pytest.mark.parametrize("program", ["ib_send_bw", "ib_write_bw", "ib_read_bw", "ib_atomic_bw"])
async def test_perftest(two_spaces: None, program: str, we_serve: bool) -> None:
    for output in await play(program, "-F", "-n", 50, index="-x", we_serve=we_serve):
        assert "Failed" not in output


@both_ways
async def test_messages_on_a_damaged_wire(damaged_wire: None, we_serve: bool) -> None:
    words = ("ibv_rc_pingpong", "-e", "-n", 20, "-s", 8000, "-m", 1024, "-c")
    for output in await play(*words, index="-g", we_serve=we_serve):
        assert "20 iters in" in output
        assert "invalid data" not in output


@both_ways
@pytest.mark.parametrize("program", ["ib_write_bw", "ib_read_bw", "ib_atomic_bw"])
async def test_one_sided_operations_on_a_damaged_wire(
    damaged_wire: None, program: str, we_serve: bool
) -> None:
    size = () if program == "ib_atomic_bw" else ("-s", 8000)
    words = (program, "-F", "-n", 20, "-u", 16, *size)
    for output in await play(*words, index="-x", we_serve=we_serve):
        assert "Failed" not in output


# Connections by the connection manager: the server's words end with its own address, the client's
# with the server's.
UDADDYS_PORT = 7174
MANAGED = {
    "rping": ("rping -v -C 20 -S 200 -s -a", "rping -v -C 20 -S 200 -c -a", "ping data"),
    "ucmatose": ("ucmatose -C 10 -S 2000 -b", "ucmatose -C 10 -S 2000 -s", "return status 0"),
    "udaddy": ("udaddy -C 10 -b", "udaddy -C 10 -s", "return status 0"),
    "many": ("ucmatose -c 8 -C 2 -b", "ucmatose -c 8 -C 2 -s", "return status 0"),
}


async def has_claimed(port: int) -> None:
    """Wait until a program on our device has its port, a socket. It listens right after."""
    command = (*IN_SPACE, "ss", "-Huln", f"sport = :{port}")
    while not (await anyio.run_process(command)).stdout:
        await anyio.sleep(0.1)


async def play_managed(server: str, client: str, we_serve: bool) -> tuple[str, str]:
    address = OUR_ADDRESS if we_serve else RXE_ADDRESS
    first, second = (OURS, ()) if we_serve else ((), OURS)
    port = UDADDYS_PORT if server.startswith("udaddy") else free_port()
    options = () if port == UDADDYS_PORT else ("-p", port)
    async with running(*first, *server.split(), address, *options) as one:
        if we_serve:
            await has_claimed(port)
        else:
            await one.listens(port, RXE)
        async with running(*second, *client.split(), address, *options) as two:
            pass
    return one.output, two.output


@both_ways
@pytest.mark.parametrize("name", MANAGED)
async def test_connection_manager(two_spaces: None, name: str, we_serve: bool) -> None:
    server, client, written = MANAGED[name]
    for output in await play_managed(server, client, we_serve):
        assert written in output


@both_ways
@pytest.mark.parametrize("program", ["ib_send_lat", "ib_write_bw", "ib_read_bw", "ib_atomic_bw"])
async def test_perftest_by_the_manager(two_spaces: None, program: str, we_serve: bool) -> None:
    words = (program, "-R", "-F", "-n", 50, "-p", free_port())
    server, client = ((*OURS, *words), words) if we_serve else (words, (*OURS, *words))
    async with running(*server) as first:
        await first.has_written("Waiting for client")
        async with running(*client, OUR_ADDRESS if we_serve else RXE_ADDRESS) as second:
            pass
    for output in (first.output, second.output):
        assert "Failed" not in output


@both_ways
async def test_connection_manager_on_a_damaged_wire(damaged_wire: None, we_serve: bool) -> None:
    server, client, written = MANAGED["rping"]
    for output in await play_managed(server, client, we_serve):
        assert written in output
