"""Six programs with a planted fault each, of kinds that real programs have had, and their mends.

Each function returns the scenario, of the faulty program or of the mended one. The faults are of
timing: on real time they show once in hours, or never.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import anyio

import aiordma
from aiordma import Access
from aiordma.testing import Host, Simulation

Scenario = Callable[[Simulation], Coroutine[Any, Any, None]]

PORT = 7471
BOTH = Access.REMOTE_READ | Access.REMOTE_WRITE


def connect(host: Host) -> Any:
    return aiordma.connect(host.address, PORT, device="software")


def listen(host: Host) -> Any:
    return aiordma.listen(host.address, PORT, device="software")


def clock() -> float:
    return asyncio.get_running_loop().time()


async def begin(simulation: Simulation, host: Host, server: Callable[[Host], Any]) -> None:
    """Run a server, and wait until it surely listens."""
    host.run(server, host)
    await asyncio.sleep(0.1)


def torn_lease(fixed: bool) -> Scenario:
    """A lease lasts one second. The faulty client counts it from the reply, the owner from when it
    gave it: a late reply makes the client believe for too long."""

    async def scenario(simulation: Simulation) -> None:
        owner, *clients = (simulation.host(name) for name in ("owner", "one", "two"))
        simulation.link(latency=0.001, jitter=0.4)
        holders: list[str] = []

        async def lend(host: Host) -> None:
            free_at = 0.0

            async def serve(connection: aiordma.Connection) -> None:
                nonlocal free_at
                async for _ in connection:
                    is_free = clock() >= free_at
                    if is_free:
                        free_at = clock() + 1
                    await connection.send(b"yes" if is_free else b"no")

            async with listen(host) as listener:
                await listener.serve(serve)

        async def use(host: Host) -> None:
            async with connect(owner) as connection:
                for _ in range(3):
                    asked = clock()
                    await connection.send(b"?")
                    answer = await connection.receive()
                    until = (asked if fixed else clock()) + 1
                    if answer == b"yes" and clock() < until - 0.05:
                        assert not holders, f"{host.name} and {holders[0]} hold the lease"
                        holders.append(host.name)
                        await asyncio.sleep(until - clock() - 0.01)
                        holders.remove(host.name)
                    await asyncio.sleep(0.05)

        await begin(simulation, owner, lend)
        await asyncio.gather(*(each.run(use, each) for each in clients))

    return scenario


def lost_wake_up(fixed: bool) -> Scenario:
    """A consumer that finds nothing says that it sleeps, in memory that the producer READs, and
    waits for a message. The faulty one does not look again between the two."""

    async def scenario(simulation: Simulation) -> None:
        consumer, producer = simulation.host("consumer"), simulation.host("producer")
        simulation.link(latency=0.001, jitter=0.002)

        async def consume(host: Host) -> None:
            memory = bytearray(16)  # 8 bytes: how many there are; 8 bytes: whether it sleeps
            async with listen(host) as listener, await listener.accept() as connection:
                region = connection.register(memory, BOTH)
                await connection.send(region.remote().pack())
                taken = 0
                while taken < 5:
                    if int.from_bytes(memory[:8], "little") > taken:
                        taken += 1
                        await connection.send(b"took it")
                        continue
                    await asyncio.sleep(0.001)  # decides to sleep
                    memory[8] = 1
                    if fixed and int.from_bytes(memory[:8], "little") > taken:
                        memory[8] = 0
                        continue
                    try:
                        await connection.receive()
                    except anyio.EndOfStream:
                        return  # the producer has given up
                    memory[8] = 0

        async def produce() -> None:
            async with connect(consumer) as connection:
                remote = aiordma.RemoteMemory.unpack(await connection.receive())
                for number in range(1, 6):
                    written = connection.post_write(number.to_bytes(8, "little"), remote[:8])
                    sleeps = await connection.read_bytes(remote[8:])
                    await written
                    if any(sleeps):
                        await connection.send(b"wake up")
                    with anyio.fail_after(60):
                        await connection.receive()

        done = consumer.run(consume, consumer)
        await asyncio.sleep(0.1)
        await producer.run(produce)
        await done

    return scenario


def done_twice(fixed: bool) -> Scenario:
    """A client adds 1, and tries again when it has no answer. Without numbers of its requests, the
    server cannot know that it has done so already."""

    async def scenario(simulation: Simulation) -> None:
        server, client = simulation.host("server"), simulation.host("client")
        simulation.link(latency=0.001, jitter=0.01)
        total, done = 0, set()

        async def add(connection: aiordma.Connection) -> None:
            nonlocal total
            async for number in connection:
                if not (fixed and bytes(number) in done):
                    total += 1
                    done.add(bytes(number))
                await connection.send(b"done")

        async def serve(host: Host) -> None:
            async with listen(host) as listener:
                await listener.serve(add)

        async def call() -> None:
            for number in range(3):
                while True:
                    with suppress(aiordma.RdmaError, anyio.EndOfStream, TimeoutError):
                        with anyio.fail_after(1):
                            async with connect(server) as connection:
                                await connection.send(bytes([number]))
                                await connection.receive()
                                break
                    await asyncio.sleep(1)

        await begin(simulation, server, serve)
        calls = client.run(call)
        for _ in range(3):
            await asyncio.sleep(simulation.random.uniform(0, 0.2))
            simulation.partition(server, client)
            await asyncio.sleep(simulation.random.uniform(0.5, 4))
            simulation.heal()
        await calls
        assert total == 3, f"3 calls added {total}"

    return scenario


def polls_last_byte(fixed: bool) -> Scenario:
    """A reader polls the last byte of memory that a peer WRITEs, and takes all of it for written.
    The mended one waits for the message after the WRITE."""

    async def scenario(simulation: Simulation) -> None:
        reader, writer = simulation.host("reader"), simulation.host("writer")
        simulation.link(latency=0.001, jitter=0.001)

        async def read(host: Host) -> None:
            memory = bytearray(1000)
            async with listen(host) as listener, await listener.accept() as connection:
                await connection.send(connection.register(memory, BOTH).remote().pack())
                if fixed:
                    await connection.receive()
                while not memory[-1]:
                    await asyncio.sleep(0.0002)
                assert memory == b"x" * 1000, "the last byte is there, others are not"
                await connection.send(b"thanks")

        async def write() -> None:
            async with connect(reader) as connection:
                remote = aiordma.RemoteMemory.unpack(await connection.receive())
                await connection.write(b"x" * 1000, remote)
                with suppress(aiordma.RdmaError):  # a reader that has failed
                    await connection.send(b"it is there")
                    await connection.receive()

        done = reader.run(read, reader)
        await asyncio.sleep(0.1)
        await writer.run(write)
        await done

    return scenario


def reuses_buffer(fixed: bool) -> Scenario:
    """A client gives up a WRITE after a time-out, and puts the next data into the same buffer. The
    device still reads it."""

    async def scenario(simulation: Simulation) -> None:
        server, client = simulation.host("server"), simulation.host("client")
        simulation.link(latency=0.001, jitter=0.05)

        async def serve(host: Host) -> None:
            async with listen(host) as listener, await listener.accept() as connection:
                memory = connection.register(bytearray(4096), BOTH)
                await connection.send(memory.remote().pack())
                with suppress(anyio.EndOfStream, aiordma.RdmaError):
                    await connection.receive()

        async def write() -> None:
            async with connect(server) as connection:
                remote = aiordma.RemoteMemory.unpack(await connection.receive())
                memory = connection.register(bytearray(4096))
                for number in range(10):
                    memory.view[:] = bytes([number]) * 4096
                    request = connection.post_write(memory[:], remote)
                    with anyio.move_on_after(0.06) as scope:
                        await request
                    if scope.cancelled_caught and fixed:
                        memory = connection.register(bytearray(4096))

        done = server.run(serve, server)
        await asyncio.sleep(0.1)
        await client.run(write)
        await done

    return scenario


def overtakes(fixed: bool) -> Scenario:
    """A client WRITEs over one connection, and says so over another: connections have no order."""

    async def scenario(simulation: Simulation) -> None:
        reader, writer = simulation.host("reader"), simulation.host("writer")
        simulation.link(latency=0.001, jitter=0.01)

        async def read(host: Host) -> None:
            memory = bytearray(100)
            async with (
                listen(host) as listener,
                await listener.accept() as data,
                await listener.accept() as words,
            ):
                await data.send(data.register(memory, BOTH).remote().pack())
                await (data if fixed else words).receive()
                assert memory == b"x" * 100, "the message is there, the data are not"
                await words.send(b"thanks")
                with suppress(anyio.EndOfStream):
                    await data.receive()

        async def write() -> None:
            async with connect(reader) as data, connect(reader) as words:
                remote = aiordma.RemoteMemory.unpack(await data.receive())
                written = data.post_write(b"x" * 100, remote)
                await (data if fixed else words).send(b"it is there")
                await written
                await words.receive()

        done = reader.run(read, reader)
        await asyncio.sleep(0.1)
        await writer.run(write)
        await done

    return scenario


PLANTED = {
    each.__name__: each
    for each in (torn_lease, lost_wake_up, done_twice, polls_last_byte, reuses_buffer, overtakes)
}
