"""A project that has installed aiordma, and tests its services with the pytest plugin."""

import os
import subprocess
from pathlib import Path

from tests.forked import python

__all__ = ("ALL_FIXTURES", "run")

QUIET = ("-p", "no:cacheprovider", "-q", "--tb=line")

ALL_FIXTURES = """
import anyio, pytest, aiordma

{marks}
async def test_pair(rdma_pair):
    async with rdma_pair(receive_buffers=4) as (client, server):
        await client.send(b"x")
        assert await server.receive() == b"x"

{marks}
async def test_streams(rdma_stream_pair):
    async with rdma_stream_pair() as (client, server):
        await client.send(b"abc")
        assert await server.receive() == b"abc"

{marks}
async def test_fabric(rdma_fabric):
    async with rdma_fabric(3) as fabric:
        await fabric[0, 2].send(b"to 2")
        assert await fabric[2, 0].receive() == b"to 2"
        assert len(fabric) == 3 and set(fabric.of(1)) == {{0, 2}}

async def echo(connection):
    async for message in connection:
        await connection.send(message)

{marks}
async def test_service(rdma_listener, rdma_address, rdma_device):
    async with rdma_listener(echo) as listener:
        # As a program connects that says nothing of a device.
        async with await aiordma.connect(rdma_address, listener.port) as connection:
            assert rdma_device in repr(connection)
            await connection.send(b"y")
            assert await connection.receive() == b"y"

{marks}
async def test_faults(rdma_pair, rdma_faults):
    async with rdma_pair() as (client, server):
        fault = rdma_faults.drop_connection(after_bytes=1000)
        with pytest.raises(aiordma.RdmaError):
            for _ in range(100):
                await client.send(bytes(64))
                await server.receive()
        assert fault.struck == 1
"""


def run(folder: Path, source: str, *words: str, settings: str = "") -> str:
    """Run pytest in a project of its own; returns what it prints."""
    (folder / "test_it.py").write_text(source)
    (folder / "pytest.ini").write_text(f"[pytest]\n{settings}\n")
    environment = {key: os.environ[key] for key in os.environ if key != "AIORDMA_DEVICE"}
    done = subprocess.run(
        [*python(), "-m", "pytest", *QUIET, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=140,
    )
    return done.stdout + done.stderr
