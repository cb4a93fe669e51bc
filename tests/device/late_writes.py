"""Grants that end while the peer writes, and canary bytes that show each WRITE that came late."""

import random
from typing import Any

import anyio

import aiordma
from aiordma import Access, RemoteMemory
from tests.connections import connect_to
from tests.device.players import until
from tests.devices import ADDRESS

__all__ = ("CANARY", "SIZES", "end_under_writes", "memory_of", "write_until_refused")

CANARY = 0xEE
WRITTEN = 0x01
EDGE = 64
"""Bytes before and behind the granted ones, which never change."""
SIZES = (4096, 65536, 1 << 18)
BINDABLE = Access.LOCAL_WRITE | Access.MW_BIND


def memory_of(kind: str, connection: aiordma.Connection, buffer: bytearray) -> Any:
    """Return the buffer itself, or a region of it that is registered with or without MW_BIND."""
    if kind == "buffer":
        return buffer
    if kind == "bindable" and connection.context.query().max_mw:
        return connection.register(buffer, BINDABLE)
    return connection.register(buffer)


async def write_until_refused(client: aiordma.Connection, remote: RemoteMemory) -> int:
    """Write to the granted memory, several requests at a time, until the connection ends. Return
    how many WRITEs succeeded."""
    local = client.register(bytearray([WRITTEN]) * remote.length)
    done = 0
    pending: list[aiordma.WorkRequest] = []
    try:
        while True:
            while len(pending) < 4:
                pending.append(client.post_write(local, remote))
                pending[-1].add_done_callback(aiordma.WorkRequest.exception)
            await pending.pop(0)
            done += 1
    except (aiordma.RdmaError, ConnectionError):
        await client.ended()
    return done


async def end_under_writes(
    listener: aiordma.Listener, kind: str, size: int, chance: random.Random
) -> tuple[int, int]:
    """End a grant of a region's middle while the peer writes to it.

    Returns:
        how many WRITEs succeeded, and how many bytes are wrong: those that arrived after the end,
        and those beside the granted ones.
    """
    small = {
        "receive_buffers": 1,
        "receive_size": 64,
        "options": aiordma.ConnectionOptions(max_send_wr=8),
    }
    client, server = await connect_to(listener, ADDRESS, **small)
    written: list[int] = []

    async with client, server:
        await client.send(b"first")
        await server.receive()
        buffer = bytearray([CANARY]) * (EDGE + size + EDGE)
        memory = memory_of(kind, server, buffer)[EDGE : EDGE + size]

        async def write(remote: RemoteMemory) -> None:
            written.append(await write_until_refused(client, remote))

        async with anyio.create_task_group() as group:
            async with server.grant(memory, Access.REMOTE_WRITE) as grant:
                group.start_soon(write, grant.remote)
                await until(lambda: buffer[EDGE] == WRITTEN)
                await anyio.sleep(chance.random() * 0.002)
            # Overwrite the whole part: whatever differs later arrived late.
            buffer[EDGE : EDGE + size] = bytes([CANARY]) * size
        await client.ended()
        return written[0], len(buffer) - buffer.count(CANARY)
