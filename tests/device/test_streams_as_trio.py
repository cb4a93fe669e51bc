"""trio's own tests of streams (trio.testing), on ours: an adapter translates the names."""

from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import pytest
import trio
import trio.testing

from aiordma.streams import Stream, connect_stream, listen_stream
from tests.devices import ADDRESS

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.loop_and_device,
    pytest.mark.parametrize("anyio_backend", [pytest.param("trio", id="trio")]),
    pytest.mark.slow,
]


@contextmanager
def trios_exceptions() -> Iterator[None]:
    try:
        yield
    except anyio.ClosedResourceError as error:
        raise trio.ClosedResourceError(str(error)) from error
    except anyio.BusyResourceError as error:
        raise trio.BusyResourceError(str(error)) from error
    except (anyio.BrokenResourceError, ConnectionError) as error:
        raise trio.BrokenResourceError(str(error)) from error


class TrioStream(trio.abc.HalfCloseableStream):
    """One of our streams as one of trio's."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        with trios_exceptions():
            await self.stream.send(data)

    async def wait_send_all_might_not_block(self) -> None:
        with trios_exceptions():
            await self.stream.wait_writable()

    async def send_eof(self) -> None:
        with trios_exceptions():
            await self.stream.send_eof()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        with trios_exceptions():
            try:
                return await self.stream.receive(65536 if max_bytes is None else max_bytes)
            except anyio.EndOfStream:
                return b""

    async def aclose(self) -> None:
        await self.stream.aclose()


async def two_streams() -> tuple[TrioStream, TrioStream]:
    accepted: list[Stream] = []

    async def accept() -> None:
        accepted.append(await listener.accept())

    async with (
        listen_stream(ADDRESS, buffer_size=4096) as listener,
        anyio.create_task_group() as group,
    ):
        group.start_soon(accept)
        client = await connect_stream(ADDRESS, listener.port, buffer_size=4096)
    return TrioStream(client), TrioStream(accepted[0])


async def two_clogged_streams() -> tuple[TrioStream, TrioStream]:
    """Two streams on which neither side can send any more, until the other one receives."""
    pair = await two_streams()
    for each in pair:
        with trio.move_on_after(0.1):
            while True:
                await each.send_all(b"x" * 1000)
    return pair


async def test_trios_checks_of_a_stream_with_half_close() -> None:
    # It runs those of one-way and of two-way streams as well.
    await trio.testing.check_half_closeable_stream(two_streams, two_clogged_streams)
