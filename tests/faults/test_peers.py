"""A peer that is killed, or stopped and continued, during messages, READs and WRITEs."""

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import anyio
import pytest
from anyio.abc import Process

import aiordma
from tests.devices import ADDRESS
from tests.forked import python
from tests.soak.numbered import message

from .worker import MEMORY, OURS, SIZE, THEIRS

pytestmark = pytest.mark.anyio

BOUND = 30
"""Seconds; a few milliseconds on a good machine."""

SIDES = pytest.mark.parametrize("side", ["client", "server"])


@dataclass
class Traffic:
    """What goes on with the peer, and how it ended."""

    connection: aiordma.Connection
    pid: int
    readable: aiordma.RemoteMemory
    writable: aiordma.RemoteMemory
    rounds: dict[str, int] = field(default_factory=dict)
    errors: dict[str, Exception] = field(default_factory=dict)

    async def messages(self, number: int) -> None:
        await self.connection.send(message(THEIRS, number))
        assert await self.connection.receive() == message(OURS, number)

    async def read(self, number: int) -> None:
        assert await self.connection.read_bytes(self.readable) == MEMORY

    async def write(self, number: int) -> None:
        data = message(THEIRS, number).ljust(SIZE, b"-")[:SIZE]
        await self.connection.write(data, self.writable)
        assert await self.connection.read_bytes(self.writable) == data

    async def all(self) -> None:
        """Repeat each kind until it fails."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._repeat, "messages", self.messages)
            group.start_soon(self._repeat, "read", self.read)
            group.start_soon(self._repeat, "write", self.write)

    async def _repeat(self, name: str, one: Callable[[int], Awaitable[None]]) -> None:
        self.rounds[name] = 0
        try:
            while True:
                await one(self.rounds[name])
                self.rounds[name] += 1
        except (aiordma.RdmaError, aiordma.EndOfStream) as error:
            self.errors[name] = error

    async def have_gone_on(self) -> None:
        """Wait for three more rounds of each kind."""
        before = dict(self.rounds)
        with anyio.fail_after(BOUND):
            while not before or any(self.rounds[each] < n + 3 for each, n in before.items()):
                await anyio.sleep(0.01)
                before = before or dict(self.rounds)
                assert not self.errors


@asynccontextmanager
async def traffic(side: str) -> AsyncIterator[Traffic]:
    """Yield a connection with a worker, which is the side that is named."""
    async with aiordma.listen(ADDRESS, 0) as listener:
        port = listener.port if side == "client" else 0
        command = [*python(), "-m", "tests.faults.worker", ADDRESS, str(port)]
        async with await anyio.open_process(command, stderr=None) as process:
            port, pid = await _announced(process)
            try:
                if side == "client":
                    connection = await listener.accept()
                    await connection.receive()
                else:
                    connection = await aiordma.connect(ADDRESS, port)
                    await connection.send(b"first")
                async with connection:
                    grants = await connection.receive()
                    half = len(grants) // 2
                    readable, writable = (
                        aiordma.RemoteMemory.unpack(each) for each in (grants[:half], grants[half:])
                    )
                    yield Traffic(connection, pid, readable, writable)
            finally:
                with anyio.CancelScope(shield=True):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    await process.wait()


async def _announced(process: Process) -> tuple[int, int]:
    assert process.stdout is not None
    line = b""
    while not line.endswith(b"\n"):
        line += await process.stdout.receive()
    port, pid = line.split()
    return int(port), int(pid)


@pytest.mark.promise("Faults of the network change no byte")
@SIDES
async def test_killed_peer_ends_all_traffic(side: str) -> None:
    async with traffic(side) as work:
        with anyio.fail_after(BOUND):
            async with anyio.create_task_group() as group:
                group.start_soon(work.all)
                await work.have_gone_on()
                os.kill(work.pid, signal.SIGKILL)
            cause = await work.connection.ended()
        assert set(work.errors) == {"messages", "read", "write"}
        # The kernel of a killed process deregisters its memory before it disconnects: that of a
        # receive, too, into which the peer's device then cannot place a message.
        either = (
            aiordma.PeerGoneError,
            aiordma.RemoteAccessError,
            aiordma.FlushedError,
            aiordma.verbs.RemoteOperationError,
        )
        for name, error in work.errors.items():
            ended = name == "messages" and isinstance(error, aiordma.EndOfStream)
            assert ended or isinstance(error, either), repr(error)
        assert isinstance(cause, (aiordma.PeerGoneError, aiordma.RemoteAccessError))


@pytest.mark.promise("Faults of the network change no byte")
@SIDES
async def test_stopped_peer_goes_on_with_every_byte(side: str) -> None:
    async with traffic(side) as work, anyio.create_task_group() as group:
        group.start_soon(work.all)
        await work.have_gone_on()
        os.kill(work.pid, signal.SIGSTOP)
        await anyio.sleep(0.5)
        os.kill(work.pid, signal.SIGCONT)
        await work.have_gone_on()
        group.cancel_scope.cancel()
