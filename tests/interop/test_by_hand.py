"""C programs on software_roce under `aiordma exec`, each with itself as the peer: with queue pairs
that they connect by hand, and with the connection manager."""

import re
import signal
from contextlib import AbstractAsyncContextManager

import anyio
import pytest

from tests.devices import ADDRESS, own_group
from tests.interop.programs import Program
from tests.interop.programs import running as running_as
from tests.ports import free_port

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.natively,
    pytest.mark.capability("queue pairs by hand"),
]

DEVICE = "software_roce"


def running(*words: str | int, status: int | None = 0) -> AbstractAsyncContextManager[Program]:
    """As this user: RoCE's port belongs to one user, and other tests run meanwhile."""
    return running_as(*words, status=status, as_nobody=False)


@pytest.mark.parametrize("options", [(), ("-e",)], ids=["polling", "events"])
@pytest.mark.parametrize("service", ["rc", "uc", "srq", "ud"])
async def test_pingpong(service: str, options: tuple[str, ...]) -> None:
    port, size = free_port(), 1000 if service == "ud" else 10_000
    words = (f"ibv_{service}_pingpong", "-d", DEVICE, "-g", 0, "-p", port, "-n", 50, "-s", size)
    checks = () if service == "srq" else ("-c",)
    async with running(*words, *checks, *options) as server:
        await server.has_written("local address")
        async with running(*words, *checks, *options, ADDRESS) as client:
            pass
    for end in (client, server):
        assert "50 iters in" in end.output
        assert "invalid data" not in end.output


@pytest.mark.parametrize(
    "words",
    [
        ("ib_send_bw", "-n", 200),
        ("ib_send_bw", "-n", 5000, "-s", 64, "-Q", 1, "-e"),
        ("ib_send_bw", "-n", 2000, "-s", 64, "-Q", 1, "-e", "-q", 2, "-b"),
        ("ib_send_lat", "-n", 100),
        ("ib_write_bw", "-n", 200, "-q", 4),
        ("ib_write_bw", "-n", 200, "-b", "-m", 256),
        ("ib_write_lat", "-n", 100),
        ("ib_read_bw", "-n", 200),
        ("ib_read_lat", "-n", 100, "-s", 100_000),
        ("ib_atomic_bw", "-n", 200),
        ("ib_atomic_lat", "-n", 100),
        ("ib_send_lat", "-n", 100, "-c", "UD"),
        ("ib_write_lat", "-n", 100, "-c", "UC"),
    ],
    ids=lambda words: " ".join(map(str, words)),
)
async def test_perftest_without_the_connection_manager(words: tuple[str | int, ...]) -> None:
    command = (*words, "-d", DEVICE, "-x", 0, "-F", "-p", free_port())
    async with running(*command) as server:
        await server.has_written("Waiting for client to connect")
        async with running(*command, ADDRESS) as client:
            pass
    for end in (client, server):
        assert "Failed" not in end.output


async def test_processes_that_share_the_port_outlive_one_of_them() -> None:
    """The kernel numbers the sockets of a port anew when one of them is closed."""

    def words(port: int, *options: str | int) -> tuple[str | int, ...]:
        return ("ibv_rc_pingpong", "-d", DEVICE, "-g", 0, "-e", "-p", port, *options)

    port = free_port()
    async with running(*words(free_port()), status=None) as first:
        await first.has_written("local address")
        async with running(*words(port, "-n", 20_000)) as server:
            await server.has_written("local address")
            async with running(*words(port, "-n", 20_000, ADDRESS)) as client:
                await client.has_written("remote address")
                first.stop(signal.SIGTERM)
    assert "20000 iters in" in client.output


ON_ROCE = ("env", f"AIORDMA_DEVICE={DEVICE}")
UDADDYS_PORT = 7174
# The server's and the client's words before its address, and what both say at the end.
MANAGED = {
    "rping": ("rping -v -C 20 -S 5000 -s -a", "rping -v -C 20 -S 5000 -c -a", "ping data"),
    "ucmatose": ("ucmatose -c 8 -C 10 -S 5000 -b", "ucmatose -c 8 -C 10 -S 5000 -s", "status 0"),
    "udaddy": ("udaddy -c 4 -C 10 -b", "udaddy -c 4 -C 10 -s", "status 0"),
}


async def has_claimed(port: int) -> None:
    """Wait until a process has the port: a socket at 127.47.92.space, for all addresses, or at
    127.64.0.0/10. It listens right after: until then, requests are repeated."""
    claim = re.compile(rf"(..5C2F|....[4-7].)7F:{port:04X}")
    while not claim.search(await anyio.Path("/proc/net/udp").read_text()):
        await anyio.sleep(0.02)


@pytest.mark.parametrize("name", MANAGED)
async def test_connection_manager(name: str) -> None:
    server, client, written = MANAGED[name]
    is_udaddy = name == "udaddy"
    port = UDADDYS_PORT if is_udaddy else free_port()
    options = () if is_udaddy else ("-p", port)
    async with running(*ON_ROCE, *server.split(), ADDRESS, *options) as first:
        await has_claimed(port)
        async with running(*ON_ROCE, *client.split(), ADDRESS, *options) as second:
            pass
    for end in (first, second):
        assert written in end.output


@pytest.mark.parametrize("words", ["ib_send_bw", "ib_write_lat", "ib_read_bw", "ib_send_lat -c UD"])
async def test_perftest_by_the_connection_manager(words: str) -> None:
    port = free_port()
    command: tuple[str | int, ...] = (*ON_ROCE, *words.split(), "-R", "-n", 100, "-F", "-p", port)
    async with running(*command) as server:
        await has_claimed(port)
        async with running(*command, ADDRESS) as client:
            pass
    for end in (client, server):
        assert "Failed" not in end.output


async def test_groups() -> None:
    words = (*ON_ROCE, "mckey", "-m", own_group(37), "-C", 10, "-b", ADDRESS)
    async with running(*words) as receiver, running(*words) as other:
        for each in (receiver, other):
            await each.has_written("joined dgid")
        async with running(*words, "-s") as sender:
            pass
    for end in (receiver, other, sender):
        assert "return status 0" in end.output
