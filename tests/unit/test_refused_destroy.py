"""What the driver refuses to destroy keeps its memory: requests end, and closes say so."""

import contextlib
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

import aiordma
import aiordma.streams
from aiordma import BusyError, FlushedError, VerbsCallError
from aiordma.testing import Fault, Faults, software_objects
from aiordma.verbs.memory import OUTLIVING
from tests.connections import connect_to
from tests.internals import endpoint_of, hub_of
from tests.unit.child import run_child

pytestmark = [pytest.mark.anyio, pytest.mark.natively]

PATIENCE = 20
OPTIONS: dict[str, Any] = {"device": "software", "flush_timeout": 0.01}
REFUSED = r"ibv_destroy_qp: Device or resource busy.*call aclose\(\) again"


@asynccontextmanager
async def refusing(*calls: str) -> AsyncIterator[list[Fault]]:
    """The device refuses these calls until the faults end; at the end, everything is destroyed."""
    before, kept = objects(), dict(OUTLIVING)
    with Faults() as faults, anyio.fail_after(PATIENCE):
        yield [faults.refuse_call(call, errno.EBUSY, times=0) for call in calls]
    assert (objects(), OUTLIVING) == (before, kept)


def objects() -> dict[str, int]:
    """The device's objects, without the context, which stays open for the process, and the sockets,
    which close in their own time."""
    return {**software_objects(), "contexts": 0, "sockets": 0}


async def connected(
    listener: aiordma.Listener, **options: Any
) -> tuple[aiordma.Connection, aiordma.Connection]:
    client, server = await connect_to(listener, "127.0.0.1", **OPTIONS, **options)
    never_flush(client)
    never_flush(server)
    return client, server


def never_flush(user: aiordma.Connection | aiordma.Datagram) -> None:
    """Its requests are in flight until the queue pair is destroyed, as on a slow device."""
    endpoint: Any = endpoint_of(user)
    endpoint._disconnect = lambda: None
    endpoint.queue_pair.modify = lambda *_, **__: None


def reserved(connection: aiordma.Connection) -> int:
    return sum(queue.reserved for queue in hub_of(connection)._queues)


async def test_requests_end_and_keep_their_memory_until_a_later_close() -> None:
    async with (
        refusing("destroy_qp") as (fault,),
        aiordma.listen("127.0.0.1", 0, receive_buffers=0, **OPTIONS) as listener,
    ):
        client, server = await connected(listener)
        own = bytearray(b"registered")
        region = client.register(own)
        requests = [
            client.post_send(region[:]),  # for which the peer has no receive
            client.post_send(bytes(1000)),  # copied into a block of the pool
            client.post_send(bytearray(100_000)),  # registered for this request
        ]
        entries = reserved(client)
        for _ in range(2):
            with pytest.raises(VerbsCallError, match=REFUSED):
                await client.aclose()
            for request in requests:
                with pytest.raises(FlushedError, match=r"refused to destroy.*stays registered"):
                    await request
            assert (region._users, region.closed) == (1, False)
            with pytest.raises(BufferError):
                own.append(0)
            assert reserved(client) == entries  # it may still complete requests
        fault.end()
        await client.aclose()
        assert (region._users, region.closed) == (0, True)
        own.append(0)
        assert reserved(client) < entries
        await server.aclose()


async def test_pooled_receives_keep_their_blocks() -> None:
    async with (
        refusing("destroy_qp") as (fault,),
        aiordma.listen("127.0.0.1", 0, **OPTIONS) as listener,
    ):
        client, server = await connected(listener, receive_buffers=4, receive_size=4096)
        pool = hub_of(client).pool
        before = {lease.memory.address for lease in (pool.lease(4096) for _ in range(2))}
        with pytest.raises(VerbsCallError, match=REFUSED):
            await client.aclose()
        leases = [pool.lease(4096) for _ in range(200)]
        kept = {lease.memory.address for lease in leases}
        assert not kept & before
        for lease in leases:
            lease.release()
        fault.end()
        await client.aclose()
        await server.aclose()


async def test_connection_that_ends_alone_keeps_its_memory_until_it_is_closed() -> None:
    async with (
        refusing("destroy_qp") as (fault,),
        aiordma.listen("127.0.0.1", 0, receive_buffers=0, **OPTIONS) as listener,
    ):
        client, server = await connected(listener)
        region = client.register(bytearray(9))
        request = client.post_send(region[:])
        endpoint_of(client).fail(aiordma.RdmaError("broken"))
        await client.ended()
        with pytest.raises(FlushedError, match=r"refused to destroy.*: broken"):
            await request
        assert region._users == 1
        fault.end()
        await client.aclose()
        assert region.closed
        await server.aclose()


@pytest.mark.parametrize("domain", ["each", "own"])
async def test_memory_of_a_domain_is_kept_until_the_domain_can_be_closed(domain: str) -> None:
    async with (
        refusing("destroy_qp") as (fault,),
        aiordma.listen("127.0.0.1", 0, receive_buffers=0, **OPTIONS) as listener,
    ):
        home = await aiordma.open_domain("127.0.0.1", device="software")
        chosen: Any = home if domain == "own" else "each"
        client, server = await connected(listener, domain=chosen)
        region = client.register(bytearray(9))
        request = client.post_send(region[:])
        with pytest.raises(VerbsCallError, match=REFUSED):
            await client.aclose()
        assert isinstance(request.exception(), FlushedError)
        if domain == "own":
            with pytest.raises((VerbsCallError, BusyError)):
                await home.aclose()
        assert not region.closed
        fault.end()
        if domain == "own":
            await home.aclose()
            assert region.closed
        await client.aclose()
        assert region.closed
        await home.aclose()
        await server.aclose()


async def test_device_is_closed_by_the_connection_that_is_closed_last() -> None:
    async with refusing("destroy_qp") as (fault,):
        async with aiordma.listen("127.0.0.1", 0, receive_buffers=0, **OPTIONS) as listener:
            client, server = await connected(listener)
            region = client.register(bytearray(9))
            request = client.post_send(region[:])
            with pytest.raises(VerbsCallError, match=REFUSED):
                await client.aclose()
            with pytest.raises(VerbsCallError, match=REFUSED):
                await server.aclose()
        assert isinstance(request.exception(), FlushedError)
        assert region._users == 1
        fault.end()
        await client.aclose()
        assert region.closed
        await server.aclose()


async def test_refused_shared_receive_queue_keeps_its_receives() -> None:
    async with refusing("destroy_srq") as (fault,):
        shared = await aiordma.open_shared_receive("127.0.0.1", device="software", depth=8)
        memory = bytearray(64)
        region = shared.register(memory)
        (request,) = shared.post_srq_recv([region[:]])
        for _ in range(2):
            with pytest.raises(VerbsCallError, match=r"ibv_destroy_srq: .*call aclose\(\) again"):
                await shared.aclose()
            with pytest.raises(FlushedError, match="refused to destroy"):
                await request
            assert (region._users, region.closed) == (1, False)
        fault.end()
        await shared.aclose()
        assert region.closed
        memory.append(0)


@pytest.mark.parametrize("first", ["member", "queue"])
async def test_queue_of_a_refused_member_keeps_its_blocks(first: str) -> None:
    async with (
        refusing("destroy_qp") as (fault,),
        aiordma.listen("127.0.0.1", 0, **OPTIONS) as listener,
    ):
        shared = await aiordma.open_shared_receive(
            "127.0.0.1", device="software", buffers=4, buffer_size=4096
        )
        client, server = await connected(listener, shared_receive=shared)
        pool = hub_of(client).pool
        with pytest.raises(VerbsCallError, match=REFUSED):
            await client.aclose()
        with pytest.raises(VerbsCallError, match=REFUSED):
            await shared.aclose()
        assert endpoint_of(shared)._outliving._kept
        assert pool.registered
        fault.end()
        both: list[Any] = [client, shared] if first == "member" else [shared, client]
        for each in both:
            await each.aclose()
        await server.aclose()


async def test_datagram_socket_keeps_its_memory_and_handles() -> None:
    async with refusing("destroy_qp") as (fault,):
        socket = await aiordma.open_datagram("127.0.0.1", 0, device="software", receive_buffers=0)
        never_flush(socket)
        region = socket.register(bytearray(5000))
        receive = socket.post_recv(region[:])
        for _ in range(2):
            with pytest.raises(VerbsCallError, match=REFUSED):
                await socket.aclose()
            with pytest.raises(FlushedError, match="refused to destroy"):
                await receive
            assert (region._users, region.closed) == (1, False)
        fault.end()
        await socket.aclose()
        assert region.closed


@pytest.mark.parametrize("cancelled", [False, True])
async def test_block_of_a_connection_raises_the_refusal(cancelled: bool) -> None:
    async with (
        refusing("destroy_qp") as (fault,),
        aiordma.listen("127.0.0.1", 0, **OPTIONS) as listener,
    ):
        client, server = await connected(listener)
        with anyio.CancelScope() as scope, pytest.raises(VerbsCallError, match=REFUSED):
            async with contextlib.aclosing(client):
                (scope.cancel if cancelled else str)()
        fault.end()
        await client.aclose()
        await server.aclose()


def test_end_of_the_loop_leaves_refused_memory_registered() -> None:
    printed = run_child(
        """
        import asyncio, errno, gc, logging, warnings
        import aiordma
        from aiordma.testing import Faults, software_objects
        from aiordma.verbs.memory import OUTLIVING
        from tests.connections import connect_to
        from tests.unit.test_refused_destroy import OPTIONS, never_flush

        async def main():
            listener = await aiordma.listen("127.0.0.1", 0, receive_buffers=0, **OPTIONS)
            client, server = await connect_to(listener, "127.0.0.1", **OPTIONS)
            never_flush(client)
            request = client.post_send(client.register(own)[:])
            request.add_done_callback(aiordma.WorkRequest.exception)
            open_ones.extend([listener, client, server])

        logging.disable(logging.CRITICAL)
        warnings.simplefilter("ignore", ResourceWarning)
        own, open_ones = bytearray(9), []
        with Faults() as faults:
            faults.refuse_call("destroy_qp", errno.EBUSY, times=0)
            asyncio.run(main())
            open_ones.clear()
            gc.collect()
            try:
                own.append(0)
            except BufferError:
                print("kept", bool(OUTLIVING), software_objects()["regions"])
        """
    )
    # The memory that was sent, and that of the client's pooled receives.
    assert printed == "kept True 2\n"


async def test_stream_keeps_its_rings() -> None:
    async with refusing("destroy_qp") as (fault,):
        listener = await aiordma.streams.listen_stream("127.0.0.1", 0, device="software")
        async with anyio.create_task_group() as group:
            accepted: list[Any] = []

            async def accept() -> None:
                accepted.append(await listener.accept())

            group.start_soon(accept)
            client = await aiordma.streams.connect_stream(
                "127.0.0.1", listener.port, device="software"
            )
        connection = client.connection
        never_flush(connection)
        await client.send(b"hello")
        regions = list(endpoint_of(connection).regions.values())
        with pytest.raises(VerbsCallError, match=REFUSED):
            await client.aclose()
        assert [region.closed for region in regions if region._users] == [False]
        fault.end()
        await connection.aclose()
        assert all(region.closed for region in regions)
        await accepted[0].aclose()
        await listener.aclose()
