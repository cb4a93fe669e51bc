"""mckey of rdma-core: everyone joins a group, and after three seconds the sender sends to it."""

import pytest

import aiordma
from tests.devices import ADDRESS
from tests.interop.programs import running

pytestmark = [pytest.mark.anyio, pytest.mark.capability("datagrams")]

GROUP = "239.1.2.3"
COUNT = 10


@pytest.mark.promise("A datagram arrives whole or not at all")
async def test_a_c_sender() -> None:
    async with await aiordma.open_datagram(ADDRESS) as socket:
        await socket.join(GROUP)
        sender = running("mckey", "-m", GROUP, "-b", ADDRESS, "-s", "-C", COUNT, "-S", 333)
        async with sender as program:
            messages = [await socket.receive() for _ in range(COUNT)]
        assert "data transfers complete\n" in program.output
    assert [len(message.data) for message in messages] == [333] * COUNT
    # What it puts beside each datagram is its queue pair's number.
    assert {message.immediate for message in messages} == {messages[0].sender_qp_num}


async def test_a_c_sender_that_joined_only_to_send() -> None:
    async with await aiordma.open_datagram(ADDRESS) as socket:
        await socket.join(GROUP)
        async with running("mckey", "-m", GROUP, "-b", ADDRESS, "-s", "-o", "-C", COUNT):
            messages = [await socket.receive() for _ in range(COUNT)]
    assert [len(message.data) for message in messages] == [100] * COUNT


@pytest.mark.promise("A datagram arrives whole or not at all")
@pytest.mark.parametrize("send_only", [False, True], ids=["member", "send-only"])
async def test_a_c_receiver(send_only: bool) -> None:
    async with (
        await aiordma.open_datagram(ADDRESS) as socket,
        running("mckey", "-m", GROUP, "-b", ADDRESS, "-C", COUNT, "-S", 333) as receiver,
    ):
        await receiver.has_written("joined dgid:")
        group = await socket.join(GROUP, send_only=send_only)
        for number in range(COUNT):
            await socket.send(bytes([number]) * 333, group, immediate=socket.qp_num)
        await receiver.has_written("data transfers complete\n")
