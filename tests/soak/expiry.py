"""Measure how late the access of a grant ends, on the device that reaches an address:

    python -m tests.soak.expiry HOST [GRANTS]

It prints the median and the worst delay in milliseconds: from the moment at which `expires` is
over to the moment at which `Grant.ended` returns, which is after the end of the access. The peer is
idle, or writes to the granted memory without a pause, on the same event loop. `make vm` runs it on
the kernel's devices.
"""

import json
import statistics
import sys
from functools import partial

import anyio

import aiordma
from aiordma import Access
from tests.connections import connect_to

GRANTS = 100
EXPIRES = 0.1
SIZE = 64 << 10
IN_FLIGHT = 4


async def lateness(listener: aiordma.Listener, host: str, *, is_written: bool) -> float:
    """Let one grant expire, and return how many seconds late its access ended."""
    client, server = await connect_to(listener, host)
    async with client, server, anyio.create_task_group() as group:
        await client.send(b"first")
        await server.receive()
        buffer = bytearray(SIZE)
        async with server.grant(buffer, Access.REMOTE_WRITE, expires=EXPIRES) as grant:
            began = anyio.current_time()
            if is_written:
                group.start_soon(_write_until_refused, client, grant.remote)
            await grant.ended()
            late = anyio.current_time() - began - EXPIRES
        if is_written:
            await client.ended()  # its next WRITE was refused
    return late


async def _write_until_refused(client: aiordma.Connection, remote: aiordma.RemoteMemory) -> None:
    local = client.register(bytearray(b"x") * SIZE)
    pending: list[aiordma.WorkRequest] = []
    try:
        while True:
            while len(pending) < IN_FLIGHT:
                pending.append(client.post_write(local, remote))
                pending[-1].add_done_callback(aiordma.WorkRequest.exception)
            await pending.pop(0)
    except (aiordma.RdmaError, ConnectionError):
        return


async def _measure(host: str, grants: int) -> None:
    async with aiordma.listen(host, 0) as listener:
        for name, is_written in (("idle peer", False), ("writing peer", True)):
            found = [
                1000 * await lateness(listener, host, is_written=is_written) for _ in range(grants)
            ]
            median, worst = round(statistics.median(found), 2), round(max(found), 2)
            print(name, json.dumps({"grants": grants, "median": median, "worst": worst}))


def main(host: str, grants: str = str(GRANTS)) -> None:
    """Measure, and print milliseconds."""
    anyio.run(partial(_measure, host, int(grants)))


if __name__ == "__main__":
    main(*sys.argv[1:])
