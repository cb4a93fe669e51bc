"""What `serve` logs as a handler fails: a line for the peer's fault, a traceback for its own. And
what it keeps of a peer that has left: nothing."""

import asyncio
import contextlib
import gc
import logging
import weakref
from collections.abc import Awaitable, Callable

import anyio
import pytest

import aiordma
from tests.conftest import LOOPS
from tests.device.players import until
from tests.devices import ADDRESS
from tests.internals import address_text, endpoint_of

pytestmark = [pytest.mark.anyio, pytest.mark.one_kernel_device]

NOWHERE = aiordma.RemoteMemory(4096, 8, 1)

Handler = Callable[[aiordma.Connection], Awaitable[None]]


async def logged(
    handler: Handler, caplog: pytest.LogCaptureFixture, *, stays: bool = False
) -> logging.LogRecord:
    """The one record of a handler whose peer sends a message, and leaves unless it stays."""
    caplog.set_level(logging.INFO, "aiordma")
    async with aiordma.listen(ADDRESS, 0) as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, handler)
        async with aiordma.connect(ADDRESS, listener.port) as client:
            await client.send(b"go")
            if stays:
                await client.ended()
        await until(lambda: bool(_of_the_listener(caplog)))
        group.cancel_scope.cancel()
    (record,) = _of_the_listener(caplog)
    return record


def _of_the_listener(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.module == "handler_errors"]


async def read_on(connection: aiordma.Connection) -> None:
    while True:
        await connection.receive()


async def read_in_groups(connection: aiordma.Connection) -> None:
    async with anyio.create_task_group() as outer:
        outer.start_soon(anyio.sleep_forever)
        async with anyio.create_task_group() as inner:
            inner.start_soon(anyio.sleep_forever)
            inner.start_soon(read_on, connection)


async def fail_in_a_group(connection: aiordma.Connection) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(_fail, connection)
        group.start_soon(read_on, connection)


async def _fail(connection: aiordma.Connection) -> None:
    with anyio.CancelScope(shield=True):  # the reader may notice the end first, and cancel this
        await connection.ended()
    raise KeyError("the handler's own")


@pytest.mark.parametrize("handler", [read_on, read_in_groups])
async def test_leaving_peer_is_one_line(handler: Handler, caplog: pytest.LogCaptureFixture) -> None:
    record = await logged(handler, caplog)
    assert record.levelno == logging.INFO
    assert record.exc_info is None
    assert "ended: peer " in record.getMessage()
    assert record.getMessage().endswith(" disconnected")


async def test_handlers_own_fault_keeps_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    record = await logged(fail_in_a_group, caplog)
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    error = record.exc_info[1]
    assert isinstance(error, ExceptionGroup)
    assert error.subgroup(KeyError) is not None
    assert "the handler's own" in caplog.text


@pytest.mark.capability("named_refusals")
async def test_first_cause_is_named_before_its_flushes(caplog: pytest.LogCaptureFixture) -> None:
    peers: list[str] = []

    async def handler(connection: aiordma.Connection) -> None:
        peers.append(address_text(connection.peer_address))
        await connection.receive()
        errors = []
        requests = [connection.post_read(bytearray(8), NOWHERE) for _ in range(3)]
        for request in reversed(requests):  # a group has what was flushed first
            try:
                await request
            except aiordma.RdmaError as error:
                errors.append(error)
        raise ExceptionGroup("handler", [ExceptionGroup("flushed", errors[:2]), errors[2]])

    record = await logged(handler, caplog, stays=True)
    assert record.levelno == logging.INFO
    assert record.exc_info is None
    assert record.getMessage().startswith(f"{peers[0]} ended: RDMA_READ of 8 bytes")
    assert "IBV_WC_REM_ACCESS_ERR" in record.getMessage()
    assert "FLUSH" not in record.getMessage()


async def test_fault_without_a_text_is_named_by_its_class(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def handler(connection: aiordma.Connection) -> None:
        await connection.ended()
        raise anyio.BrokenResourceError

    record = await logged(handler, caplog)
    assert record.levelno == logging.INFO
    assert record.getMessage().endswith(" ended: BrokenResourceError")


async def test_failed_connect_of_a_handler_is_its_own(caplog: pytest.LogCaptureFixture) -> None:
    async def proxy(connection: aiordma.Connection) -> None:
        await connection.receive()
        async with aiordma.connect("backend.invalid", 7471):
            pass

    record = await logged(proxy, caplog, stays=True)
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], aiordma.AddressError)


@pytest.mark.parametrize("has_left", [False, True])
async def test_end_of_a_handlers_other_connection_is_its_own(
    has_left: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def leave(connection: aiordma.Connection) -> None:
        await connection.receive()

    async with aiordma.listen(ADDRESS, 0) as backend, anyio.create_task_group() as group:
        group.start_soon(backend.serve, leave)

        async def proxy(connection: aiordma.Connection) -> None:
            await connection.receive()
            async with aiordma.connect(ADDRESS, backend.port) as upstream:
                await upstream.send(b"go")
                if has_left:
                    await connection.ended()
                await upstream.receive()

        record = await logged(proxy, caplog, stays=not has_left)
        group.cancel_scope.cancel()
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], anyio.EndOfStream)


async def test_message_that_is_too_long_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aiordma")
    async with (
        aiordma.listen(ADDRESS, 0, receive_size=64) as listener,
        anyio.create_task_group() as group,
    ):
        group.start_soon(listener.serve, read_on)
        async with aiordma.connect(ADDRESS, listener.port, private_data=b"-") as client:
            with contextlib.suppress(aiordma.RdmaError):
                await client.send(bytes(65))
            await until(lambda: bool(_of_the_listener(caplog)))
        group.cancel_scope.cancel()
    (record,) = _of_the_listener(caplog)
    assert record.levelno == logging.WARNING
    assert "receive_size=" in record.getMessage()


async def test_handlers_wrong_local_buffer_is_its_own(caplog: pytest.LogCaptureFixture) -> None:
    async def handler(connection: aiordma.Connection) -> None:
        await connection.receive()
        error = aiordma.verbs.LocalProtectionError(4, "SEND of 8 bytes", qp_num=connection.qp_num)
        endpoint_of(connection).fail(error)
        raise error

    record = await logged(handler, caplog, stays=True)
    assert record.levelno == logging.ERROR


@pytest.mark.parametrize("anyio_backend", [each for each in LOOPS if each.id != "trio"])
async def test_serve_goes_on_after_a_handlers_own_cancellation() -> None:
    async def handler(_connection: aiordma.Connection) -> None:
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        gone.cancel()
        await gone

    async with aiordma.listen(ADDRESS, 0) as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, handler)
        for _ in range(2):
            async with aiordma.connect(ADDRESS, listener.port, timeout=5) as client:
                await client.ended()
        group.cancel_scope.cancel()


@pytest.mark.promise("Load loses nothing, and leaves nothing")
async def test_serve_keeps_nothing_of_a_closed_connection() -> None:
    kept: list[weakref.ref[object]] = []

    async def handler(connection: aiordma.Connection) -> None:
        kept.append(weakref.ref(endpoint_of(connection)))
        await connection.receive()

    async with aiordma.listen(ADDRESS, 0) as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, handler)
        async with aiordma.connect(ADDRESS, listener.port) as client:
            await client.send(b"the only message of the last peer")
        await until(lambda: bool(kept) and gc.collect() >= 0 and kept[0]() is None)
        group.cancel_scope.cancel()
