"""C programs under `aiordma exec`, each with itself as the peer."""

import signal

import pytest

from tests.devices import ADDRESS, own_group
from tests.interop.programs import running, running_rping
from tests.ports import free_port

pytestmark = [pytest.mark.anyio, pytest.mark.natively]

DONE = "test complete\nreturn status 0\n"


async def test_rping() -> None:
    port = free_port()
    async with running_rping("-s", "-a", ADDRESS, "-p", port, "-C", 5, "-V", "-v") as server:
        await server.listens(port)
        async with running_rping("-c", "-a", ADDRESS, "-p", port, "-C", 5, "-V", "-v") as client:
            pass
    assert client.output.count("ping data: rdma-ping-") == 5
    assert server.output.count("server ping data: rdma-ping-") == 5


async def test_rdma_client_and_server() -> None:
    port = free_port()
    async with running("rdma_server", "-p", port) as server:
        await server.listens(port)
        async with running("rdma_client", "-s", ADDRESS, "-p", port) as client:
            pass
    assert client.output == "rdma_client: start\nrdma_client: end 0\n"
    assert server.output == "rdma_server: start\nrdma_server: end 0\n"


@pytest.mark.parametrize("options", [(), ("-c", 10, "-m")], ids=["one", "ten that migrate"])
async def test_ucmatose(options: tuple[str | int, ...]) -> None:
    port = free_port()
    async with running("ucmatose", "-p", port, *options) as server:
        await server.listens(port)
        async with running("ucmatose", "-s", ADDRESS, "-p", port, *options) as client:
            pass
    assert client.output.endswith(DONE)
    assert server.output.endswith(DONE)


async def test_udaddy() -> None:
    async with running("udaddy") as server:
        await server.listens(7174)
        async with running("udaddy", "-s", ADDRESS) as client:
            pass
    assert client.output.endswith(DONE)
    assert server.output.endswith(DONE)


async def test_mckey() -> None:
    words = ("mckey", "-m", own_group(36), "-b", ADDRESS)
    async with running(*words) as receiver:
        await receiver.has_written("joined dgid")
        async with running(*words, "-s") as sender:
            pass
    assert sender.output.endswith(DONE)
    assert receiver.output.endswith(DONE)


async def test_cmtime() -> None:
    port = free_port()
    async with running("cmtime", "-p", port, status=-signal.SIGTERM) as server:
        await server.listens(port)
        async with running("cmtime", "-s", ADDRESS, "-p", port, "-c", 20) as client:
            pass
        server.stop(signal.SIGTERM)
    assert "disconnect" in client.output


async def test_ibv_devices() -> None:
    async with running("ibv_devices") as program:
        pass
    assert "    software" in program.output
    async with running("ibv_devinfo", "-v") as program:
        pass
    assert "hca_id:\tsoftware" in program.output
    assert "PORT_ACTIVE (4)" in program.output
