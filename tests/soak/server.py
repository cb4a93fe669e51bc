"""A server in a process of its own: default options, and a task for each connection, which compares
the numbered messages of its peer with what they should be, and echoes them.

Its program is `python -m tests.soak.server`; it prints its port, and serves until it is terminated.
"""

import gc
import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from typing import Any

import anyio

import aiordma
from aiordma.bench.processes import announcing

from .numbered import HEADER, Tally
from .process import connections_possible, held, in_use_kib, resident_kib, settled

HOST = "127.0.0.1"
REPORT, HELD = b"report", b"held"


class _Echo:
    def __init__(self) -> None:
        self._tally = Tally()
        self._before: dict[str, int] = {}

    async def serve(self, connection: aiordma.Connection) -> None:
        number = 0
        async for message in connection:
            if message in (REPORT, HELD):
                await connection.send(json.dumps(await self._report(message)).encode())
                continue
            whose, _ = HEADER.unpack_from(message)
            self._tally.add(whose, number, message)
            number += 1
            await connection.send(message)

    async def _report(self, question: bytes) -> dict[str, Any]:
        """Answer with the messages so far; HELD: with what was left since the first such one."""
        if question == REPORT:
            return asdict(self._tally) | _memory()
        if not self._before:
            self._before = held()
        return {"left": await settled(self._before), **_memory()}


def _memory() -> dict[str, float]:
    gc.collect()
    return {"kib": resident_kib(), "in_use": in_use_kib()}


async def main() -> None:
    """Serve until cancelled."""
    connections_possible(0)
    async with aiordma.listen(HOST, 0, backlog=128) as listener:
        print(json.dumps(listener.port), flush=True)
        await listener.serve(_Echo().serve)


@contextmanager
def serving(*, is_counting: bool = False) -> Iterator[int]:
    """Run the server during the block; yield its port. is_counting: take all memory from the C
    library, which counts it."""
    words = [sys.executable, "-m", "tests.soak.server"]
    if is_counting:
        words = ["env", "PYTHONMALLOC=malloc", "MALLOC_ARENA_MAX=1", *words]
    with announcing(words) as (port, _):
        yield port


class Control:
    """A connection that asks the server about itself."""

    def __init__(self, connection: aiordma.Connection) -> None:
        self._connection = connection

    async def ask(self, question: bytes) -> dict[str, Any]:
        await self._connection.send(question)
        answer: dict[str, Any] = json.loads(await self._connection.receive())
        return answer


@asynccontextmanager
async def controlled(*, is_counting: bool = False) -> AsyncIterator[tuple[int, Control]]:
    """Run a server during the block; yield its port and a control connection."""
    with serving(is_counting=is_counting) as port:
        async with aiordma.connect(HOST, port) as connection:
            yield port, Control(connection)


if __name__ == "__main__":
    anyio.run(main)
