"""perftest on siw, or under `aiordma exec`: with itself, and with the software device of this
process, each as the server of the other."""

import re

import pytest

import aiordma
from tests.conftest import DEVICE
from tests.devices import ADDRESS
from tests.interop import perftest
from tests.interop.programs import REFUSED, again_if, running
from tests.ports import free_port

pytestmark = [pytest.mark.anyio, pytest.mark.capability("iwarp")]

SOFTWARE = "software"
MOST = 65536
ROUNDS = 50


def measuring(program: str, port: int, *options: str | int) -> tuple[str | int, ...]:
    return (program, "-R", "-d", DEVICE, "-p", port, "-n", ROUNDS, "-F", *options)


@pytest.mark.parametrize("size", [2, MOST])
async def test_ib_read_lat_reads_from_our_server(size: int) -> None:
    async with await aiordma.listen(
        ADDRESS, 0, device=SOFTWARE, options=perftest.CONTROL
    ) as listener:
        command = measuring("ib_read_lat", listener.port, "-s", size)
        async with (
            running(*command, ADDRESS) as client,
            perftest.server_of(listener, size) as session,
        ):
            await session.be_read()
    assert f"\n {size} " in client.output


@pytest.mark.parametrize("size", [2, MOST])
async def test_our_client_reads_from_ib_read_lat(size: int) -> None:
    port = free_port()
    async with running(*measuring("ib_read_lat", port, "-s", size)) as server:
        await server.listens(port)
        async with perftest.client_of(ADDRESS, port, size, SOFTWARE) as session:
            found = await session.read(ROUNDS)
    assert {len(data) for data in found} == {size}


@pytest.mark.parametrize("size", [2, MOST])
async def test_ib_write_lat_and_our_server_write_in_turn(size: int) -> None:
    async with await aiordma.listen(
        ADDRESS, 0, device=SOFTWARE, options=perftest.CONTROL
    ) as listener:
        command = measuring("ib_write_lat", listener.port, "-s", size)
        async with (
            running(*command, ADDRESS) as client,
            perftest.server_of(listener, size) as session,
        ):
            await session.write_in_turn(ROUNDS)
    assert f"\n {size} " in client.output


@pytest.mark.parametrize("size", [2, MOST])
async def test_our_client_and_ib_write_lat_write_in_turn(size: int) -> None:
    port = free_port()
    async with running(*measuring("ib_write_lat", port, "-s", size)) as server:
        await server.listens(port)
        async with perftest.client_of(ADDRESS, port, size, SOFTWARE) as session:
            await session.write_in_turn(ROUNDS)
    assert f"\n {size} " in server.output


@pytest.mark.natively
@pytest.mark.parametrize(
    "command",
    [
        "ib_write_bw",
        "ib_write_bw -b -q 4",
        "ib_write_lat -I 64 -s 32",
        "ib_send_bw --use_old_post_send",
        "ib_send_bw --use-srq",
        "ib_send_lat",
        "ib_send_lat -c UD -s 64",
        "ib_read_bw -o 4",
        "ib_read_lat",
        "ib_atomic_bw -A CMP_AND_SWAP",
        "ib_atomic_lat",
    ],
)
async def test_perftest_with_itself(command: str) -> None:
    program, *options = command.split()

    async def measured() -> str:
        port = free_port()
        words = measuring(program, port, *options)
        async with running(*words) as server:
            await server.listens(port)
            async with running(*words, ADDRESS) as client:
                pass
        return client.output

    output = await again_if(REFUSED, measured)
    # On a busy machine, a line on its clocks stands between the head of the table and its row.
    assert re.search(r"^ +\d+ +\d+ +\d+\.", output, re.MULTILINE), output
