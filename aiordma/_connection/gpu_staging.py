"""Moves memory of a GPU that the device cannot register, through pinned memory of the CPU. That has
two halves: while the device moves the bytes of one, CUDA's driver copies those of the other."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from aiordma._base.ranges import RemoteMemory
from aiordma._connection.connection import Connection
from aiordma._loop.event_loop import EventLoop
from aiordma._loop.threads import Once, in_thread, outwait, start_call
from aiordma.verbs.cuda import PinnedMemory
from aiordma.verbs.foreign_memory import Described
from aiordma.verbs.memory import MemoryRegion

HALF = 4 << 20
"""Bytes of a half."""


class _Copy:
    """A copy in a worker thread, which has begun. `PinnedMemory.close` ends it."""

    def __init__(self, loop: EventLoop, function: Callable[[], None]) -> None:
        self._ended = Once(loop)
        self._error: BaseException | None = None
        start_call(loop, function, self._end)

    def _end(self, error: BaseException | None) -> None:
        self._error = error
        self._ended.set()

    async def wait(self) -> None:
        """Wait for its end.

        Raises:
            CudaError: the driver refused.
        """
        await outwait(self._ended)
        if self._error is not None:
            raise self._error


@asynccontextmanager
async def _pinned(
    connection: Connection, gpu: Described
) -> AsyncIterator[tuple[PinnedMemory, MemoryRegion]]:
    make = partial(PinnedMemory, gpu, 2 * min(HALF, gpu.length))
    memory = await in_thread(connection._endpoint.loop, make, on_cancelled=PinnedMemory.close)
    try:
        region = await connection.register_in_thread(memory.memory)
        try:
            yield memory, region
        finally:
            region._retire()
    finally:
        memory.close()


def _parts(length: int) -> list[tuple[int, int, int]]:
    """Return where each part begins, its place in the pinned memory, and its length."""
    size = min(HALF, length)
    starts = enumerate(range(0, length, size))
    return [(start, number % 2 * size, min(size, length - start)) for number, start in starts]


async def read_staged(connection: Connection, gpu: Described, remote: RemoteMemory) -> None:
    """READ the peer's memory into memory of a GPU, of the same length.

    Raises:
        CudaError: the driver refused.
        as `Connection.read_blocks`, and `Connection.register_in_thread`.
    """
    loop = connection._endpoint.loop
    copy: _Copy | None = None
    async with _pinned(connection, gpu) as (pinned, region):
        for start, at, length in _parts(gpu.length):
            here, there = region[at : at + length], remote[start : start + length]
            await connection.read_blocks([(here, there)])
            if copy is not None:
                await copy.wait()
            copy = _Copy(loop, partial(pinned.copy_in, start, at, length))
        if copy is not None:
            await copy.wait()


async def write_staged(connection: Connection, gpu: Described, remote: RemoteMemory) -> None:
    """WRITE memory of a GPU into the peer's, of the same length.

    Raises: as `read_staged`.
    """
    loop, parts = connection._endpoint.loop, _parts(gpu.length)
    async with _pinned(connection, gpu) as (pinned, region):
        copy = _Copy(loop, partial(pinned.copy_out, *parts[0]))
        for (start, at, length), following in zip(parts, [*parts[1:], None], strict=True):
            await copy.wait()
            if following is not None:
                copy = _Copy(loop, partial(pinned.copy_out, *following))
            here, there = region[at : at + length], remote[start : start + length]
            await connection.write_blocks([(here, there)])
