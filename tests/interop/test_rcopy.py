"""rcopy of rdmacm-utils, which copies a file over rsockets: each of its two sides, with the other
side of `aiordma cp`, and of the functions behind it."""

import os
import signal
from pathlib import Path

import pytest

from aiordma.cli.copying import FileReceiver, send_file
from aiordma.streams import listen_stream
from tests.devices import ADDRESS, DEVICE, DeviceUnderTest
from tests.forked import python
from tests.interop.programs import SECONDS, connected_to_rsockets, running
from tests.ports import free_port

pytestmark = pytest.mark.anyio

SIZES = [1, 4096, 1_000_001]
COMMAND = (*python(), "-c", "from aiordma.cli.main import main; main()", "cp")


async def test_our_client_copies_to_a_c_server(tmp_path: Path) -> None:
    port = free_port()
    source, target = tmp_path / "source", tmp_path / "target"
    # It ends with a signal only.
    async with running("rcopy", "-p", port, status=-signal.SIGTERM) as server:
        await server.listens(port)
        for times, size in enumerate((*SIZES, 0), 1):
            source.write_bytes(os.urandom(size))
            async with connected_to_rsockets(port) as stream:
                assert await send_file(stream, source, str(target)) == size
            assert target.read_bytes() == source.read_bytes()
            await server.has_written("closing...done", times)
        async with connected_to_rsockets(port) as stream:
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


@pytest.mark.capability("passive_side_first")  # as connected_to_rsockets says
async def test_the_command_copies_to_a_c_server(tmp_path: Path, device: DeviceUnderTest) -> None:
    port = free_port()
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(os.urandom(300_000))
    options = ("-p", port, "--device", DEVICE, "--timeout", 20)
    # Two clients in Python beside it, and perhaps the start of the server that forks them.
    limit = SECONDS
    async with running("rcopy", "-p", port, status=-signal.SIGTERM, within=limit) as server:
        await server.listens(port)
        copied = f"{ADDRESS}:{target}"
        async with running(*COMMAND, source, copied, *options, within=limit) as client:
            pass
        assert client.output.startswith("300000 bytes in ")
        await server.has_written("closing...done")
        assert target.read_bytes() == source.read_bytes()
        nowhere = f"{ADDRESS}:/nowhere/target"
        async with running(*COMMAND, source, nowhere, *options, status=1) as client:
            pass
        assert "aiordma cp: " in client.output
        assert "No such file or directory (the server's reply)" in client.output
        server.stop(signal.SIGTERM)


async def test_a_c_client_copies_to_the_command(tmp_path: Path) -> None:
    port = free_port()
    source, served = tmp_path / "source", tmp_path / "served"
    served.mkdir()
    source.write_bytes(os.urandom(300_000))
    options = ("--bind", ADDRESS, "-p", port, "--device", "rdma")
    async with running(*COMMAND, "--serve", served, *options, status=130) as server:
        await server.listens(port)
        async with running("rcopy", source, f"{ADDRESS}:target", "-p", port) as client:
            pass
        assert "300000 bytes in" in client.output
        await server.has_written(f"received {str(served / 'target')!r}, 300000 bytes")
        assert (served / "target").read_bytes() == source.read_bytes()
        # A client that is refused does not end the server.
        async with running("rcopy", source, f"{ADDRESS}:../target", "-p", port, status=None):
            pass
        await server.has_written("leads out of the served directory")
        async with running("rcopy", source, f"{ADDRESS}:second", "-p", port):
            pass
        await server.has_written("second")
        server.stop(signal.SIGINT)
    assert sorted(os.listdir(served)) == ["second", "target"]
