"""A server for a thousand connections, as one would write it: one queue of receives, one task.

Its program is `python -m tests.bench.shared_server HOST DEVICE SPIN`; it prints its port, and
echoes every message of SIZE bytes until it is terminated.
"""

import json
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

import anyio
from anyio.lowlevel import checkpoint

from aiordma import (
    Connection,
    ConnectionOptions,
    DisconnectedError,
    Listener,
    RdmaConnectionError,
    SharedReceiveQueue,
    WorkCompletionError,
    WorkRequest,
    listen,
    open_shared_receive,
)
from aiordma.bench.loops import run
from aiordma.bench.processes import Ports, announcing

SIZE = 64
RECEIVES = 256
CHAIN = 16
"""Receives are posted so many at a time, and a connection has at most as many answers in flight."""


async def serve(host: str, device: str) -> None:
    """Serve until cancelled."""
    async with (
        await open_shared_receive(host, device=device, depth=RECEIVES, max_sge=1) as shared,
        await listen(
            host,
            0,
            device=device,
            shared_receive=shared,
            options=ConnectionOptions(max_send_wr=CHAIN, max_send_sge=1, max_recv_sge=1),
        ) as listener,
        anyio.create_task_group() as group,
    ):
        connected: set[Connection] = set()
        group.start_soon(_accept, listener, connected)
        print(json.dumps(listener.port), flush=True)
        await _echo(shared, connected)


async def _accept(listener: Listener, connected: set[Connection]) -> None:
    while True:
        with suppress(RdmaConnectionError):  # the client went
            connected.add(await listener.accept())


async def _echo(shared: SharedReceiveQueue, connected: set[Connection]) -> None:
    memory = shared.register(bytearray(SIZE * RECEIVES))
    places = [memory[at : at + SIZE] for at in range(0, len(memory), SIZE)]
    receives = deque(zip(places, shared.post_srq_recv(places), strict=True))
    answers: list[WorkRequest] = []
    free = []
    while True:
        place, arrival = receives.popleft()
        free.append(place)
        with suppress(WorkCompletionError, DisconnectedError):  # a client that went
            completion = await arrival
            while (connection := shared.connection_of(completion)) not in connected:
                if connection is None:
                    break
                # Its message was faster than the end of its handshake.
                await checkpoint()
            else:
                answers.append(connection.post_send(place))
        if len(free) < CHAIN:
            continue
        for answer in answers:
            with suppress(WorkCompletionError, DisconnectedError):
                await answer
        receives.extend(zip(free, shared.post_srq_recv(free), strict=True))
        answers, free = [], []


@contextmanager
def serving(host: str, device: str, spin: float) -> Iterator[Ports]:
    """Have it in a process of its own during the block."""
    words = [sys.executable, "-m", "tests.bench.shared_server", host, device, str(spin)]
    with announcing(words) as (port, pid):
        yield Ports(port, 0, 0, 0, pid)


if __name__ == "__main__":
    run(partial(serve, *sys.argv[1:3]), spin=float(sys.argv[3]))
