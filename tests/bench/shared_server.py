"""A server for a thousand connections, as one would write it: one queue of receives, one task.

Its program is `python -m tests.bench.shared_server HOST DEVICE SPIN`; it prints its port, and
echoes every message of SIZE bytes until it is terminated.
"""

import json
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

import anyio

from aiordma import (
    Listener,
    RdmaError,
    SharedReceiveQueue,
    WorkRequest,
    listen,
    open_shared_receive,
)
from aiordma.bench.loops import run
from aiordma.bench.processes import Ports

SIZE = 64
RECEIVES = 256
CHAIN = 16
"""Receives are posted so many at a time."""
ANSWERS = 64
"""That a connection may have on their way."""


async def serve(host: str, device: str) -> None:
    """Serve until cancelled."""
    async with (
        await open_shared_receive(host, device=device, depth=RECEIVES, max_sge=1) as shared,
        await listen(
            host, 0, device=device, shared_receive=shared, send_depth=ANSWERS, max_sge=1
        ) as listener,
        anyio.create_task_group() as group,
    ):
        group.start_soon(_accept, listener)
        print(json.dumps(listener.port), flush=True)
        await _echo(shared)


async def _accept(listener: Listener) -> None:
    connections = []
    while True:
        with suppress(RdmaError):  # the client went
            connections.append(await listener.accept())


async def _echo(shared: SharedReceiveQueue) -> None:
    memory = shared.register(bytearray(SIZE * RECEIVES))
    places = [memory[at : at + SIZE] for at in range(0, len(memory), SIZE)]
    receives = deque(zip(places, shared.post_srq_recv(places), strict=True))
    answers: list[WorkRequest] = []
    free = []
    while True:
        place, arrival = receives.popleft()
        free.append(place)
        connection = shared.connection_of(await arrival)
        if connection is not None:
            with suppress(RdmaError):
                answers.append(connection.post_send(place))
        if len(free) < CHAIN:
            continue
        for answer in answers:
            with suppress(RdmaError):
                await answer
        receives.extend(zip(free, shared.post_srq_recv(free), strict=True))
        answers, free = [], []


@contextmanager
def serving(host: str, device: str, spin: float) -> Iterator[Ports]:
    """Have it in a process of its own during the block."""
    words = [sys.executable, "-m", "tests.bench.shared_server", host, device, str(spin)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the server ended with status {process.wait()}")
            yield Ports(json.loads(line), 0, 0, process.pid)
        finally:
            process.terminate()


if __name__ == "__main__":
    run(partial(serve, *sys.argv[1:3]), spin=float(sys.argv[3]))
