"""rcopy of rdmacm-utils, which copies a file over rsockets: each of its two sides, with the other
side of `aiordma cp`. (The command starts slowly in the VM: tests/device/test_cp.py runs it.)"""

import os
import signal
from pathlib import Path

import pytest

from aiordma.cli.copying import FileReceiver, send_file
from aiordma.streams import connect_stream, listen_stream
from tests.devices import ADDRESS
from tests.interop.programs import free_port, running

pytestmark = pytest.mark.anyio

SIZES = [1, 4096, 1_000_001]


async def test_our_client_copies_to_a_c_server(tmp_path: Path) -> None:
    port = free_port()
    source, target = tmp_path / "source", tmp_path / "target"
    # It ends with a signal only.
    async with running("rcopy", "-p", port, status=-signal.SIGTERM) as server:
        await server.listens(port)
        for times, size in enumerate((*SIZES, 0), 1):
            source.write_bytes(os.urandom(size))
            async with connect_stream(ADDRESS, port) as stream:
                assert await send_file(stream, source, str(target)) == size
            assert target.read_bytes() == source.read_bytes()
            await server.has_written("closing...done", times)
        async with connect_stream(ADDRESS, port) as stream:
            with pytest.raises(FileNotFoundError, match="the server's reply"):
                await send_file(stream, source, "/nowhere/target")
        server.stop(signal.SIGTERM)


async def test_a_c_client_copies_to_our_server(tmp_path: Path) -> None:
    source, served = tmp_path / "source", tmp_path / "served"
    served.mkdir()
    received: list[int] = []
    receiver = FileReceiver(served, lambda _path, size: received.append(size))
    async with listen_stream(ADDRESS) as listener:
        for size in SIZES:
            source.write_bytes(os.urandom(size))
            command = ("rcopy", str(source), f"{ADDRESS}:target", "-p", listener.port)
            async with running(*command) as client, await listener.accept() as stream:
                await receiver.serve(stream)
                await client.has_written(f"{size} bytes in")
            assert (served / "target").read_bytes() == source.read_bytes()
        command = ("rcopy", str(source), f"{ADDRESS}:../target", "-p", listener.port)
        async with running(*command, status=None), await listener.accept() as stream:
            with pytest.raises(PermissionError, match="leads out of the served directory"):
                await receiver.serve(stream)
    assert received == SIZES
    assert os.listdir(served) == ["target"]
