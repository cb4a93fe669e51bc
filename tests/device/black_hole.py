"""A program: connect over a wire, cut it, and tell what becomes of the requests in flight."""

import json
import sys
from functools import partial
from typing import Any

import anyio

import aiordma
from tests.connections import connect_to

LONG = 1 << 22
"""Bytes of a READ that is cut half way."""

KEEPALIVE = 0.5
"""Seconds of the keepalive."""

PATIENCE = 60.0
"""Seconds until those that nothing ends are given up."""


async def _end_of(client: aiordma.Connection, request: aiordma.WorkRequest) -> list[str]:
    try:
        await request
        became = ["done", ""]
    except aiordma.RdmaError as error:
        became = [type(error).__name__, str(error)]
    while client.is_connected:
        await anyio.sleep(0.05)
    return became


async def _idle_end(connection: aiordma.Connection) -> list[str]:
    """What becomes of a side that only receives."""
    cause = await connection.ended()
    return [type(cause).__name__, str(cause)]


async def _connected(
    listener: aiordma.Listener, server: str, client: str, **options: Any
) -> tuple[aiordma.Connection, aiordma.Connection]:
    ours, theirs = await connect_to(listener, server, source=(client, 0), **options)
    await ours.send(b"alive")
    await theirs.receive()
    return ours, theirs


async def _run(server: str, client: str, cut: str, mend: str, slow: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    remote = aiordma.Access.REMOTE_READ | aiordma.Access.REMOTE_WRITE
    async with (
        aiordma.listen(server, 0) as listener,
        aiordma.listen(server, 0, keepalive=KEEPALIVE) as probing,
    ):
        # A connection for each, as the end of one ends the others on it.
        pairs = [await _connected(listener, server, client) for _ in range(4)]
        memory = [each.register(bytearray(LONG), remote).remote() for _, each in pairs]
        (read, _), (send, _), (write, _), (half, _) = pairs
        idle = {
            "IDLE CLIENT": await _connected(listener, server, client, keepalive=KEEPALIVE),
            "IDLE SERVER": (await _connected(probing, server, client))[::-1],
            "NO KEEPALIVE": await _connected(listener, server, client),
        }
        pairs += idle.values()
        requests = {}
        if slow:
            await anyio.run_process(["sh", "-ec", slow])
            requests["HALF A READ"] = half, half.post_read(memory[3], bytearray(LONG))
            await anyio.sleep(1)
        await anyio.run_process(["sh", "-ec", cut])
        try:
            requests["READ"] = read, read.post_read(memory[0][:64], bytearray(64))
            requests["SEND"] = send, send.post_send(b"into the void")
            requests["WRITE"] = write, write.post_write(b"", memory[2][:0])
            with anyio.move_on_after(PATIENCE):
                for kind, (connection, request) in requests.items():
                    found[kind] = await _end_of(connection, request)
                for kind in ("IDLE CLIENT", "IDLE SERVER"):
                    found[kind] = await _idle_end(idle[kind][0])
                unaware = idle["NO KEEPALIVE"][0]
                found["NO KEEPALIVE"] = ["connected" if unaware.is_connected else "ended", ""]
                await unaware.aclose()
                found["CLOSE"] = ["closed", ""]
        finally:
            await anyio.run_process(["sh", "-ec", mend])
            for ends in pairs:
                for end in ends:
                    await end.aclose()
    return found


def main(server: str, client: str, cut: str, mend: str, slow: str = "") -> None:
    """Listen on one address, connect from the other, and print what was found.

    Args:
        server, client: their addresses.
        cut, mend: shell commands for the wire between them.
        slow: another, to make it so slow that a READ can be cut half way; "" for no such READ.
    """
    print(json.dumps(anyio.run(partial(_run, server, client, cut, mend, slow))))


if __name__ == "__main__":
    main(*sys.argv[1:])
