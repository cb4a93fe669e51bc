"""Failed requests that are never awaited are reported, once for each connection."""

import asyncio
import errno
import gc
import logging
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from anyio.lowlevel import checkpoint

import aiordma
from tests.device.own_loops import OWN_LOOPS
from tests.device.players import OWN_RECEIVES, REMOTE, connected
from tests.devices import ADDRESS
from tests.internals import address_text

pytestmark = [pytest.mark.anyio, pytest.mark.one_kernel_device]

NOWHERE = aiordma.RemoteMemory(4096, 8, 1)

Report = tuple[str, BaseException | None]


@pytest.fixture
async def reports(caplog: pytest.LogCaptureFixture) -> AsyncIterator[list[Report]]:
    """What asyncio's exception handler, or trio's log, receives."""
    told: list[Report] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append((record.getMessage(), record.exc_info[1] if record.exc_info else None))

    if in_trio():
        handler = Handler(logging.ERROR)
        logging.getLogger("aiordma").addHandler(handler)
        yield told
        logging.getLogger("aiordma").removeHandler(handler)
        return
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    loop.set_exception_handler(
        lambda _, context: told.append((context["message"], context.get("exception")))
    )
    yield told
    loop.set_exception_handler(before)


def in_trio() -> bool:
    trio = sys.modules.get("trio")
    return trio is not None and trio.lowlevel.in_trio_run()


async def settle() -> None:
    """Let everything be finalized, and the loop report it."""
    gc.collect()
    for _ in range(10):
        await checkpoint()


@pytest.mark.promise("Errors that were never retrieved are reported")
@pytest.mark.capability("named_refusals")
async def test_failed_request_is_reported(reports: list[Report]) -> None:
    async with connected() as (client, _):
        peer = address_text(client.peer_address)
        client.post_read(bytearray(8), NOWHERE)
        await client.ended()
        await settle()
        ((text, error),) = reports
        assert text.startswith(f"1 work request on the connection to {peer} failed")
        assert "RDMA_READ of 8 bytes" in text
        assert isinstance(error, aiordma.RemoteAccessError)


@pytest.mark.promise("Errors that were never retrieved are reported")
@pytest.mark.capability("rnr")
async def test_sends_dropped_by_close_are_one_report(reports: list[Report]) -> None:
    async with connected(server=OWN_RECEIVES) as (client, _):
        for _ in range(5):
            client.post_send(b"nobody takes this")
        await client.aclose()
        await settle()
        ((text, error),) = reports
        assert text.startswith("5 work requests on the connection to ")
        assert text.count("SEND of 17 bytes") == 3
        assert " and 2 more. " in text
        assert isinstance(error, aiordma.FlushedError)
        assert "this side closed the connection to " in str(error)


@pytest.mark.promise("Errors that were never retrieved are reported")
@pytest.mark.parametrize("who", ["we", "the peer"])
async def test_receives_left_over_are_not_reported(reports: list[Report], who: str) -> None:
    async with connected(server=OWN_RECEIVES) as (client, server):
        for _ in range(64):
            server.post_recv(bytearray(8))
        await (server if who == "we" else client).aclose()
        await server.ended()
    await settle()
    assert reports == []


@pytest.mark.promise("Errors that were never retrieved are reported")
@pytest.mark.capability("named_refusals")
async def test_failure_flushes_into_the_same_report(reports: list[Report]) -> None:
    async with connected(client=OWN_RECEIVES) as (client, _):
        client.post_read(bytearray(8), NOWHERE)
        for _ in range(20):
            client.post_recv(bytearray(8))
        kept = client.post_recv(bytearray(8))
        await client.ended()
        await settle()
        ((text, error),) = reports
        assert text.startswith("21 work requests ")
        assert isinstance(error, aiordma.RemoteAccessError)
        del kept
        await settle()
        assert len(reports) == 1


@pytest.mark.capability("rnr")
async def test_request_that_is_kept_is_reported_when_it_goes(reports: list[Report]) -> None:
    async with connected(server=OWN_RECEIVES) as (client, _):
        kept = [client.post_send(b"nobody takes this")]
        await client.aclose()
        await settle()
        assert reports == []
        kept.clear()
        await settle()
        assert len(reports) == 1


async def test_requests_that_succeed_are_not_reported(reports: list[Report]) -> None:
    async with connected() as (client, server):
        memory = server.register(bytearray(64), REMOTE)
        for _ in range(8):
            client.post_write(b"12345678", memory.remote()[:8])
        await client.write(b"12345678", memory.remote()[:8])
    await settle()
    assert reports == []


@pytest.mark.promise("Errors that were never retrieved are reported")
@pytest.mark.parametrize("awaited", [True, False])
async def test_run_whose_last_request_fails_is_reported(
    reports: list[Report], awaited: bool
) -> None:
    """The requests before it have succeeded, and have no completions."""
    async with connected() as (client, server):
        remote = server.register(bytearray(8), REMOTE).remote()
        with client.chain(signal_last_only=True) as chain:
            for _ in range(3):
                chain.post_write(b"12345678", remote)
            chain.post_write(b"12345678", NOWHERE)
        last = chain.requests[-1]
        if awaited:
            with pytest.raises(aiordma.WorkCompletionError):
                await last
        await client.ended()
        assert [request.exception() for request in chain.requests[:-1]] == [None] * 3
        del last, chain
        await settle()
        assert len(reports) == (not awaited)


@pytest.mark.promise("Errors that were never retrieved are reported")
@pytest.mark.capability("memory_windows")
@pytest.mark.parametrize("kind", aiordma.verbs.MemoryWindowType)
@pytest.mark.parametrize("awaited", [True, False])
async def test_failed_bind_is_reported(
    reports: list[Report], kind: aiordma.verbs.MemoryWindowType, awaited: bool
) -> None:
    async with connected() as (client, _):
        region = client.register(bytearray(64), REMOTE | aiordma.Access.MW_BIND)
        window = await client.open_window(kind)
        bind = client.post_bind_window(window, region[:], REMOTE)
        bind._fail(aiordma.VerbsCallError(errno.EIO, "ibv_bind_mw"))  # before its completion
        assert not window.is_bound
        if awaited:
            with pytest.raises(aiordma.VerbsCallError):
                await bind
        del bind, window
    await settle()
    assert len(reports) == (not awaited)


@pytest.mark.promise("Errors that were never retrieved are reported")
async def test_chain_given_up_is_not_reported(reports: list[Report]) -> None:
    async with connected() as (client, _):

        def give_up() -> None:
            with client.chain() as chain:
                chain.post_send(b"one")
                chain.post_send(b"two")
                raise KeyError

        with pytest.raises(KeyError):
            give_up()
        await settle()
    await settle()
    assert reports == []


@pytest.mark.capability("rnr")
async def test_requests_in_a_cycle_are_reported(reports: list[Report]) -> None:
    async with connected(server=OWN_RECEIVES) as (client, _):
        around: list[Any] = [client.post_send(b"nobody takes this")]
        around.append(around)
        around[0].add_done_callback(lambda _, kept=around: None)
        del around
        await client.aclose()
        await settle()
        assert len(reports) == 1


async def test_shared_receives_left_over_are_not_reported(reports: list[Report]) -> None:
    async with aiordma.open_shared_receive(ADDRESS, depth=8) as shared:
        shared.post_srq_recv([bytearray(8) for _ in range(8)])
    await settle()
    assert reports == []


@pytest.mark.promise("Errors that were never retrieved are reported")
@pytest.mark.capability("rnr")
def test_closed_loop_reports_too() -> None:
    told: list[str] = []
    kept: list[Any] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(context["message"]))
        async with connected(server=OWN_RECEIVES) as (client, _):
            kept.append(client.post_send(b"nobody takes this"))

    asyncio.run(main())
    assert told == []
    kept.clear()
    gc.collect()
    (text,) = told
    assert "1 work request on the connection to " in text


@pytest.mark.promise("Errors that were never retrieved are reported")
@pytest.mark.natively
@OWN_LOOPS
@pytest.mark.parametrize("dropped", ["before", "behind", "after close"])
def test_closed_loop_reports_each_failure_once(
    new_loop: Callable[[], asyncio.AbstractEventLoop], dropped: str
) -> None:
    """The request is collected while the loop runs, behind its last run, or once it is closed."""
    told: list[str] = []
    loop, kept = new_loop(), []

    async def main() -> None:
        async with connected() as (client, _):
            kept.append(client.post_read(bytearray(8), NOWHERE))
            await client.ended()
        if dropped == "before":
            kept.clear()
        await asyncio.sleep(0.01)

    loop.set_exception_handler(lambda _, context: told.append(context["message"]))
    loop.run_until_complete(main())
    if dropped == "behind":
        kept.clear()
        gc.collect()
    loop.close()
    kept.clear()
    del loop
    gc.collect()
    (text,) = told
    assert text.startswith("1 work request on the connection to ")
