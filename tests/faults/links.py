"""A program: take the link or the device away under connections in use, and compare what they
transfer until then.

Its modes: `lost` takes it away for good; `back` gives it back after a while, during which only the
side posts requests whose interface stays up. (In the other side's kernel there is no route to the
peer then, and rxe ends a queue pair whose packet has none.) It prints, as JSON, what became of each
side of each connection.
"""

import json
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import anyio

import aiordma
from tests.connections import connect_to

from .transfers import REMOTE

SECONDS = 60.0
"""The time within which all has to end."""

AWAY_SECONDS = 1.0
PATIENT = 20.0
"""The peer_timeout of a connection that is to survive that, in an emulated machine."""

SIZE = 3000

Found = dict[str, list[str]]

Endless = Callable[[], Awaitable[object]]


class Pair:
    """A connection: one end writes to the memory of the other, reads it back and compares."""

    def __init__(self, near: aiordma.Connection, far: aiordma.Connection) -> None:
        self.near, self.far = near, far
        self.rounds = 0
        self._target = far.register(bytearray(SIZE), REMOTE).remote()

    async def transfer(self) -> None:
        """Transfer until an error."""
        while True:
            data = random.Random(self.rounds).randbytes(SIZE)
            await self.near.write(data, self._target)
            if await self.near.read_bytes(self._target) != data:
                raise ValueError("the bytes differ")
            self.rounds += 1

    async def close(self) -> None:
        await self.near.aclose()
        await self.far.aclose()


async def _error(function: Endless) -> list[str]:
    """Return the error of an endless function: its classes and its text."""
    try:
        with anyio.fail_after(SECONDS):
            await function()
    except Exception as error:
        return [*(each.__name__ for each in type(error).__mro__), str(error)]
    return ["no error"]


async def _pair(listener: aiordma.Listener, server: str, client: str, *, is_clients: bool) -> Pair:
    """Connect. is_clients: whether the connecting side is the one that transfers."""
    ours, theirs = await connect_to(listener, server, source=(client, 0))
    await ours.send(b"alive")
    await theirs.receive()
    return Pair(ours, theirs) if is_clients else Pair(theirs, ours)


def start(command: str) -> subprocess.Popen[bytes]:
    """Start a shell command, and do not wait: a device is deleted once this process has ended."""
    quiet = subprocess.DEVNULL
    return subprocess.Popen(["sh", "-ec", command], stdout=quiet, stderr=quiet)


async def _lost(server: str, client: str, cut: str) -> Found:
    found: Found = {}
    async with aiordma.listen(server, 0, keepalive=1.0) as listener:
        pairs = {
            "client": await _pair(listener, server, client, is_clients=True),
            "server": await _pair(listener, server, client, is_clients=False),
        }

        async def watch(name: str, function: Endless) -> None:
            found[name] = await _error(function)

        async with anyio.create_task_group() as group:
            for name, pair in pairs.items():
                group.start_soon(watch, f"{name}'s transfer", pair.transfer)
                group.start_soon(watch, f"{name}'s receive", pair.near.receive)
            with anyio.fail_after(SECONDS):
                while not all(each.rounds for each in pairs.values()):
                    await anyio.sleep(0.05)
            start(cut)
        with anyio.fail_after(SECONDS):
            for pair in pairs.values():
                await pair.close()
    return found


async def _back(server: str, client: str, cut: str, mend: str) -> Found:
    async with aiordma.listen(server, 0, peer_timeout=PATIENT) as listener:
        pair = await _pair(listener, server, client, is_clients=False)
        async with anyio.create_task_group() as group:
            group.start_soon(pair.transfer)
            await anyio.run_process(["sh", "-ec", cut])
            await anyio.sleep(AWAY_SECONDS)
            before = pair.rounds
            await anyio.run_process(["sh", "-ec", mend])
            with anyio.fail_after(SECONDS):
                while pair.rounds < before + 2:
                    await anyio.sleep(0.05)
            group.cancel_scope.cancel()
        await pair.close()
        again = await _pair(listener, server, client, is_clients=True)
        with suppress(TimeoutError), anyio.fail_after(1):
            await again.transfer()
        await again.close()
    return {"transfer": ["went on"], "again": ["works" if again.rounds else "no round"]}


async def main(mode: str, server: str, client: str, cut: str, mend: str) -> None:
    """Run a mode.

    Args:
        mode: "lost" or "back".
        server, client: the addresses of veth2 and of veth1.
        cut, mend: shell commands.
    """
    lost = mode == "lost"
    run = partial(_lost, server, client, cut) if lost else partial(_back, server, client, cut, mend)
    print(json.dumps(await run()))


if __name__ == "__main__":
    anyio.run(partial(main, *sys.argv[1:]))
