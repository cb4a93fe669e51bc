"""Memory that aiordma registered for a request, a grant or its cache, and that the driver refuses
to deregister: the rest is deregistered at once, and the refused memory with the connection."""

import asyncio
import errno
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

import aiordma
import aiordma.streams
from aiordma import Access, VerbsCallError
from aiordma._requests.pool import BufferPool
from aiordma.testing import Faults, connected_pair, software_objects
from tests.conftest import LOOPS
from tests.internals import endpoint_of, hub_of

pytestmark = [pytest.mark.anyio, pytest.mark.natively]

PATIENCE = 10
SHORT, LONG = 400_000, 800_000
"""Two of these are deregistered on the loop's thread, and in a worker thread."""


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[aiordma.Connection, aiordma.Connection]]:
    """Two connections of a loop that has others, so that its own protection domain stays."""
    with anyio.fail_after(PATIENCE):
        async with connected_pair(receive_buffers=0), connected_pair(receive_buffers=0) as both:
            yield both


def is_free(buffer: bytearray) -> bool:
    try:
        buffer.append(0)
    except BufferError:
        return False
    return True


def regions() -> int:
    return software_objects()["regions"]


async def until(condition: Any) -> None:
    while not condition():
        await anyio.sleep(0.002)


@pytest.mark.parametrize("size", [SHORT, LONG])
@pytest.mark.parametrize("refused", [0, 1])
async def test_other_memory_of_the_request_is_deregistered(size: int, refused: int) -> None:
    async with pair() as (client, server):
        target = server.register(bytearray(2 * size), Access.REMOTE_WRITE)
        before, known = regions(), len(endpoint_of(client).regions)
        buffers = [bytearray(size), bytearray(size)]
        with Faults() as faults:
            fault = faults.refuse_call("dereg_mr", errno.EBUSY, after=refused)
            await client.writev(buffers, target.remote())
            await until(lambda: fault.struck and regions() == before + 1)
            await until(lambda: len(endpoint_of(client).regions) == known + 1)
        assert sorted(is_free(buffer) for buffer in buffers) == [False, True]
        await client.aclose()
        assert is_free(buffers[0])
        assert is_free(buffers[1])
        assert regions() == before


@pytest.mark.parametrize("size", [SHORT, LONG])
async def test_other_memory_of_the_cache_is_deregistered(size: int) -> None:
    numpy = pytest.importorskip("numpy")
    async with pair() as (client, server):
        target = server.register(bytearray(2 * size), Access.REMOTE_WRITE)
        before = regions()
        arrays = [numpy.zeros(size, "u1") for _ in range(3)]
        for array in arrays:
            await client.write(array, target.remote()[:size])
        assert regions() == before + 3
        with Faults() as faults:
            fault = faults.refuse_call("dereg_mr", errno.EBUSY)
            client.registrations.clear()
            await until(lambda: fault.struck and regions() == before + 1)


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged."""
    assert all(record.levelno == logging.ERROR for record in caplog.records)
    return [record.getMessage() for record in caplog.records]


def refusal(size: int) -> str:
    return (
        f"<MemoryRegion of {size} bytes> could not be deregistered, and stays registered until a "
        f"later attempt: [Errno {errno.EBUSY}] ibv_dereg_mr: Device or resource busy"
    )


@pytest.mark.parametrize("size", [SHORT, 2 * LONG])
async def test_refused_memory_of_a_deleted_array_is_logged(
    size: int, caplog: pytest.LogCaptureFixture
) -> None:
    numpy = pytest.importorskip("numpy")
    async with pair() as (client, server):
        target = server.register(bytearray(size), Access.REMOTE_WRITE)
        before = regions()
        for _ in range(2):
            array = numpy.zeros(size, "u1")
            await client.write(array, target.remote())
            with Faults() as faults:
                fault = faults.refuse_call("dereg_mr", errno.EBUSY, times=0)
                del array
                await until(lambda fault=fault: fault.struck == 1)
                await until(lambda: hub_of(client).pool.registrations._refused)
                client.registrations.clear()
                await until(lambda fault=fault: fault.struck == 2)
            await client.write(b"still working", target.remote()[:13])
            await until(lambda: hub_of(client).pool.registrations._refused)
            assert (len(client.registrations), regions()) == (0, before + 1)
            client.registrations.clear()
            await until(lambda: regions() == before)
    assert refusals(caplog) == [refusal(size)] * 2


async def test_refused_memory_of_a_deleted_array_is_deregistered_with_the_domain(
    caplog: pytest.LogCaptureFixture,
) -> None:
    numpy = pytest.importorskip("numpy")
    before = regions()
    async with connected_pair(receive_buffers=0) as (client, server):
        target = server.register(bytearray(SHORT), Access.REMOTE_WRITE)
        array = numpy.zeros(SHORT, "u1")
        await client.write(array, target.remote())
        with Faults() as faults:
            fault = faults.refuse_call("dereg_mr", errno.EBUSY)
            del array
            await until(lambda: fault.struck)
    await until(lambda: regions() == before)
    assert refusals(caplog) == [refusal(SHORT)]


async def test_registration_that_lacks_memory_does_not_fail_for_a_refusal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    numpy = pytest.importorskip("numpy")
    async with pair() as (client, server):
        target = server.register(bytearray(SHORT), Access.REMOTE_WRITE)
        before = regions()
        arrays = [numpy.zeros(SHORT, "u1") for _ in range(2)]
        for array in arrays:
            await client.write(array, target.remote())
        with Faults() as faults:
            faults.refuse_call("dereg_mr", errno.EBUSY)
            lacking = faults.refuse_call("reg_mr", errno.ENOMEM)
            client.register(bytearray(8)).close()
            assert lacking.struck
            assert regions() == before + 1
            faults.refuse_call("reg_mr", errno.ENOMEM)
            client.register(bytearray(8)).close()  # deregisters what was refused
        assert regions() == before
    assert refusals(caplog) == [refusal(SHORT)]


async def test_failed_call_raises_its_own_error_though_memory_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    numpy = pytest.importorskip("numpy")
    async with pair() as (client, server):
        target = server.register(bytearray(SHORT), Access.REMOTE_WRITE)
        before, memory = regions(), bytearray(SHORT)
        client.registrations.max_bytes = SHORT - 1
        with Faults() as faults:
            fault = faults.refuse_call("dereg_mr", errno.EBUSY, times=0)
            with pytest.raises(ValueError, match="slice both to the same length"):
                client.post_write(memory, target.remote()[:8])
            assert (fault.struck, regions()) == (1, before + 1)
        client.registrations.max_bytes = SHORT
        with Faults() as faults:
            fault = faults.refuse_call("dereg_mr", errno.EBUSY, times=0)
            await client.write(numpy.zeros(SHORT, "u1"), target.remote())
            client.registrations.max_bytes = 0
            await until(lambda: fault.struck)
        await client.aclose()
        assert is_free(memory)
    assert refusals(caplog) == [refusal(SHORT)] * 2


async def cancelled_by_scope(client: aiordma.Connection, domain: aiordma.Domain | None) -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        if domain is None:
            await client.register_in_thread(bytearray(SHORT))
        else:
            await domain.register(bytearray(SHORT))
    assert scope.cancelled_caught


async def cancelled_by_asyncio(client: aiordma.Connection, domain: aiordma.Domain | None) -> None:
    memory = bytearray(SHORT)
    call = client.register_in_thread(memory) if domain is None else domain.register(memory)
    task = asyncio.create_task(call)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


CANCELLED = [
    pytest.param(each.values[0], cancel, id=f"{each.id}-{cancel.__name__}")
    for each in LOOPS
    for cancel in (cancelled_by_scope, cancelled_by_asyncio)
    if each.id != "trio" or cancel is cancelled_by_scope  # trio's tasks have no other way
]


@pytest.mark.parametrize(("anyio_backend", "cancel"), CANCELLED)
@pytest.mark.parametrize("has_domain", [False, True])
async def test_cancelled_registration_that_is_refused_stays_cancelled(
    cancel: Any, has_domain: bool, caplog: pytest.LogCaptureFixture
) -> None:
    before = regions()
    async with connected_pair(receive_buffers=0) as (client, _):
        home = await aiordma.open_domain("127.0.0.1", device="software") if has_domain else None
        now = regions()
        with Faults() as faults:
            fault = faults.refuse_call("dereg_mr", errno.EBUSY)
            await cancel(client, home)
            assert (fault.struck, regions()) == (1, now + 1)
        if home is not None:
            await home.aclose()
            assert regions() == now
    await until(lambda: regions() == before)
    (message,) = refusals(caplog)
    assert "ibv_dereg_mr: Device or resource busy" in message


@pytest.mark.parametrize("domain", [None, "each"])
async def test_datagram_socket_closes_though_memory_is_refused(domain: Any) -> None:
    with anyio.fail_after(PATIENCE):
        socket = await aiordma.open_datagram("127.0.0.1", device="software", domain=domain)
        await socket.send(b"not received", await socket.resolve("127.0.0.1", socket.port))
        received = endpoint_of(socket).received
        assert received is not None
        await until(lambda: received.queue.arrived)
        with Faults() as faults:
            faults.refuse_call("dereg_mr", errno.EBUSY, times=0)
            await socket.aclose()
        await socket.aclose()


async def test_datagram_socket_closes_though_its_blocks_are_not_returned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with anyio.fail_after(PATIENCE):
        socket = await aiordma.open_datagram("127.0.0.1", device="software", domain="each")
        await socket.send(b"not received", await socket.resolve("127.0.0.1", socket.port))
        received = endpoint_of(socket).received
        assert received is not None
        await until(lambda: received.queue.arrived)

        def fail(*_: Any) -> None:
            raise VerbsCallError(errno.EIO, "ibv_dereg_mr")

        monkeypatch.setattr(BufferPool, "_has_room", fail)
        await socket.aclose()
    assert "Input/output error" in caplog.text


async def test_grant_ends_though_the_memory_of_its_region_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with anyio.fail_after(PATIENCE):
        home = await aiordma.open_domain("127.0.0.1", device="software")
        async with (
            connected_pair(receive_buffers=0, domain=home) as (client, _),
            connected_pair(receive_buffers=0, domain=home) as (other, _),
        ):
            region = other.register(bytearray(SHORT), Access.REMOTE_WRITE)
            grant = await client.grant(region, Access.REMOTE_WRITE)
            await other.aclose()
            assert not region.closed
            with Faults() as faults:
                # The grant has a registration of its own.
                faults.refuse_call("dereg_mr", errno.EBUSY, after=1)
                await grant.aclose()
            assert not region.closed
        await home.aclose()
        assert region.closed
    assert refusals(caplog) == [refusal(SHORT)]


async def test_stream_sends_though_memory_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    size, received = 5 << 20, bytearray()  # which is registered, and not copied
    listener = await aiordma.streams.listen_stream("127.0.0.1", 0, device="software")

    async def receive() -> None:
        async with await listener.accept() as stream:
            async for part in stream:
                received.extend(part)

    with anyio.fail_after(PATIENCE):
        async with listener, anyio.create_task_group() as group:
            group.start_soon(receive)
            stream = await aiordma.streams.connect_stream("127.0.0.1", listener.port)
            with Faults() as faults:
                faults.refuse_call("dereg_mr", errno.EBUSY)
                await stream.send(bytes(size))
            await stream.aclose()
    assert len(received) == size
    assert refusals(caplog) == [refusal(size)]


@pytest.mark.parametrize("size", [SHORT, 2 * LONG])
async def test_memory_of_a_grant_is_deregistered_with_the_connection(size: int) -> None:
    async with pair() as (client, _):
        before, memory = regions(), bytearray(size)
        with Faults() as faults:
            grant = await client.grant(memory, Access.REMOTE_WRITE)
            faults.refuse_call("dereg_mr", errno.EIO)
            with pytest.raises(VerbsCallError, match="ibv_dereg_mr"):
                await grant.aclose()
        assert regions() == before + 1
        await client.aclose()
        assert regions() == before
        assert is_free(memory)
