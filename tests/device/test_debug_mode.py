"""asyncio's debug mode (`asyncio.run(debug=True)`, `python -X dev`)."""

import asyncio
from collections.abc import Callable

import pytest

import aiordma
from aiordma import streams
from tests.devices import ADDRESS

pytestmark = pytest.mark.one_kernel_device

LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [
    asyncio.new_event_loop,
    aiordma.new_event_loop,
    streams.new_event_loop,
]


def run(factory: Callable[[], asyncio.AbstractEventLoop], *, is_late: bool) -> None:
    async def main() -> None:
        if is_late:
            asyncio.get_running_loop().set_debug(True)
        async with asyncio.timeout(60):
            await echo_message()
            await echo_stream()

    with asyncio.Runner(debug=not is_late, loop_factory=factory) as runner:
        runner.run(main())


async def echo_message() -> None:
    async with aiordma.listen(ADDRESS) as listener:

        async def serve() -> None:
            async with await listener.accept() as connection:
                await connection.send(await connection.receive())
                assert [each async for each in connection] == []

        serving = asyncio.create_task(serve())
        async with aiordma.connect(ADDRESS, listener.port) as connection:
            await connection.send(b"hello")
            assert await connection.receive() == b"hello"
        await serving


async def echo_stream() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        writer.close()

    async with await streams.start_server(serve, ADDRESS, 0) as server:
        host, port = server.sockets[0].getsockname()
        reader, writer = await streams.open_connection(host, port)
        writer.write(b"hello\n")
        assert await reader.readline() == b"hello\n"
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("factory", LOOPS)
def test_messages_and_streams_in_debug_mode(
    factory: Callable[[], asyncio.AbstractEventLoop], is_late: bool
) -> None:
    run(factory, is_late=is_late)
