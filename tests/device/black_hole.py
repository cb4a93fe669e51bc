"""A program: connect over a wire, cut it, and tell what becomes of the requests in flight, and
after how many seconds the connections ended. It ends itself after LIMIT seconds, and prints where
each of its tasks and threads hangs."""

import asyncio
import dataclasses
import faulthandler
import json
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio

import aiordma
from tests.connections import connect_to

Found = dict[str, tuple[str, str, float]]
"""For each connection: an outcome, a text, and seconds."""

LONG = 1 << 22
"""Bytes of a READ that is cut half way."""

HALF_DEPTH = 2
"""Slots of its send queue, which such READs fill."""

KEEPALIVE = 0.5
"""Seconds of the keepalive."""

MEND_AFTER = 6.0
"""Seconds: longer than the peer's end takes to be noticed, and some connects."""

PATIENCE = 30.0
"""Seconds until those that nothing ends are given up."""

LIMIT = 50.0
"""Seconds after which the program has hung. It needs PATIENCE at most, and less than 10 s beside:
see `run_alone` and `play`, which end it later."""

THREADS_LATER = 5.0
"""Seconds from the tasks' stacks, which the event loop prints, until those of all threads."""


class _Watch:
    """Records what becomes of connections whose wire was cut at a certain time."""

    def __init__(self) -> None:
        self.found: Found = {}
        self._cut = time.monotonic()

    def note(self, kind: str, became: str, text: str = "") -> None:
        self.found[kind] = became, text, round(time.monotonic() - self._cut, 2)

    async def end_of(
        self, kind: str, connection: aiordma.Connection, request: aiordma.WorkRequest | None
    ) -> None:
        """Record what became of a request (None: of the connection), and the time until the
        connection's end."""
        outcome: Exception | None = None
        if request is not None:
            try:
                await request
            except aiordma.RdmaError as error:
                outcome = error
        cause = await connection.ended()
        if request is None:
            outcome = cause
        if outcome is None:
            self.note(kind, "done", type(cause).__name__)
        else:
            self.note(kind, type(outcome).__name__, str(outcome))


def _print_tasks() -> None:
    """Print what each task awaits, from its coroutine down to what it does not see into."""
    print(f"black_hole: still running after {LIMIT:g} s", file=sys.stderr)
    for task in asyncio.all_tasks():
        print(f"  {task.get_name()}:", file=sys.stderr)
        awaited: Any = task.get_coro()
        while awaited is not None:
            frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
            if frame is None:
                print(f"    {awaited!r}", file=sys.stderr)
                break
            print(
                f"    {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}",
                file=sys.stderr,
            )
            awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)


def _run_bounded(main: Callable[[], Awaitable[Any]]) -> None:
    """Run it, and print what it returned. Print stacks, and end with status 1, after LIMIT and
    THREADS_LATER."""
    faulthandler.dump_traceback_later(LIMIT + THREADS_LATER, exit=True)

    async def watched() -> Any:
        watch = asyncio.get_running_loop().call_later(LIMIT, _print_tasks)
        try:
            return await main()
        finally:
            watch.cancel()

    print(json.dumps(anyio.run(watched)))


async def _connected(
    listener: aiordma.Listener, server: str, client: str, **options: Any
) -> tuple[aiordma.Connection, aiordma.Connection]:
    ours, theirs = await connect_to(listener, server, source=(client, 0), **options)
    await ours.send(b"alive")
    await theirs.receive()
    return ours, theirs


async def _run(
    server: str, client: str, cut: str, mend: str, slow: str, options: aiordma.ConnectionOptions
) -> Found:
    remote = aiordma.Access.REMOTE_READ | aiordma.Access.REMOTE_WRITE
    async with (
        aiordma.listen(server, 0, options=options) as listener,
        aiordma.listen(server, 0, keepalive=KEEPALIVE, options=options) as probing,
    ):
        # A connection for each, as the end of one ends the others on it.
        pairs = [await _connected(listener, server, client, options=options) for _ in range(3)]
        pairs.append(
            await _connected(
                listener,
                server,
                client,
                options=dataclasses.replace(options, max_send_wr=HALF_DEPTH),
            )
        )
        memory = [each.register(bytearray(LONG), remote).remote() for _, each in pairs]
        (read, _), (send, _), (write, _), (half, _) = pairs
        idle = {
            "IDLE CLIENT": await _connected(
                listener, server, client, keepalive=KEEPALIVE, options=options
            ),
            "IDLE SERVER": (await _connected(probing, server, client, options=options))[::-1],
            "NO KEEPALIVE": await _connected(listener, server, client, options=options),
        }
        pairs += idle.values()
        watched: dict[str, tuple[aiordma.Connection, aiordma.WorkRequest | None]] = {}
        if slow:
            await anyio.run_process(["sh", "-ec", slow])
            reads = [half.post_read(bytearray(LONG), memory[3]) for _ in range(HALF_DEPTH)]
            watched["HALF A READ"] = half, reads[-1]
            await anyio.sleep(1)
        await anyio.run_process(["sh", "-ec", cut])
        watch = _Watch()
        try:
            if options.initiator_depth:
                watched["READ"] = read, read.post_read(bytearray(64), memory[0][:64])
            watched["SEND"] = send, send.post_send(b"into the void")
            watched["WRITE"] = write, write.post_write(b"", memory[2][:0])
            for kind in ("IDLE CLIENT", "IDLE SERVER"):
                watched[kind] = idle[kind][0], None
            with anyio.move_on_after(PATIENCE):
                async with anyio.create_task_group() as group:
                    for kind, (connection, request) in watched.items():
                        group.start_soon(watch.end_of, kind, connection, request)
                unaware = idle["NO KEEPALIVE"][0]
                watch.note("NO KEEPALIVE", "connected" if unaware.is_connected else "ended")
                closing = _Watch()
                await unaware.aclose()
                closing.note("CLOSE", "closed")
                watch.found |= closing.found
        finally:
            await anyio.run_process(["sh", "-ec", mend])
            for ends in pairs:
                for end in ends:
                    await end.aclose()
    return watch.found


async def _reconnect(server: str, client: str, cut: str, mend: str) -> list[str]:
    """Use a `reconnecting` loop over a wire that is cut, and mended after some failed connects."""
    found: list[str] = []

    async def echo(connection: aiordma.Connection) -> None:
        async for message in connection:
            await connection.send(message)

    async def mend_later() -> None:
        await anyio.sleep(MEND_AFTER)
        await anyio.run_process(["sh", "-ec", mend])

    async with (
        aiordma.listen(server, 0, keepalive=KEEPALIVE) as listener,
        anyio.create_task_group() as group,
    ):
        group.start_soon(listener.serve, echo)
        async for session in aiordma.reconnecting(
            *(server, listener.port),
            source=(client, 0),
            timeout=2.0,
            max_delay=1.0,
            keepalive=KEEPALIVE,
        ):
            async with session as connection:
                await connection.send(b"alive")
                await connection.receive()
                if session.number == 1:
                    await anyio.run_process(["sh", "-ec", cut])
                    group.start_soon(mend_later)
                    await connection.receive()
                lost = session.lost
                found = [type(lost).__name__, str(session.number)]
                break
        group.cancel_scope.cancel()
    return found


def reconnect(server: str, client: str, cut: str, mend: str) -> None:
    """As `main`, for a `reconnecting` loop."""
    _run_bounded(partial(_reconnect, server, client, cut, mend))


def main(
    server: str, client: str, cut: str, mend: str, slow: str = "", options: str = "{}"
) -> None:
    """Listen on one address, connect from the other, and print what was found.

    Args:
        server, client: their addresses.
        cut, mend: shell commands for the wire between them.
        slow: another, to make it so slow that a READ can be cut half way; "" for no such READ.
        options: of all connections, as JSON. With an initiator_depth of 0 there are no READs.
    """
    chosen = aiordma.ConnectionOptions(**json.loads(options))
    _run_bounded(partial(_run, server, client, cut, mend, slow, chosen))


if __name__ == "__main__":
    {"main": main, "reconnect": reconnect}[sys.argv[1]](*sys.argv[2:])
