"""Records what C programs on rsockets send to streams, for tests/unit/test_stream_vectors.py.

    make vm PROVIDER=rxe CMD='AIORDMA_TEST_DEVICE=rxe0 python -m tests.interop.record_streams'

(siw: PROVIDER=siw, siw0.) Each exchange becomes a file below `streams` in the folder of the results
($AIORDMA_RESULTS). Copy the files to tests/unit/vectors.

A file has one JSON value on each line. The first describes the exchange and this side. The others
are events in their order, an input of the data path or what it posted:

    ["start", private data of the peer]     ["begin", whether this side has connected]
    ["arrived", immediate or word, byte_len, table of grants; "": only zeros]
    ["completed", requests]                 the oldest posted requests have completed
    ["write", bytes given, bytes taken]     ["read", bytes asked for, bytes returned]
    ["close_write", whether both directions are closed]
    ["data", address, rkey, bytes, immediate]
    ["grant", address, rkey, offset in our ring, bytes, immediate]
    ["control", immediate]
    ["end", readable, at_eof, peer_disconnected]
"""

import asyncio
import json
import os
import struct
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiordma import Connection, RemoteMemory, WorkRequest
from aiordma.cli.copying import FileReceiver
from aiordma.streams import Stream, connect_stream, listen_stream, settings
from aiordma.streams.path import Memory
from aiordma.streams.rsocket import Rsocket
from aiordma.verbs.memory import MemorySlice
from tests.devices import ADDRESS, DEVICE
from tests.fuzz.model_path import ModelPath
from tests.fuzz.model_protocol import Operation, operation_of
from tests.interop.programs import running
from tests.interop.test_rspreload import LIBRARY, SCRIPT
from tests.interop.test_rstream import answer, ask, work
from tests.ports import free_port

BUFFER, DEPTH = 4096, 16
"""Of this side: the least that a stream can have, so that short exchanges fill it."""

events: list[list[Any]] = []
facts: dict[str, Any] = {}


class RecordedPath(ModelPath):
    """Writes down what goes in and comes out."""

    def __init__(self, connection: Connection, memory: Memory) -> None:
        super().__init__(connection, memory)
        self._depth = 0  # of calls
        facts.update(
            ring=memory.ring_bytes,
            max_recv_wr=connection.options.max_recv_wr,
            max_send_wr=connection.options.max_send_wr,
            uses_words=self.uses_words,
        )

    def begin(self, may_send: bool, /) -> None:
        events.append(["begin", may_send])
        super().begin(may_send)

    def _arrived(self, request: WorkRequest) -> None:
        if request.exception() is None:
            done = request.result()
            word = bytes(self._words[self._next_word])
            value = int.from_bytes(word, sys.byteorder) if self.uses_words else done.immediate
            table = bytes(self._table_view)
            events.append(["arrived", value, done.byte_len, table.hex() if any(table) else ""])
        super()._arrived(request)

    def _post(
        self,
        memory: MemorySlice | None,
        target: RemoteMemory,
        immediate: int,
        sent: Callable[[WorkRequest], None],
    ) -> bool:
        if memory is None:
            events.append(["control", immediate])
        elif operation_of(immediate)[0] is Operation.DATA:
            events.append(["data", target.address, target.rkey, target.length, immediate])
        else:
            address, rkey, length = struct.unpack("=QII", bytes(memory))
            assert rkey == self._remote_ring.rkey
            offset = address - self._remote_ring.address
            events.append(["grant", target.address, target.rkey, offset, length, immediate])
        return super()._post(memory, target, immediate, sent)

    def _data_sent(self, request: WorkRequest) -> None:
        self._note_completion(request, self._slots_of_data)
        super()._data_sent(request)

    def _control_done(self, request: WorkRequest, slots: int) -> None:
        self._note_completion(request, slots)
        super()._control_done(request, slots)

    def _note_completion(self, request: WorkRequest, requests: int) -> None:
        if request.exception() is None:
            events.append(["completed", requests])

    def read(self, limit: int, /) -> bytes:
        if self._depth:
            return super().read(limit)
        event = ["read", limit, 0]
        events.append(event)
        self._depth += 1
        data = super().read(limit)
        self._depth -= 1
        event[2] = len(data)
        return data

    def read_into(self, buffer: memoryview, /) -> int:
        event = ["read", len(buffer), 0]
        events.append(event)
        event[2] = done = super().read_into(buffer)
        return done

    def write(self, data: bytes | memoryview, /) -> int:
        event = ["write", len(data), 0]
        events.append(event)
        event[2] = done = super().write(data)
        return done

    def close_write(self, both: bool, /) -> None:
        events.append(["close_write", both])
        super().close_write(both)


class RecordedRsocket(Rsocket):
    """An rsocket whose start is recorded."""

    def start(self, private_data: bytes) -> None:
        events.append(["start", private_data.hex()])
        super().start(private_data)


# -- the exchanges --------------------------------------------------------------------------------


async def serve(talk: Callable[[Stream], Awaitable[object]], *command: str | int) -> None:
    """Be the listener of a C client; PORT stands for the port in its arguments."""
    async with listen_stream(ADDRESS, buffer_size=BUFFER, queue_depth=DEPTH) as listener:
        words = [listener.port if each == "PORT" else each for each in command]
        async with running(*words, status=None), await listener.accept() as stream:
            await talk(stream)
            note_end(stream)


def note_end(stream: Stream) -> None:
    path = stream._path
    events.append(["end", path.readable, path.at_eof, path.peer_disconnected])


async def read_to_end(stream: Stream) -> None:
    async for _ in stream:
        pass


async def echo(stream: Stream) -> None:
    async for data in stream:
        await stream.send(data)
    await stream.send_eof()


async def short_messages() -> None:
    """More messages than each side's credits, of one byte."""
    await serve(
        lambda stream: answer(stream, 1, 1, 200), "rstream", "-s", ADDRESS, "-p", "PORT",
        *work(1, 1, 200),
    )  # fmt: skip


async def small_rings() -> None:
    """More bytes than each side's ring."""
    await serve(
        lambda stream: answer(stream, 3000, 2, 4), "rstream", "-s", ADDRESS, "-p", "PORT",
        *work(3000, 2, 4, "-B", "5000"),
    )  # fmt: skip


async def c_server() -> None:
    """This side connects."""
    port = free_port()
    command = ("rstream", "-b", ADDRESS, "-p", port, *work(3000, 2, 4, "-B", "5000"))
    async with running(*command, status=None) as server:
        await server.listens(port)
        async with connect_stream(ADDRESS, port, buffer_size=BUFFER, queue_depth=DEPTH) as stream:
            await ask(stream, 3000, 2, 4)
            await read_to_end(stream)
            note_end(stream)


async def copied_file() -> None:
    """rcopy sends a file."""
    with tempfile.TemporaryDirectory() as folder:
        source, served = Path(folder, "source"), Path(folder)
        source.write_bytes(bytes(range(256)) * 40)  # noqa: ASYNC240  # nothing else runs yet
        receiver = FileReceiver(served, lambda _path, _size: None)
        await serve(receiver.serve, "rcopy", str(source), f"{ADDRESS}:target", "-p", "PORT")


async def preloaded_client() -> None:
    """A Python program under librspreload, which ends its data, and then closes."""
    await serve(
        echo, "env", f"LD_PRELOAD={LIBRARY}", sys.executable, SCRIPT, "client", ADDRESS, "PORT",
        10_000,
    )  # fmt: skip


async def mapping_client() -> None:
    """riostream wants to map memory, which this side does not offer: it disconnects."""
    await serve(read_to_end, "riostream", "-s", ADDRESS, "-p", "PORT", "-S", 1000, "-I", 1, "-C", 1)


EXCHANGES = (
    short_messages,
    small_rings,
    c_server,
    copied_file,
    preloaded_client,
    mapping_client,
)


def main() -> int:
    vars(settings).update(Rsocket=RecordedRsocket, stream_path=RecordedPath)
    folder = Path(os.environ["AIORDMA_RESULTS"], "streams")
    folder.mkdir(parents=True, exist_ok=True)
    for exchange in EXCHANGES:
        events.clear()
        facts.clear()
        asyncio.run(exchange())
        device = DEVICE.rstrip("0123456789")
        title = {"exchange": exchange.__doc__, "device": device, "library": "rdma-core 44", **facts}
        lines = [json.dumps(each, separators=(",", ":")) for each in (title, *events)]
        name = f"{exchange.__name__.replace('_', '-')}-{device}.jsonl"
        folder.joinpath(name).write_text("\n".join(lines) + "\n")
        print(f"{name}: {len(events)} events")
    return 0


sys.exit(main())
