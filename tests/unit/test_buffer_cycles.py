"""The garbage collector takes apart what a failed call leaves behind: an exception that is kept,
its traceback, their frames, and the buffers in them. CPython crashes where a memoryview in such a
cycle has an export that lasts: aiordma makes none."""

import array
import mmap
from typing import Any

import numpy
import pytest

from aiordma.verbs.buffers import flat_view
from tests.unit.child import RUN, run_child

pytestmark = pytest.mark.slow

CYCLES = """
import array, asyncio, gc, mmap, sys
import numpy
import anyio
import aiordma
from tests.internals import endpoint_of

LENGTH = 48  # short enough to go inline

def sources():
    # A function for each kind of buffer, of LENGTH bytes each.
    raw = bytes(range(LENGTH))
    structured = numpy.dtype([("a", "<u4"), ("b", ">u2"), ("c", "u1"), ("d", "u1")])
    mapped = mmap.mmap(-1, 4096)
    return {
        "bytes": lambda: bytes(raw),
        "bytearray": lambda: bytearray(raw),
        "array": lambda: array.array("I", raw),
        "numpy": lambda: numpy.frombuffer(bytearray(raw), numpy.uint8).copy(),
        "structured": lambda: numpy.zeros(LENGTH // 8, structured),
        "fortran": lambda: numpy.zeros((6, 8), numpy.uint8, order="F"),
        "memoryview of bytes": lambda: memoryview(bytes(raw)),
        "memoryview": lambda: memoryview(bytearray(raw)),
        "sliced memoryview": lambda: memoryview(bytearray(raw * 3))[LENGTH : 2 * LENGTH],
        "cast memoryview": lambda: memoryview(bytearray(raw)).cast("I"),
        "shaped memoryview": lambda: memoryview(bytearray(raw)).cast("B", (6, 8)),
        "memoryview of array": lambda: memoryview(array.array("I", raw)),
        "memoryview of structured": lambda: numpy.zeros(LENGTH // 8, structured).data,
        "slice of structured": lambda: numpy.zeros(LENGTH // 4, structured).data[:6],
        "memoryview of fortran": lambda: numpy.zeros((6, 8), numpy.uint8, order="F").data,
        "memoryview of mmap": lambda: memoryview(mapped)[:LENGTH],
        "memoryview of pickle buffer": lambda: memoryview(aiordma.verbs.buffers.PickleBuffer(raw)),
    }

async def keep(call, data):
    # What a program does: it logs an exception, and forgets to delete it.
    kept = data
    try:
        await call(data)
    except Exception as error:
        kept_error = error
        raise_again = error.__traceback__
        me = sys._getframe()
        cycle = [kept_error, me, kept, raise_again]
        cycle.append(cycle)
        if hasattr(error, "attached"):
            error.attached = cycle
    return None

async def posted(make):
    make()
    raise RuntimeError("what goes wrong behind it")

def collect():
    gc.collect()
    gc.collect()

gc.collect()
gc.freeze()  # what is there by now: a collection need not look through it
"""

CALLS = """
def calls(client, server, remote, region):
    async def late(call):
        with anyio.fail_after(0):
            await call

    async def with_chain(data):
        with client.chain() as chain:
            chain.post_send(data)
            chain.post_sendv([data])
            raise RuntimeError("the block ends so")

    async def received(data):
        request = client.post_recv(bytearray(64) if flat(data).readonly else data)
        with anyio.fail_after(0):
            await request

    def full(post):
        slots = endpoint_of(client).work.sends.slots
        free, slots.free = slots.free, 0
        try:
            post()  # which raises in the middle
        finally:
            slots.free = free

    def flat(data):
        return memoryview(data)

    wrong = aiordma.RemoteMemory(remote.address, remote.length, remote.rkey)[:8]
    return {
        "send": lambda data: late(client.send(data)),
        "send immediate": lambda data: late(client.send(data, immediate=1)),
        "sendv": lambda data: late(client.sendv([data])),
        "sendv of two": lambda data: late(client.sendv([data[:8], data[8:]])),
        "post_send": lambda data: posted(lambda: client.post_send(data)),
        "post_sendv": lambda data: posted(lambda: client.post_sendv([data])),
        "write": lambda data: late(client.write(data, remote)),
        "write immediate": lambda data: late(client.write(data, remote, immediate=1)),
        "writev": lambda data: late(client.writev([data], remote)),
        "refused write": lambda data: client.write(data, wrong),
        "refused writev": lambda data: client.writev([data], wrong),
        "read": lambda data: late(client.read(data, remote)),
        "readv": lambda data: late(client.readv([data], remote)),
        "refused read": lambda data: client.read(data, wrong),
        "refused sendv": lambda data: posted(lambda: full(lambda: client.post_sendv([data]))),
        "register": lambda data: posted(lambda: region(data)),
        "chain": with_chain,
        "receive": received,
    }

async def main():
    sizes = aiordma.ConnectionOptions(receive_buffers=0, max_send_wr=512, max_recv_wr=512)
    options = dict(device="software", options=sizes)
    async with await aiordma.listen("127.0.0.1", 0, **options) as listener:
        accepting = asyncio.ensure_future(listener.accept())
        client = await aiordma.connect("127.0.0.1", listener.port, **options)
        server = await accepting
        for _ in range(400):
            server.post_recv(bytearray(64))
        remote = server.register(
            bytearray(LENGTH), aiordma.Access.REMOTE_READ | aiordma.Access.REMOTE_WRITE
        ).remote()
        await client.write(b"x" * LENGTH, remote)
        for call in calls(client, server, remote, client.register).values():
            for kind, make in sources().items():
                try:
                    await keep(call, make())
                except (TypeError, ValueError, IndexError, NotImplementedError):
                    pass  # read-only, or not to be sliced so
                collect()
                await anyio.sleep(0)
                collect()
        await client.aclose()
        await server.aclose()
    collect()
"""

DATAGRAMS = """
async def main():
    sizes = aiordma.ConnectionOptions(receive_buffers=0, max_send_wr=512, max_recv_wr=512)
    options = dict(device="software", options=sizes)
    async with await aiordma.open_datagram("127.0.0.1", **options) as socket:
        peer = await socket.resolve("127.0.0.1", socket.port)

        async def late(call):
            with anyio.fail_after(0):
                await call

        def full(socket, data, peer):
            slots = endpoint_of(socket).work.sends.slots
            free, slots.free = slots.free, 0
            try:
                socket.post_ud_send(data, peer)  # which raises in the middle
            finally:
                slots.free = free

        calls = {
            "send": lambda data: late(socket.send(data, peer)),
            "send immediate": lambda data: late(socket.send(data, peer, immediate=1)),
            "sendv": lambda data: late(socket.sendv([data], peer)),
            "refused post": lambda data: posted(lambda: full(socket, data, peer)),
            "post_ud_send": lambda data: posted(lambda: socket.post_ud_send(data, peer)),
            "post_recv": lambda data: posted(lambda: socket.post_recv(memoryview(bytearray(8192)))),
        }
        for call in calls.values():
            for make in sources().values():
                await keep(call, make())
                collect()
                await anyio.sleep(0)
                collect()
    collect()
"""


@pytest.mark.promise("A buffer is held until its request completes")
def test_cycles_with_the_buffers_of_connections_are_collected() -> None:
    run_child(CYCLES, CALLS, "\nasyncio.run(main())\n", PYTHONWARNINGS="ignore")


@pytest.mark.promise("A buffer is held until its request completes")
def test_cycles_with_the_buffers_of_datagrams_are_collected() -> None:
    run_child(CYCLES, DATAGRAMS, "\nasyncio.run(main())\n", PYTHONWARNINGS="ignore")


STREAMS = """
import time
from aiordma import streams
from aiordma.streams.path import Memory
from tests.internals import endpoint_of

rings = weakref.WeakSet()

class Counted(Memory):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        rings.add(self)

streams.rsocket.Memory = Counted

async def use_streams(end):
    async with streams.listen_stream("127.0.0.1") as listener, anyio.create_task_group() as group:

        async def serve():
            stream = await listener.accept()
            async with stream:
                await stream.send(await stream.receive())
                with suppress(anyio.EndOfStream, aiordma.DisconnectedError):
                    await stream.receive()

        group.start_soon(serve)
        client = await streams.connect_stream("127.0.0.1", listener.port)
        await client.send(b"hello")
        assert await client.receive() == b"hello"
        if end == "fail":
            client._rsocket.fail(aiordma.DisconnectedError("a failure"))
        await client.aclose()

class Echo(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.transport.write(data)

async def use_transports(end):
    async with await streams.create_server(Echo, "127.0.0.1", 0) as server:
        reader, writer = await streams.open_connection(*server.sockets[0].getsockname())
        writer.write(bytes(1000))
        await reader.readexactly(1000)
        getattr(writer.transport, end)()

async def main(use, *ends):
    for end in ends:
        await use(end)
        until = time.monotonic() + 5
        while rings and time.monotonic() < until:
            await anyio.sleep(0.01)
        assert not rings, (use.__name__, end)
"""


@pytest.mark.promise("Closing leaves nothing open")
@pytest.mark.parametrize("loop", ["asyncio", "uvloop", "polling", "trio"])
def test_rings_of_a_closed_stream_need_no_collection(loop: str) -> None:
    run_child(
        """
        import anyio, gc, weakref
        from contextlib import suppress
        from functools import partial
        """,
        RUN,
        STREAMS,
        f"""
        gc.collect()
        gc.disable()
        run({loop!r}, partial(main, use_streams, "close", "fail"))
        if {loop!r} != "trio":
            run({loop!r}, partial(main, use_transports, "close", "abort"))
        """,
    )


def test_a_view_that_is_kept_exports_no_memoryview() -> None:
    """The cycle alone, without a device: a buffer of each kind, and the view made of it."""
    run_child(
        CYCLES,
        """
        from aiordma.verbs.buffers import flat_view
        for kind, make in sources().items():
            for _ in range(20):
                data = make()
                cycle = [flat_view(data), data]
                cycle.append(cycle)
                del data, cycle
                collect()
        """,
    )


VIEWS: dict[str, Any] = {
    "bytes": memoryview(b"12345678"),
    "writable": memoryview(bytearray(b"12345678")),
    "slice": memoryview(bytearray(b"12345678"))[2:6],
    "read-only": memoryview(bytearray(b"12345678")).toreadonly(),
    "read-only slice of structures": numpy.zeros(4, "<u4,>u2").data.toreadonly()[1:3],
    "structures": numpy.arange(8, dtype=">u4").data,
    "fortran": numpy.arange(48, dtype=numpy.uint8).reshape(6, 8, order="F").data,
    "no dimension": numpy.array(7, dtype=">u4").data,
    "array": memoryview(array.array("d", [1.0, 2.0])),
    "mmap": memoryview(mmap.mmap(-1, 4096)),
    "empty": memoryview(b""),
    "empty, writable": memoryview(bytearray(8))[4:4],
    "empty, of structures": numpy.zeros(4, "<u4,>u2").data[2:2],
}


@pytest.mark.parametrize("kind", VIEWS)
def test_a_flat_view_is_the_memory_itself(kind: str) -> None:
    view = VIEWS[kind]
    flat = flat_view(view)
    assert (flat.format, flat.ndim, flat.nbytes) == ("B", 1, view.nbytes)
    assert flat.readonly == view.readonly
    assert flat.tobytes() == view.tobytes("A")
    if not flat.readonly and flat.nbytes:
        flat[0] ^= 255
        assert flat.tobytes() == view.tobytes("A")


@pytest.mark.parametrize("kind", ["stepped", "stepped structures"])
def test_a_view_with_gaps_is_refused(kind: str) -> None:
    whole = memoryview(bytearray(8)) if kind == "stepped" else numpy.zeros(8, "<u4,>u2").data
    with pytest.raises(ValueError, match="not contiguous"):
        flat_view(whole[::2])


def test_a_released_view_is_refused() -> None:
    view = memoryview(b"1234")
    view.release()
    with pytest.raises(ValueError, match="released"):
        flat_view(view)
