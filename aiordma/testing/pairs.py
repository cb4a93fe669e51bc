"""Connected endpoints in one process, for tests: a pair, a pair of streams, a fabric of several."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

import anyio

from aiordma._connection.connection import Connection
from aiordma._connection.connector import connect
from aiordma._connection.listener import Listener, listen, serving
from aiordma.streams import Stream, connect_stream, listen_stream

__all__ = ("Fabric", "connected_pair", "fabric", "serving_listener", "stream_pair")

End = TypeVar("End", Connection, Stream)


@asynccontextmanager
async def connected_pair(
    address: str = "127.0.0.1", device: str = "software", **options: Any
) -> AsyncIterator[tuple[Connection, Connection]]:
    """Connect two ends in this process, and close them at the end of the block.

    Args:
        address: an address of the device; both ends use it.
        device: the device's name.
        options: of both ends, as of `aiordma.connect`.

    Returns: (client, server).

    Raises: as `aiordma.connect` and `aiordma.listen`.

    Cancellation: both ends are closed.
    """
    async with await listen(address, 0, device=device, **options) as listener:
        client, server = await _both(
            connect(address, listener.port, device=device, **options), listener.accept
        )
        async with client, server:
            yield client, server


@asynccontextmanager
async def stream_pair(
    address: str = "127.0.0.1", device: str = "software", **options: Any
) -> AsyncIterator[tuple[Stream, Stream]]:
    """Connect two ends of a stream in this process, and close them at the end of the block.

    Args:
        address, device: as of `connected_pair`.
        options: of both ends, as of `aiordma.streams.connect_stream`.

    Returns: (client, server). On iWARP the client has to send first.

    Raises: as `connect_stream` and `listen_stream`.

    Cancellation: both ends are closed.
    """
    async with await listen_stream(address, 0, device=device, **options) as listener:
        client, server = await _both(
            connect_stream(address, listener.port, device=device, **options), listener.accept
        )
        async with client, server:
            yield client, server


@asynccontextmanager
async def serving_listener(
    handler: Callable[[Connection], Awaitable[Any]],
    address: str = "127.0.0.1",
    device: str = "software",
    **options: Any,
) -> AsyncIterator[Listener]:
    """Listen on a free port (`listener.port`), and run the handler for each connection until the
    end of the block. Its tasks are cancelled then.

    Args:
        handler: as of `Listener.serve`.
        address, device: as of `connected_pair`.
        options: as of `aiordma.listen`.

    Raises: as `aiordma.listen`; and the block's error itself, without a group.

    Cancellation: the listener and its connections are closed.
    """
    async with (
        await listen(address, 0, device=device, **options) as listener,
        serving(listener, handler),
    ):
        yield listener


class Fabric:
    """Several endpoints, each connected with each other one. `fabric[i, j]` is the end of endpoint
    `i` of its connection with endpoint `j`."""

    def __init__(self, size: int) -> None:
        self.size: int = size
        self._ends: dict[tuple[int, int], Connection] = {}

    def __getitem__(self, ends: tuple[int, int]) -> Connection:
        """Raises: KeyError: there is no such endpoint, or both are the same."""
        return self._ends[ends]

    def __len__(self) -> int:
        return self.size

    def of(self, endpoint: int) -> dict[int, Connection]:
        """Return the connections of one endpoint, by the number of the peer.

        Args:
            endpoint: its number, from 0.

        Raises:
            KeyError: there is no such endpoint.
        """
        if not 0 <= endpoint < self.size:
            raise KeyError(endpoint)
        return {peer: found for (own, peer), found in self._ends.items() if own == endpoint}


@asynccontextmanager
async def fabric(
    size: int, address: str = "127.0.0.1", device: str = "software", **options: Any
) -> AsyncIterator[Fabric]:
    """Connect endpoints in this process, each with each other one.

    Args:
        size: how many, at least 2.
        address, device, options: as of `connected_pair`.

    Raises:
        ValueError: `size` is less than 2.
        as `connected_pair`.

    Cancellation: all connections are closed.
    """
    if size < 2:
        raise ValueError(f"fabric(): size={size}: at least 2 endpoints can be connected")
    made = Fabric(size)
    async with AsyncExitStack() as stack:
        for one in range(size):
            for other in range(one):
                pair = connected_pair(address, device, **options)
                ends = await stack.enter_async_context(pair)
                made._ends[one, other], made._ends[other, one] = ends
        yield made


async def _both(
    connecting: Awaitable[End], accept: Callable[[], Awaitable[End]]
) -> tuple[End, End]:
    """Return (client, server). If a side fails, its error is raised, without a group; if both do,
    that of connecting. No end is left open."""
    connected: list[End] = []
    accepted: list[End] = []
    failed: list[Exception] = []

    async def take(scope: anyio.CancelScope) -> None:
        try:
            accepted.append(await accept())
        except Exception as error:
            failed.append(error)
            scope.cancel()

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(take, group.cancel_scope)
            try:
                connected.append(await connecting)
            except Exception as error:
                failed.insert(0, error)
                group.cancel_scope.cancel()
        if failed:
            raise failed[0]
    except BaseException:
        # A cancellation can come when only one end is connected, and nobody else has it.
        for end in connected + accepted:
            with anyio.CancelScope(shield=True):
                await end.aclose()
        raise
    finally:
        failed.clear()  # their tracebacks hold this frame
    return connected[0], accepted[0]
