"""Nothing blocks the loop: what takes long runs in another thread, seen by which thread calls C."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import pytest

import aiordma
from tests.device.players import connected, until
from tests.devices import ADDRESS, provider_under_test
from tests.internals import (
    THREAD_LIMIT,
    close_unused_reactors,
    endpoint_of,
    has_ended,
    hub_of,
    queues_of,
)
from tests.waiting import HeldCalls

pytestmark = [pytest.mark.anyio, pytest.mark.loop_and_device, pytest.mark.one_kernel_device]

SLOW = (
    "create_cq",
    "destroy_cq",
    "cm_create_qp",
    "destroy_qp",
    "destroy_id",
    "alloc_pd",
    "dealloc_pd",
    "dereg_mr",
    "create_event_channel",
    "destroy_comp_channel",
)


@contextmanager
def calls_by_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, set[bool]]]:
    """Record of each slow call in which threads it ran: True is the loop's."""
    provider, loop = provider_under_test(), threading.get_ident()
    seen: dict[str, set[bool]] = {}

    def watch(name: str) -> None:
        call = getattr(provider, name)

        def watched(*arguments: Any) -> Any:
            seen.setdefault(name, set()).add(threading.get_ident() == loop)
            return call(*arguments)

        monkeypatch.setattr(provider, name, watched)

    with monkeypatch.context():
        for name in SLOW:
            watch(name)
        yield seen


@pytest.mark.promise("No coroutine waits for a peer or the network on the event loop's thread")
async def test_connecting_and_closing_make_and_destroy_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with calls_by_thread(monkeypatch) as seen:
        async with connected() as (client, server):
            client.register(bytearray(4096))
            await client.send(b"x")
            await server.receive()
        await close_unused_reactors()
    on_loop = not provider_under_test().blocks  # the software device's calls are short
    assert seen == {name: {on_loop} for name in SLOW}


@pytest.mark.promise("No coroutine waits for a peer or the network on the event loop's thread")
async def test_long_plain_buffers_are_registered_and_deregistered_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    length = THREAD_LIMIT + 1
    async with connected() as (client, server):
        theirs = server.register(bytearray(length), aiordma.Access.REMOTE_WRITE)
        loop = threading.get_ident()
        threads: list[int] = []
        provider = provider_under_test()
        for name in ("reg_mr", "dereg_mr"):
            call = getattr(provider, name)

            def watched(*arguments: Any, call: Any = call) -> Any:
                threads.append(threading.get_ident())
                return call(*arguments)

            monkeypatch.setattr(provider, name, watched)
        await client.write(bytes(length), theirs.remote())
        await until(lambda: len(threads) == 2)
        monkeypatch.undo()
        assert loop not in threads


async def test_completions_are_delivered_on_the_loops_thread_only() -> None:
    """Also while connections are made, which can take a new completion queue into use."""
    options = aiordma.ConnectionOptions(max_send_wr=512, receive_buffers=512, receive_size=64)
    async with (
        await aiordma.listen(ADDRESS, 0, options=options) as listener,
        connected() as (one, other),
    ):
        hub, loop = hub_of(one), threading.get_ident()
        threads: list[int] = []
        connections: list[aiordma.Connection] = []
        done = False

        async def chat() -> None:
            while not done:
                request = one.post_send(b"x")
                request.add_done_callback(lambda _: threads.append(threading.get_ident()))
                await request
                await other.receive()

        async def accept() -> None:
            for _ in range(6):
                connections.append(await listener.accept())

        async with anyio.create_task_group() as group:
            group.start_soon(chat)
            group.start_soon(accept)
            for _ in range(6):
                connections.append(await aiordma.connect(ADDRESS, listener.port, options=options))
            await until(lambda: len(connections) == 12)
            done = True
        assert len(queues_of(hub)) >= 2
        assert set(threads) == {loop}
        for connection in connections:
            await connection.aclose()


@pytest.mark.promise("No coroutine waits for a peer or the network on the event loop's thread")
async def test_other_tasks_run_while_a_connection_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A destroy that blocks in the kernel blocks no other task."""
    async with connected() as (one, other), connected() as (client, server):
        provider = provider_under_test()
        held = HeldCalls(monkeypatch, provider, "destroy_qp")
        monkeypatch.setattr(endpoint_of(client).reactor, "blocks", True)  # also natively
        async with anyio.create_task_group() as group:
            group.start_soon(client.aclose)
            await until(held.entered.is_set)
            for i in range(10):
                await one.send(b"%d" % i)
                assert await other.receive() == b"%d" % i
            assert not has_ended(client)
            held.proceed.set()
        monkeypatch.undo()
        assert has_ended(client)
        with pytest.raises(anyio.EndOfStream):
            await server.receive()
