"""A listener in an event loop that computes: a handshake takes few of the loop's turns."""

import threading
import time
from contextlib import AsyncExitStack

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

import aiordma
from tests.device.players import one_loop
from tests.devices import ADDRESS, BUILT_IN

pytestmark = pytest.mark.anyio

TURN = 0.5
"""Seconds for which the listener's loop computes without a pause."""
MOST_TURNS = 3 if BUILT_IN else 4
"""A driver that blocks creates in a worker, whose result takes one more."""
CONNECTS = 3


@pytest.mark.promise("A listener's peers do not hold each other up")
@one_loop
async def test_a_handshake_takes_few_turns_of_a_loop_that_computes() -> None:
    """The client is in another thread. It counts the turns in which its connect waited."""
    turns = 0
    done = threading.Event()
    waited: list[int] = []

    def client(port: int) -> None:
        async def connect() -> None:
            async with AsyncExitStack() as stack:  # the end of one can take a turn of another's
                for _ in range(CONNECTS):
                    before = turns
                    await stack.enter_async_context(aiordma.connect(ADDRESS, port))
                    waited.append(turns - before)

        try:
            anyio.run(connect)
        finally:
            done.set()

    async def serve(connection: aiordma.Connection) -> None:
        async for _ in connection:
            pass

    async with (
        aiordma.listen(ADDRESS, 0) as listener,
        anyio.create_task_group() as group,
    ):
        group.start_soon(listener.serve, serve)
        async with aiordma.connect(ADDRESS, listener.port) as connection:
            await connection.send(b"what is shared is open")
        group.start_soon(anyio.to_thread.run_sync, client, listener.port)
        while not done.is_set():
            end = time.monotonic() + TURN
            while time.monotonic() < end:
                pass
            turns += 1
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    assert len(waited) == CONNECTS
    # A kernel that is busy answers late, and turns pass meanwhile: the best shows what we need.
    assert min(waited) <= MOST_TURNS, waited
