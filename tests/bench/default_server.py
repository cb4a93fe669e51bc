"""A server as one writes it first: default options, and a task for each connection, which echoes
messages.

Its program is `python -m tests.bench.default_server HOST DEVICE SPIN`; it prints its port, and
serves until it is terminated.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from aiordma import Connection, listen
from aiordma.bench.loops import run
from aiordma.bench.processes import Ports, announcing


async def serve(host: str, device: str) -> None:
    """Serve until cancelled."""
    async with await listen(host, 0, device=device, backlog=256) as listener:
        print(json.dumps(listener.port), flush=True)
        await listener.serve(_echo)


async def _echo(connection: Connection) -> None:
    async for message in connection:
        await connection.send(message)


@contextmanager
def serving(host: str, device: str, spin: float) -> Iterator[Ports]:
    """Run it in a process of its own during the block."""
    words = [sys.executable, "-m", "tests.bench.default_server", host, device, str(spin)]
    with announcing(words) as (port, pid):
        yield Ports(port, 0, 0, 0, pid)


if __name__ == "__main__":
    run(partial(serve, *sys.argv[1:3]), spin=float(sys.argv[3]))
