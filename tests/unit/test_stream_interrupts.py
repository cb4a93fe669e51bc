"""SIGINT while a stream or its asyncio transport changes its state: no byte is lost or repeated."""

from tests.unit.child import run_child

WALK = """
import asyncio, faulthandler, gc, os, signal, sys
from functools import partial
from aiordma import streams

FOLDER = os.path.dirname(streams.__file__) + os.sep
OPTIONS = {"device": "software", "buffer_size": 4096, "queue_depth": 16}
faulthandler.dump_traceback_later(250, exit=True)

def lines_of(function, on_line):
    def trace_lines(frame, event, _):
        if event == "line":
            on_line((frame.f_code.co_filename, frame.f_lineno))
        return trace_lines
    def trace(frame, event, _):
        return trace_lines if frame.f_code.co_filename.startswith(FOLDER) else None
    sys.settrace(trace)
    try:
        return function()
    finally:
        sys.settrace(None)

def walk(attempt, stride):
    lines = {}
    attempt(lines.setdefault)
    assert len(lines) > 50, len(lines)
    reached = 0
    for target in list(lines)[::stride]:
        sent = []
        def on_line(line):
            if line == target and not sent:
                sent.append(line)
                signal.raise_signal(signal.SIGINT)
        print(target, file=sys.stderr, flush=True)
        attempt(on_line)
        reached += bool(sent)
    assert reached >= len(lines) / stride / 2, (reached, len(lines))
"""

GOING_ON = """
def run_through(loop, main):
    # As a program that goes on after an interrupt.
    task = loop.create_task(main)
    while not task.done():
        try:
            loop.run_until_complete(task)
        except KeyboardInterrupt:
            pass
        except RuntimeError as error:
            # The interrupt came between the end of the task before and asyncio's own stop, which
            # then stops this run.
            assert "Event loop stopped before Future completed" in str(error)
    return task.result()
"""

TRANSPORTS = """
class Echo(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
    def data_received(self, data):
        self.transport.write(data)

class Client(Echo):
    def __init__(self):
        self.data, self.ended = b"", None
    def data_received(self, data):
        self.data += data
    def connection_lost(self, error):
        self.ended = (error,)

async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)

def attempt(on_line):
    loop = asyncio.new_event_loop()
    run = partial(run_through, loop)
    async def start():
        server = await streams.create_server(Echo, "127.0.0.1", 0, **OPTIONS)
        address = server.sockets[0].getsockname()
        _, client = await streams.create_connection(Client, *address, **OPTIONS)
        return server, client
    server, client = run(start())
    data = bytes(range(256)) * 40
    def exchange():
        for start in range(0, len(data), 3000):
            loop.call_soon(client.transport.write, data[start:start + 3000])
        loop.call_soon(client.transport.write_eof)
        run(until(lambda: client.ended is not None))
    lines_of(exchange, on_line)
    assert client.data == data, (len(client.data), len(data))
    assert client.ended == (None,), client.ended
    server.close()
    run(server.wait_closed())
    loop.close()
"""


STREAMS = """
async def echo(listener):
    async with await listener.accept() as stream:
        async for data in stream:
            await stream.send(data)

async def start():
    listener = await streams.listen_stream("127.0.0.1", 0, **OPTIONS)
    echoing = asyncio.create_task(echo(listener))
    client = await streams.connect_stream("127.0.0.1", listener.port, **OPTIONS)
    return listener, echoing, client

async def exchange(client, data, received):
    async def receive():
        async for part in client:
            received.append(part)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(receive())
        for start in range(0, len(data), 3000):
            await client.send(data[start:start + 3000])
        await client.send_eof()
    await client.aclose()

def attempt(on_line):
    loop = asyncio.new_event_loop()
    run = partial(run_through, loop)
    listener, echoing, client = run(start())
    data, received = bytes(range(256)) * 40, []
    lines_of(lambda: run(exchange(client, data, received)), on_line)
    assert b"".join(received) == data
    async def wait():
        await echoing
        await listener.aclose()
    run(wait())
    loop.close()
"""


def test_interrupted_transports_lose_no_byte() -> None:
    run_child(WALK, GOING_ON, TRANSPORTS, "walk(attempt, stride=5)\n")


def test_interrupted_streams_lose_no_byte() -> None:
    run_child(WALK, GOING_ON, STREAMS, "walk(attempt, stride=5)\n")
