"""Chains whose end finds no memory: each request completes or fails, and nothing stays held.

One allocation fails at a time. If all of them fail, Python cannot call the end of the block at all,
and the requests end with the connection."""

import pytest

from tests.unit.child import run_child

pytest.importorskip("_testcapi")

SWEEP = """
import asyncio, contextlib, faulthandler
import _testcapi
import aiordma
from aiordma.testing import connected_pair
from tests.internals import free_sends, hub_of

faulthandler.dump_traceback_later(120, exit=True)  # what hangs fails, and says where

ADDS = {
    "plain": lambda sink: sink.post_send(b"plain"),
    "staged": lambda sink: sink.post_send(b"staged" * 500),
    "general": lambda sink: sink.post_sendv(iter([b"general"])),
}

@contextlib.contextmanager
def without_memory(number):
    _testcapi.set_nomemory(number, number + 1)
    try:
        yield
    finally:
        _testcapi.remove_mem_hooks()

async def outcomes(requests):
    found = set()
    async with asyncio.timeout(20):
        for request in requests:
            try:
                await request
                found.add("completed")
            except aiordma.RdmaError:
                found.add("failed")
    return found

async def sweep(attempt):
    seen = set()
    async with connected_pair(max_send_wr=8, receive_buffers=16) as (client, server):
        held = len(hub_of(client).in_flight), free_sends(client)
        for number in range(100):
            seen |= await outcomes(attempt(client, number))
            with contextlib.suppress(TimeoutError):
                while True:
                    async with asyncio.timeout(0.01):
                        await server.receive()
            assert (len(hub_of(client).in_flight), free_sends(client)) == held, number
            assert client.cause is None, number
    return sorted(seen)
"""


@pytest.mark.parametrize("engine", ["c", "python"])
@pytest.mark.parametrize("signal_last_only", [True, False])
@pytest.mark.parametrize("kinds", ["plain", "general", "plain general", "staged plain"])
def test_requests_of_a_chain_without_memory_end(
    kinds: str, signal_last_only: bool, engine: str
) -> None:
    printed = run_child(
        SWEEP,
        f"KINDS, LAST = {kinds.split()!r}, {signal_last_only!r}\n",
        """
        def attempt(client, number):
            chain = client.chain(signal_last_only=LAST)
            chain.__enter__()
            requests = [ADDS[kind](chain) for kind in KINDS]
            end, arguments = chain.__exit__, (None, None, None)
            with contextlib.suppress(MemoryError, SystemError), without_memory(number):
                end(*arguments)
            return requests

        print(asyncio.run(sweep(attempt)))
        """,
        AIORDMA_BACKEND=engine,
    )
    assert "completed" in printed


@pytest.mark.parametrize("engine", ["c", "python"])
@pytest.mark.parametrize("kind", ["plain", "staged", "general"])
def test_post_without_memory_keeps_no_slot(kind: str, engine: str) -> None:
    printed = run_child(
        SWEEP,
        f"""
        def attempt(client, number):
            post = ADDS[{kind!r}]
            with contextlib.suppress(MemoryError, SystemError), without_memory(number):
                return [post(client)]
            return []

        print(asyncio.run(sweep(attempt)))
        """,
        AIORDMA_BACKEND=engine,
    )
    assert "completed" in printed


@pytest.mark.parametrize("engine", ["c", "python"])
def test_requests_of_a_refused_chain_without_memory_end(engine: str) -> None:
    printed = run_child(
        SWEEP,
        """
        import errno
        from tests.bench.instant import instant, refuses
        from tests.unit.test_hot_path import connected

        async def attempt(number):
            async with connected() as (client, _, local, remote):
                with instant(client):
                    refuses(errno.EIO)
                    chain = client.chain(signal_last_only=True)
                    chain.__enter__()
                    requests = [chain.post_write(local, remote) for _ in range(2)]
                    end, arguments = chain.__exit__, (None, None, None)
                    expected = MemoryError, SystemError, aiordma.VerbsCallError
                    with contextlib.suppress(*expected), without_memory(number):
                        end(*arguments)
                found = await outcomes(requests)
                assert not local.region._users
                return found

        async def main():
            return set.union(*[await attempt(number) for number in range(70)])

        print(asyncio.run(main()))
        """,
        AIORDMA_BACKEND=engine,
    )
    assert printed == "{'failed'}\n"
