"""Failed requests: which error, whose, and what becomes of everything else."""

import contextlib
import re
import signal
from pathlib import Path

import anyio
import pytest

import aiordma
from tests.alike import alike
from tests.device.players import OWN_RECEIVES, REMOTE, Outcome, both_ways, connected, until
from tests.devices import ADDRESS, BUILT_IN, DeviceUnderTest
from tests.forked import python
from tests.internals import address_text
from tests.ports import free_port

pytestmark = pytest.mark.anyio

NOWHERE = aiordma.RemoteMemory(4096, 8, 1)
"""A range that no peer of ours has registered."""

ECHO_SERVER = Path(__file__).resolve().parents[2] / "examples" / "echo_server.py"


# The errors of both sides if a message is longer than the receive that it meets. The InfiniBand
# specification says REM_INV_REQ_ERR to the sender and LOC_LEN_ERR to the receiver; rxe of Linux
# 6.1 says otherwise; on iWARP a SEND has ended before the peer looks at it.
TOO_LONG: dict[str, tuple[type[Exception] | None, type[Exception]]] = {
    "rxe": (aiordma.verbs.RemoteOperationError, aiordma.verbs.LocalQueuePairError),
    "siw": (None, aiordma.verbs.LocalLengthError),
    "software": (aiordma.verbs.RemoteInvalidRequestError, aiordma.verbs.LocalLengthError),
    "software_roce": (aiordma.verbs.RemoteInvalidRequestError, aiordma.verbs.LocalLengthError),
}


UNTOLD = {"private_data": b"of its own"}
"""Of a client that is not told how long the server's receives are."""


async def send_too_long(connection: aiordma.Connection, length: int, driver: str) -> None:
    """Send more than the peer's receive holds, and check the sender's error."""
    expected, _ = TOO_LONG[driver]
    if expected is None:
        # siw completes a SEND once TCP has its bytes, unless the peer's reset is faster.
        with contextlib.suppress(aiordma.verbs.LocalQueuePairError):
            await connection.send(bytes(length))
        return
    with pytest.raises(expected, match=f"SEND of {length} bytes.*receive_size="):
        await connection.send(bytes(length))


@pytest.mark.promise("Messages arrive whole and in order")
async def test_a_message_longer_than_its_receive_breaks_both_ends_with_their_errors(
    device: DeviceUnderTest,
) -> None:
    async with connected(server=OWN_RECEIVES) as (client, server):
        receive, spare = server.post_recv(bytearray(10)), server.post_recv(bytearray(10))
        await send_too_long(client, 11, device.driver)
        told = TOO_LONG[device.driver][1]
        with pytest.raises(told, match=r"RECV of 10 bytes.*receive_size=") as received:
            await receive
        with pytest.raises(aiordma.FlushedError) as flushed:
            await spare
        assert alike(flushed.value.__cause__, received.value)
        either = (anyio.EndOfStream, aiordma.verbs.LocalQueuePairError)  # as the SEND ended
        with pytest.raises(TOO_LONG[device.driver][0] or either):
            await client.receive()
        assert not client.is_connected


@pytest.mark.promise("A message that the peer cannot hold is refused at its sender")
async def test_a_message_longer_than_the_peers_receives_is_refused_at_its_sender() -> None:
    async with connected(client={"receive_size": 90}, server={"receive_size": 100}) as (
        client,
        server,
    ):
        for sender, most in ((client, 100), (server, 90)):
            refused = pytest.raises(ValueError, match=f"{most + 1} bytes.*have {most};.*receive_si")
            with refused:
                sender.post_send(bytes(most + 1))
            with refused:
                await sender.send(bytes(most + 1))
            with refused:
                await sender.sendv([bytes(most), b"1"])
            with refused, sender.chain() as chain:
                chain.post_send(bytes(most + 1))
        await client.send(bytes(100))
        assert len(await server.receive()) == 100
        await server.sendv([bytes(80), bytes(10)])
        assert len(await client.receive()) == 90
        assert client.private_data == server.private_data == b""


@pytest.mark.capability("immediate")
async def test_what_a_write_writes_may_be_longer_than_the_peers_receives() -> None:
    async with connected(server={"receive_size": 10}) as (client, server):
        target = bytearray(1000)
        remote = server.register(target, REMOTE | aiordma.Access.LOCAL_WRITE).remote()
        await client.write(bytes(1000), remote, immediate=1)
        assert (await server.receive_message()).written == 1000


async def test_a_peer_that_posts_its_own_receives_says_nothing_of_their_length() -> None:
    async with connected(client={"receive_size": 90}, server=OWN_RECEIVES) as (client, server):
        receive = server.post_recv(bytearray(200))
        await client.send(bytes(200))
        assert (await receive).byte_len == 200
        with pytest.raises(ValueError, match=r"91 bytes.*have 90;"):
            server.post_send(bytes(91))


@pytest.mark.capability("queue pairs by hand")
async def test_without_rnr_retries_a_missing_receive_is_an_error(device: DeviceUnderTest) -> None:
    # Each end states how often the other retries (man rdma_connect). iWARP counts none.
    roce = {"device": device.by_hand}
    none = {"options": aiordma.ConnectionOptions(rnr_retry_count=0)}
    async with connected(server={**none, **OWN_RECEIVES, **roce}, client=roce) as (client, server):
        with pytest.raises(aiordma.ReceiverNotReadyError):
            await client.send(b"too early")
        await until(lambda: not server.is_connected)
        with pytest.raises(aiordma.DisconnectedError):
            server.post_recv(bytearray(8))


@pytest.mark.promise("Messages arrive whole and in order")
async def test_messages_sent_before_a_failure_are_received_before_its_error(
    device: DeviceUnderTest,
) -> None:
    async with connected(client=UNTOLD, server={"receive_size": 100}) as (client, server):
        for i in range(5):
            await client.send(b"%d" % i)
        await send_too_long(client, 101, device.driver)
        assert [await server.receive() for _ in range(5)] == [b"%d" % i for i in range(5)]
        with pytest.raises(TOO_LONG[device.driver][1]):
            await server.receive()


@pytest.mark.promise("Every posted request completes or fails")
@pytest.mark.capability("named_refusals")
async def test_waiting_coroutines_get_the_cause_of_the_end() -> None:
    async with connected(client={"options": aiordma.ConnectionOptions(max_send_wr=1)}) as (
        client,
        _,
    ):
        outcomes = [Outcome() for _ in range(3)]
        failing = client.post_read(bytearray(8), NOWHERE)
        async with anyio.create_task_group() as group:
            for outcome in outcomes:
                group.start_soon(outcome.of, lambda: client.send(b"waiting for a slot"))
        cause = failing.exception()
        assert isinstance(cause, aiordma.RemoteAccessError)
        for outcome in outcomes:
            assert alike(outcome.error, cause)


@pytest.mark.capability("named_refusals")
async def test_a_failed_connection_still_closes_and_others_can_follow() -> None:
    for _ in range(2):
        async with connected() as (client, server):
            await both_ways(client, server)
            with pytest.raises(aiordma.RemoteAccessError):
                await client.read_bytes(NOWHERE)


@pytest.mark.promise("Messages arrive whole and in order")
async def test_a_killed_peer_ends_what_waits_for_it() -> None:
    port = free_port()
    async with await anyio.open_process(
        [*python(), str(ECHO_SERVER), "--bind", ADDRESS, "--port", str(port)],
        stderr=None,
    ) as peer:
        assert peer.stdout is not None
        assert b"listening" in await peer.stdout.receive()
        async with await aiordma.connect(ADDRESS, port) as client:
            await client.send(b"are you there?")
            assert await client.receive() == b"are you there?"
            outcome = Outcome()
            async with anyio.create_task_group() as group:
                group.start_soon(outcome.of, client.receive)
                await anyio.wait_all_tasks_blocked()
                peer.send_signal(signal.SIGKILL)
                with pytest.raises(aiordma.RdmaError):
                    await client.read_bytes(NOWHERE)
            assert isinstance(
                outcome.error, anyio.EndOfStream | aiordma.RdmaError | anyio.BrokenResourceError
            )
            assert not client.is_connected
        await peer.wait()


# -- texts ----------------------------------------------------------------------------------------


@pytest.mark.promise(
    "A peer that has gone is a PeerGoneError, or the end of the stream",
    "Messages arrive whole and in order",
)
async def test_end_of_stream_names_the_peer() -> None:
    async with connected() as (client, server):
        await client.aclose()
        text = f"^peer {re.escape(address_text(server.peer_address))} disconnected$"
        with pytest.raises(aiordma.EndOfStream, match=text):
            await server.receive()
        with pytest.raises(aiordma.DisconnectedError, match=text):
            await server.send(b"too late")


@pytest.mark.promise("Messages arrive whole and in order")
@pytest.mark.one_kernel_device
async def test_owner_learns_of_a_refused_access() -> None:
    """rxe reports no event: its queue pair is flushed before the peer disconnects."""
    async with connected() as (client, server):
        region = server.register(bytearray(100), aiordma.Access.REMOTE_READ)
        with pytest.raises(aiordma.RemoteAccessError):
            await client.write(b"evil", region.remote()[:4])
        await client.aclose()
        with pytest.raises((aiordma.DeviceEventError, aiordma.FlushedError)) as refused:
            await server.receive()
        if BUILT_IN:
            assert "QP_ACCESS_ERR" in str(refused.value)
