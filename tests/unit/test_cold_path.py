"""What a connection's life costs: connect, echo 64 bytes, close, both sides in one process."""

import pytest

from tests.unit.child import run_child

pytestmark = pytest.mark.natively

MOST_CALLS = 470
"""Calls of Python functions of one connection's life. They are 430 to 450, and more turns of the
loop on a busy machine. asyncio's own are a sixth."""

LIFE = """
import asyncio, sys, threading
import aiordma

CONNECTIONS = 50

async def echo(connection):
    async for message in connection:
        await connection.send(message)

async def life(port):
    async with aiordma.connect("127.0.0.1", port, device="software") as connection:
        await connection.send(bytes(64))
        await connection.receive()

async def main():
    async with aiordma.listen("127.0.0.1", 0, device="software") as listener:
        serving = asyncio.ensure_future(listener.serve(echo))
        for _ in range(5):
            await life(listener.port)
        calls, before = [0], threading.active_count()

        def count(_frame, event, _argument):
            calls[0] += event == "call"

        threading.setprofile(count)
        sys.setprofile(count)
        for _ in range(CONNECTIONS):
            await life(listener.port)
        sys.setprofile(None)
        threading.setprofile(None)
        serving.cancel()
        await asyncio.wait([serving])
        print(calls[0] / CONNECTIONS, threading.active_count() - before)

asyncio.run(main())
"""


def test_a_connections_life_takes_few_calls_of_python_and_no_thread() -> None:
    calls, threads = run_child(LIFE).split()
    assert float(calls) <= MOST_CALLS
    assert threads == "0"
