"""udaddy of rdma-core: the client sends first, its queue pair's number beside each datagram; the
server works out the way back from the first one, and answers as often."""

import anyio
import pytest

import aiordma
from tests.devices import ADDRESS
from tests.interop.programs import running

pytestmark = [pytest.mark.anyio, pytest.mark.capability("datagrams")]

PORT = 7174
"""udaddy's, which it takes no option for."""

COUNT = 10


async def answer_datagrams(socket: aiordma.Datagram, count: int) -> list[int]:
    """Be the server: take all, then answer all; return the lengths."""
    messages = [await socket.receive() for _ in range(count)]
    for message in messages:
        assert message.immediate == message.sender_qp_num
        await socket.send(message.data, message.source, immediate=socket.qp_num)
    return [len(message.data) for message in messages]


@pytest.mark.promise("A datagram arrives whole or not at all")
async def test_a_c_client() -> None:
    async with await aiordma.open_datagram(ADDRESS, PORT) as socket:
        async with running("udaddy", "-s", ADDRESS, "-C", COUNT, "-S", 333) as client:
            assert await answer_datagrams(socket, COUNT) == [333] * COUNT
        assert "receiving data transfers\n" in client.output
        assert client.output.endswith("data transfers complete\ntest complete\nreturn status 0\n")


@pytest.mark.promise("A datagram arrives whole or not at all")
async def test_a_c_server() -> None:
    async with running("udaddy", "-C", COUNT, "-S", 333) as server:
        await server.listens(PORT)
        async with await aiordma.open_datagram(ADDRESS) as socket:
            peer = await socket.resolve(ADDRESS, PORT)
            for number in range(COUNT):
                await socket.send(bytes([number]) * 333, peer, immediate=socket.qp_num)
            answers = [await socket.receive() for _ in range(COUNT)]
            assert {answer.source.address.gid for answer in answers} == {peer.address.gid}
    assert server.output.endswith("data transfers complete\ntest complete\nreturn status 0\n")
    assert [len(answer.data) for answer in answers] == [333] * COUNT
    assert {answer.immediate for answer in answers} == {peer.qp_num}
    assert {answer.sender_qp_num for answer in answers} == {peer.qp_num}


@pytest.mark.natively
async def test_many_paths_of_a_c_client() -> None:
    paths = 5
    async with await aiordma.open_datagram(ADDRESS, PORT) as socket:
        async with running("udaddy", "-s", ADDRESS, "-c", paths, "-C", COUNT) as client:
            messages = [await socket.receive() for _ in range(paths * COUNT)]
            assert len({message.source for message in messages}) == paths
            async with anyio.create_task_group() as answers:
                for message in messages:
                    answers.start_soon(socket.send, message.data, message.source)
        assert client.output.endswith("data transfers complete\ntest complete\nreturn status 0\n")
