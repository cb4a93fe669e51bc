"""A program that has everything open: for tests of the end of a process.

    python -m tests.device.life_program ADDRESS LOOP END [datagrams] [rnr]

It prints "begin" when all is imported, and "open" when all is open and requests are in flight.
END is how it ends:

    close   leave every block, some times over
    return  end the main coroutine with everything open
    exit    the same with SystemExit, which reaches the event loop
    stop    stop the event loop, and end the process without closing the loop
    cut     close the event loop with its tasks pending
"""

import asyncio
import signal
import sys
from contextlib import AsyncExitStack, suppress
from typing import Any

import anyio

import aiordma
from aiordma import streams

ADDRESS, LOOP, END, *CAN = sys.argv[1:]
REMOTE = aiordma.Access.LOCAL_WRITE | aiordma.Access.REMOTE_WRITE | aiordma.Access.REMOTE_READ
ROUNDS = 5

kept: list[Any] = []
"""What is open: the process's end finds it there."""


async def enter(stack: AsyncExitStack, opening: Any) -> Any:
    """Enter a context. On trio no KeyboardInterrupt comes meanwhile, because contextlib loses what
    is open if one comes before it has noted the exit; an `async with` statement does not."""
    return await stack.enter_async_context(opening)


if LOOP == "trio":
    import trio

    enter = trio.lowlevel.enable_ki_protection(enter)


async def open_all(stack: AsyncExitStack) -> tuple[aiordma.Connection, aiordma.Connection]:
    """Open one of everything; return a connection's ends."""
    domain = await enter(stack, aiordma.open_domain(ADDRESS))
    listener = await enter(stack, aiordma.listen(ADDRESS, 0, domain=domain))
    async with anyio.create_task_group() as group:
        servers: list[aiordma.Connection] = []

        async def accept() -> None:
            with suppress(ConnectionError):  # the other end, `connect`, is interrupted first
                servers.append(await enter(stack, listener.accept()))

        group.start_soon(accept)
        client = await enter(stack, aiordma.connect(ADDRESS, listener.port))
    (server,) = servers
    grant = await enter(
        stack, server.grant(server.register(bytearray(64), REMOTE), aiordma.Access.REMOTE_READ)
    )
    kept.extend([domain, listener, client, server, grant])
    if "datagrams" in CAN:
        kept.append(await enter(stack, aiordma.open_datagram(ADDRESS)))
    kept.append(await enter(stack, aiordma.open_shared_receive(ADDRESS, buffers=4)))
    return client, server


async def open_streams(stack: AsyncExitStack) -> None:
    """Open an asyncio server and one of its streams; trio has other ones."""
    if LOOP == "trio":
        return

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        kept.append(writer)  # from 3.12 on, one that is collected closes itself
        try:
            while data := await reader.read(100):
                writer.write(data)
        except (ConnectionError, aiordma.ClosedError):
            pass  # the other end is interrupted first; or the loop ends as this task begins
        except asyncio.CancelledError:  # else 3.12.1 reports it, and 3.13 closes
            return
        writer.close()

    writers: list[asyncio.StreamWriter] = []
    server = await streams.start_server(echo, ADDRESS, 0)
    reader, writer = await streams.open_connection(*server.sockets[0].getsockname())
    writers.append(writer)

    async def close() -> None:
        server.close()
        for each in writers:
            each.close()
            with suppress(ConnectionError):
                await each.wait_closed()
        await server.wait_closed()

    stack.push_async_callback(close)
    writer.write(b"hello")
    await reader.readexactly(5)
    kept.extend([server, reader, writer])


async def talk(client: aiordma.Connection, server: aiordma.Connection) -> None:
    """Send messages to and fro, and leave requests in flight."""
    for number in range(200):
        await client.send(b"%d" % number)
        await server.send(await server.receive())
        await client.receive()
    theirs = server.register(bytearray(1 << 16), REMOTE).remote()
    # Where messages wait for a receive, the peer has too few for the last ones.
    messages = 24 if "rnr" in CAN else 8
    requests = [
        *(client.post_write(bytes(1 << 16), theirs) for _ in range(10)),
        *(client.post_read(bytearray(1 << 16), theirs) for _ in range(10)),
        *(client.post_send(bytes(1 << 10)) for _ in range(messages)),
    ]
    for request in requests:
        request.add_done_callback(aiordma.WorkRequest.exception)
    kept.extend(requests)


async def main() -> None:
    """Open all, and end as END says."""
    for _ in range(ROUNDS if END == "close" else 1):
        stack = AsyncExitStack()
        if END == "close":
            async with stack:
                await talk(*await open_all(stack))
                await open_streams(stack)
            kept.clear()
        else:
            kept.append(stack)
            await talk(*await open_all(stack))
            await open_streams(stack)
    print("open", flush=True)
    if END == "exit":
        sys.exit()


def without_groups(error: BaseException) -> BaseException:
    """Return the error, without groups of one error around it, which task groups make."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def run() -> None:
    """Run `main` on the event loop LOOP."""
    if LOOP == "trio":
        import trio

        try:
            trio.run(main)
        except BaseExceptionGroup as group:
            raise without_groups(group) from None
        return
    if LOOP == "uvloop":
        import uvloop

        factory: Any = uvloop.new_event_loop
    else:
        factory = {"asyncio": asyncio.new_event_loop, "polling": aiordma.new_event_loop}[LOOP]
    if END in ("stop", "cut"):
        loop = factory()
        kept.append(loop)
        loop.run_until_complete(main())
        if END == "cut":
            loop.close()
        return
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job
        signal.signal(signal.SIGINT, signal.default_int_handler)
    print("begin", flush=True)
    run()
