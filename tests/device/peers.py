"""Peers in processes of their own, to stop or to kill."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import anyio

from tests.devices import ADDRESS
from tests.forked import python

__all__ = ("Peer", "peer_process")


@dataclass
class Peer:
    """A process that accepts connections."""

    port: int
    pid: int

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process itself: what `python()` starts only passes some of them."""
        os.kill(self.pid, number)


@asynccontextmanager
async def peer_process(kind: str = "echo", port: int = 0) -> AsyncIterator[Peer]:
    """Yield a process that accepts connections; it is killed at the end."""
    command = [*python(), "-m", "tests.device.peer_process", ADDRESS, kind, str(port)]
    async with await anyio.open_process(command, stderr=None) as process:
        pid = process.pid
        try:
            assert process.stdout is not None
            line = b""
            while not line.endswith(b"\n"):
                line += await process.stdout.receive()
            port, pid = map(int, line.split())
            yield Peer(port, pid)
        finally:
            with anyio.CancelScope(shield=True):
                with suppress(ProcessLookupError):  # a test may have killed it
                    # What `python()` starts ends after the process, whose objects are gone then.
                    os.kill(pid, signal.SIGKILL)
                await process.wait()
