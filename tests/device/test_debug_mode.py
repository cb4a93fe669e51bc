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


# -- what the messages name -----------------------------------------------------------------------


class Fails(asyncio.Protocol):
    """Raises an error in one method. The others do what they must."""

    def __init__(self, method: str) -> None:
        self.method = method

    def _call(self, method: str) -> None:
        if method == self.method:
            raise ValueError(f"out of {method}")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._call("connection_made")

    def data_received(self, data: bytes) -> None:
        self._call("data_received")

    def eof_received(self) -> None:
        self._call("eof_received")

    def connection_lost(self, error: Exception | None) -> None:
        self._call("connection_lost")


class FailsBuffered(Fails, asyncio.BufferedProtocol):
    def get_buffer(self, sizehint: int) -> bytearray:
        self._call("get_buffer")
        return bytearray(100)

    def buffer_updated(self, nbytes: int) -> None:
        self._call("buffer_updated")


@pytest.mark.parametrize("method", ["data_received", "eof_received"])
def test_error_names_the_protocols_method(method: str) -> None:
    assert reported(lambda: Fails(method)) == [
        f"Fatal error: protocol.{method}() call failed.: out of {method}"
    ]


@pytest.mark.parametrize("method", ["get_buffer", "buffer_updated", "eof_received"])
def test_error_names_the_buffered_protocols_method(method: str) -> None:
    assert reported(lambda: FailsBuffered(method)) == [
        f"Fatal error: protocol.{method}() call failed.: out of {method}"
    ]


@pytest.mark.parametrize("method", ["connection_made", "connection_lost"])
def test_error_of_a_callback_names_it(method: str) -> None:
    (message,) = reported(lambda: Fails(method))
    assert method in message
    assert message.endswith(f": out of {method}")


def reported(factory: Callable[[], asyncio.BaseProtocol]) -> list[str]:
    """Let a server's protocol get data and its end, and return what is reported."""
    messages: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(
            lambda _, context: messages.append(f"{context['message']}: {context['exception']}")
        )
        async with await streams.create_server(factory, ADDRESS, 0) as server:
            reader, writer = await streams.open_connection(*server.sockets[0].getsockname())
            writer.write(b"hello")
            writer.write_eof()
            async with asyncio.timeout(60):
                await reader.read()
            writer.close()
            await writer.wait_closed()

    with asyncio.Runner(loop_factory=streams.new_event_loop) as runner:
        runner.run(main())
    return messages


@pytest.mark.parametrize("factory", LOOPS)
def test_slow_callback_names_its_method_and_peer(
    factory: Callable[[], asyncio.AbstractEventLoop], caplog: pytest.LogCaptureFixture
) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read(5))
        writer.close()

    async def main() -> tuple[str, int]:
        asyncio.get_running_loop().slow_callback_duration = 0  # each callback is slow
        async with await streams.start_server(echo, ADDRESS, 0) as server:
            reader, writer = await streams.open_connection(*server.sockets[0].getsockname())
            local: tuple[str, int] = writer.get_extra_info("sockname")
            writer.write(b"hello")
            await reader.readexactly(5)
            writer.close()
            await writer.wait_closed()
        return local

    with asyncio.Runner(debug=True, loop_factory=factory) as runner:
        client = runner.run(main())
    start = f"Executing <Handle StreamTransport._process({client!r}) created at "
    (text, *_) = [each for each in caplog.messages if each.startswith(start)]
    assert "transport.py:" in text


@pytest.mark.natively
@pytest.mark.parametrize("factory", LOOPS)
def test_handle_says_where_the_program_made_it(
    factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    def created(handle: asyncio.Handle) -> tuple[str, str]:
        handle.cancel()
        (*_, last) = handle._source_traceback  # type: ignore[attr-defined]
        return last.filename, last.name

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for handle in (
            loop.call_soon(print),
            loop.call_later(1, print),
            loop.call_at(loop.time() + 1, print),
            loop.call_soon_threadsafe(print),
        ):
            assert created(handle) == (__file__, "main")

    with asyncio.Runner(debug=True, loop_factory=factory) as runner:
        runner.run(main())
