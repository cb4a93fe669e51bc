"""Ports of the connection manager on the built-in RoCE device, which its processes share."""

import signal
import sys

import anyio
import pytest

import aiordma
from tests.devices import alone_on_roce_port

pytestmark = pytest.mark.anyio

DEVICE = "software_roce"
HELLO = """
import asyncio, sys, aiordma
async def main():
    async with aiordma.listen(sys.argv[1], int(sys.argv[2]), device="software_roce") as listener:
        print(listener.port, flush=True)
        async with await listener.accept() as connection:
            await connection.send(b"another process")
            await connection.ended()
asyncio.run(main())
"""


async def answer(address: str, port: int) -> bytes:
    async with aiordma.connect(address, port, device=DEVICE) as connection:
        return bytes(await connection.receive())


async def greet(connection: aiordma.Connection) -> None:
    await connection.send(str(connection.local_address).encode())
    await connection.ended()


async def test_each_address_has_its_ports() -> None:
    async with (
        aiordma.listen("127.0.0.1", 0, device=DEVICE) as one,
        aiordma.listen("::1", one.port, device=DEVICE) as other,
        anyio.create_task_group() as group,
    ):
        for listener in (one, other):
            group.start_soon(listener.serve, greet)
        for address in ("127.0.0.1", "::1"):
            assert await answer(address, one.port) == str((address, one.port)).encode()
        group.cancel_scope.cancel()


@pytest.mark.parametrize("bound", ["127.0.0.2", "0.0.0.0"])
async def test_another_process_gets_what_comes_to_its_address(bound: str) -> None:
    command = [sys.executable, "-c", HELLO, bound, "0"]
    async with await anyio.open_process(command) as process:
        assert process.stdout is not None
        port = int(await process.stdout.receive())
        if bound == "0.0.0.0":
            with pytest.raises(aiordma.VerbsCallError, match="Another listener has this port"):
                await aiordma.listen("127.0.0.1", port, device=DEVICE)
            assert await answer("127.0.0.2", port) == b"another process"
        else:
            async with aiordma.listen("127.0.0.1", port, device=DEVICE):
                assert await answer("127.0.0.2", port) == b"another process"
        process.kill()


async def test_a_stopped_process_gets_no_packets_of_another() -> None:
    """They share a port of UDP, and the kernel gives each one the packets to its queue pairs."""
    with alone_on_roce_port():
        await exchange_beside_stopped_process()


async def exchange_beside_stopped_process() -> None:
    addresses = [f"127.0.0.{last}" for last in range(3, 11)]
    async with (
        aiordma.listen("0.0.0.0", 0, device=DEVICE) as listener,
        await anyio.open_process([sys.executable, "-c", HELLO, "127.0.0.2", "0"]) as process,
        anyio.create_task_group() as group,
    ):
        group.start_soon(listener.serve, greet)
        assert process.stdout is not None
        await process.stdout.receive()
        process.send_signal(signal.SIGSTOP)
        for address in addresses:
            assert await answer(address, listener.port) == str((address, listener.port)).encode()
        process.kill()
        group.cancel_scope.cancel()
