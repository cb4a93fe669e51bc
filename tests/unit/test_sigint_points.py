"""SIGINT at random points of connect, send and close under asyncio's Runner: the first one cancels
the main task, everything closes, and nothing is left."""

import pytest

from tests.unit.child import RUN, run_child

pytestmark = [pytest.mark.natively, pytest.mark.slow]

POINTS = """
import asyncio, gc, logging, random, signal, sys, time
import aiordma
from aiordma.testing import software_objects

loop, count, seed = {loop!r}, {count}, {seed}
if loop == "uvloop":
    import uvloop
factory = {{"asyncio": None, "uvloop": loop == "uvloop" and uvloop.new_event_loop,
           "polling": aiordma.new_event_loop}}[loop]
lines = []
logging.getLogger("aiordma").addHandler(handler := logging.Handler(logging.WARNING))
handler.emit = lambda record: lines.append(record.getMessage())

async def echo(connection):
    async for message in connection:
        await connection.send(message)

async def main():
    global inside
    inside = True
    try:
        await connect_send_and_close()
    finally:
        inside = False  # Runner raises a later one anywhere

async def connect_send_and_close():
    async with aiordma.listen("127.0.0.1", 0, device="software") as listener:
        serving = asyncio.ensure_future(listener.serve(echo))
        for _ in range(2):
            async with aiordma.connect("127.0.0.1", listener.port, device="software") as client:
                await client.send(b"hello")
                assert await client.receive() == b"hello"
        serving.cancel()
        await asyncio.wait([serving])

inside = False

def strike(*_):
    if inside:
        signal.raise_signal(signal.SIGINT)

def once():
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())

def taken():
    begun = time.perf_counter()
    once()
    return time.perf_counter() - begun

once()
longest = taken()  # of a run that nothing has delayed, as far as is known
signal.signal(signal.SIGALRM, strike)
moments, interrupted = random.Random(seed), 0
for _ in range(count):
    signal.setitimer(signal.ITIMER_REAL, max(moments.uniform(0, longest * 1.2), 1e-6))
    try:
        longest = min(longest, taken())
    except KeyboardInterrupt:
        interrupted += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
gc.collect()
left = software_objects()
del left["sockets"]  # of streams that say their end for two seconds more
del left["contexts"]  # the connection manager's own stays
assert not any(left.values()), left
assert not lines, lines
assert interrupted > count // 4, interrupted
print(interrupted)
"""


@pytest.mark.promise("SIGINT ends a program as the event loop says")
@pytest.mark.parametrize(("loop", "count"), [("asyncio", 1000), ("uvloop", 250), ("polling", 250)])
def test_sigint_at_random_points_closes_everything(loop: str, count: int) -> None:
    run_child(POINTS.format(loop=loop, count=count, seed=20261127))


SECOND = """
import os, signal, threading, time
from aiordma import streams

async def hold(connection):
    await asyncio.sleep(1000)  # receives nothing

async def accepted(reader, writer):
    await asyncio.sleep(1000)  # reads nothing

async def main():
    global interrupted
    async with (
        aiordma.listen("127.0.0.1", 0, device="software") as listener,
        await streams.start_server(accepted, "127.0.0.1", 0, device="software") as server,
    ):
        serving = asyncio.ensure_future(listener.serve(hold))
        client = await aiordma.connect("127.0.0.1", listener.port, device="software")
        requests = [client.post_send(bytes(1000)) for _ in range(8)]
        host, port = server.sockets[0].getsockname()[:2]
        reader, writer = await streams.open_connection(host, port, device="software")
        writer.write(bytes(64 << 20))  # most of it waits for the reader
        try:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(1000)
        finally:
            asyncio.get_running_loop().call_later(0.1, second)
            await asyncio.sleep(1000)  # the program's end is slow: its user tries again

def second():
    global interrupted
    interrupted = time.monotonic()
    signal.raise_signal(signal.SIGINT)

try:
    run({loop!r}, main)
except KeyboardInterrupt:
    print(time.monotonic() - interrupted)
"""

A_SECOND = 3.0
"""On a machine that is three times slower."""


@pytest.mark.promise("SIGINT ends a program as the event loop says")
@pytest.mark.parametrize("loop", ["asyncio", "uvloop", "polling"])
def test_second_sigint_ends_the_program_in_a_second(loop: str) -> None:
    """Requests that no peer receives, and a backlog that no peer reads, do not hold up the end."""
    assert float(run_child(RUN, SECOND.format(loop=loop)).split()[-1]) < A_SECOND
