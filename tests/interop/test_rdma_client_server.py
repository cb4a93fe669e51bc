"""rdma_client and rdma_server of rdma-core: one message each way, on our default options."""

import pytest

import aiordma
from tests.devices import ADDRESS
from tests.interop.peers import MESSAGE, converse_with_rdma_client, converse_with_rdma_server
from tests.interop.programs import running
from tests.ports import free_port

pytestmark = pytest.mark.anyio


async def test_rdma_client_and_our_server() -> None:
    async with (
        await aiordma.listen(ADDRESS, 0) as listener,
        running("rdma_client", "-s", ADDRESS, "-p", listener.port) as client,
        await listener.accept() as connection,
    ):
        assert await converse_with_rdma_client(connection, b"sixteen bytes ok") == MESSAGE
    assert client.output == "rdma_client: start\nrdma_client: end 0\n"


async def test_our_client_and_rdma_server() -> None:
    port = free_port()
    async with running("rdma_server", "-p", port) as server:
        await server.listens(port)
        async with await aiordma.connect(ADDRESS, port) as connection:
            assert await converse_with_rdma_server(connection, b"sixteen bytes ok") == MESSAGE
    assert server.output == "rdma_server: start\nrdma_server: end 0\n"


@pytest.mark.natively
@pytest.mark.parametrize("length", [0, 1, 15])
async def test_rdma_client_takes_shorter_replies(length: int) -> None:
    async with (
        await aiordma.listen(ADDRESS, 0, receive_buffers=1, receive_size=16) as listener,
        running("rdma_client", "-s", ADDRESS, "-p", listener.port),
        await listener.accept() as connection,
    ):
        assert await converse_with_rdma_client(connection, bytes(length)) == MESSAGE
