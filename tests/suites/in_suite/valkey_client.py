"""A pytest plugin for valkey-py's suite: a real server, and connections over RDMA in the place of
those over TCP, so that the tests run unchanged.

Environment: AIORDMA_SUITE_LOOP ("ours" or "stock"). The server is one of TCP. For connections over
RDMA, a bridge (tests/valkey/server.py) stands before it on the software device.
"""

import asyncio
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from aiordma.integrations.valkey import open_connection
from aiordma.integrations.valkey.channel import ValkeyChannel

HOST = "127.0.0.1"
ROOT = Path(__file__).parents[3]


def _free_port() -> int:
    """Some of the tests have Valkey's own port in them: that one, if it is free."""
    for port in (6379, 0):
        with suppress(OSError), socket.create_server((HOST, port)) as listener:
            found: int = listener.getsockname()[1]
            return found
    raise OSError("no port is free")


def _substitute(tcp: int, rdma: int) -> None:
    """Connect over RDMA to the server that the tests know by its TCP port."""
    from valkey.asyncio.connection import Connection, SSLConnection

    from .report import count

    over_tcp = Connection._connect

    async def connect(self: Any) -> None:
        if isinstance(self, SSLConnection) or self.port != tcp:
            await over_tcp(self)  # type: ignore[no-untyped-call]
            return
        count("comms")
        async with asyncio.timeout(self.socket_connect_timeout):
            self._reader, self._writer = await open_connection(HOST, rdma, timeout=None)

    write = ValkeyChannel.write

    def write_counted(self: Any, data: Any) -> int:
        length = write(self, data)
        count("bytes", length)
        return length

    patched: Any = Connection
    patched._connect = connect
    patched = ValkeyChannel
    patched.write = write_counted


def pytest_configure(config: pytest.Config) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    tcp = _free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.valkey.server", "0", str(tcp)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )

    def stop() -> None:
        server.terminate()
        server.wait()

    config.add_cleanup(stop)
    assert server.stdout is not None
    rdma = int(server.stdout.readline().split()[-1])
    config.option.valkey_url = f"valkey://{HOST}:{tcp}/9"
    if os.environ["AIORDMA_SUITE_LOOP"] == "ours":
        _substitute(tcp, rdma)
