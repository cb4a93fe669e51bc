"""Rails: several connections to one peer, over which blocks are spread."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Unpack

import anyio
from anyio.abc import AsyncResource

from aiordma._base.enums import Access
from aiordma._base.errors import RdmaError, cause_text, detached
from aiordma._base.opening import opens
from aiordma._base.options import ConnectionKeywords, ConnectionOptions
from aiordma._connection.blocks import Blocks, numbers
from aiordma._connection.connection import Connection
from aiordma._connection.connector import connect
from aiordma.verbs import RegistrableMemory
from aiordma.verbs.memory import MemoryRegion

logger: logging.Logger = logging.getLogger("aiordma")

MOST_AT_ONCE = 256
"""Blocks that a rail takes at a time."""
SHARES = 4
"""So many times, at least, each rail takes some: a slow one then takes fewer."""


class Rails(AsyncResource):
    """Several connections to one peer, made by `open_rails`: over several devices or ports, or over
    one. Each block goes over one of them; a rail that is slow moves fewer.

    If a rail breaks, all blocks that it has had in this call are moved again over the others, also
    those that were complete: on siw, a complete WRITE has only reached the local TCP. (One that
    breaks after its last block of the call can lose bytes there, unnoticed.) It is used no more:
    `broken` has its error, and the log a warning. Such a block can be written twice, with the same
    bytes. So change its source only once the transfer is complete, and reuse its place at the peer
    only once the peer's side of the broken connection has ended, too.
    """

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = tuple(connections)
        self._broken: dict[Connection, RdmaError] = {}

    def __repr__(self) -> str:
        return f"<Rails of {len(self._connections)}, {len(self._broken)} broken>"

    @property
    def connections(self) -> tuple[Connection, ...]:
        """The connections, in the order of the addresses, the broken ones included."""
        return self._connections

    @property
    def broken(self) -> dict[Connection, RdmaError]:
        """The error of each connection that broke during a transfer; a copy."""
        return dict(self._broken)

    def register(
        self, buffer: RegistrableMemory, access: Access | None = None
    ) -> tuple[MemoryRegion, ...]:
        """Register memory for each connection, as `Connection.register` does.

        Args:
            buffer, access: as of `Connection.register`.

        Returns:
            The regions, in the order of `connections`.

        Raises: as `Connection.register`.
        """
        return tuple(each.register(buffer, access) for each in self._connections)

    async def write_blocks(
        self, blocks: Sequence[Blocks], *, progress: Callable[[int], object] | None = None
    ) -> None:
        """WRITE blocks of memory here into the peer's, over all rails.

            blocks = [Blocks(ours, theirs, here, there, 65536) for ours, theirs in zip(...)]

        Args:
            blocks: for each connection, in their order, the same blocks: with the memory as that
                connection has it registered, and as its peer describes it.
            progress: called with the completed bytes, now and then and at the end; less than before
                when a rail has broken. What it raises is logged. None: nothing is called.

        Raises:
            RdmaError: all rails are broken; it is the error of the last one.
            TypeError, ValueError: a block is invalid; or there is not one `Blocks` for each
                connection, or they have different numbers of blocks.

        Cancellation: as of `BlockTransfer`.
        """
        await self._move("write_blocks", blocks, progress)

    async def read_blocks(
        self, blocks: Sequence[Blocks], *, progress: Callable[[int], object] | None = None
    ) -> None:
        """READ blocks of the peer's memory into memory here, over all rails.

        Args:
            blocks, progress: as of `write_blocks`.

        Raises: as `Rails.write_blocks`.

        Cancellation: as of `BlockTransfer`.
        """
        await self._move("read_blocks", blocks, progress)

    async def _move(
        self, call: str, blocks: Sequence[Blocks], progress: Callable[[int], object] | None
    ) -> None:
        connections = self._connections
        if len(blocks) != len(connections):
            raise ValueError(
                f"{call}(): blocks for {len(blocks)} connections, and there are {len(connections)}"
            )
        offsets = [numbers(call, each) for each in blocks]
        counts = {len(ours) for ours, _, _ in offsets}
        if len(counts) > 1:
            raise ValueError(f"{call}(): {sorted(counts)} blocks: give each connection the same")
        count = counts.pop()
        step = max(1, min(MOST_AT_ONCE, count // (SHARES * len(connections))))
        left = deque(range(0, count, step))
        done: dict[int, int] = {}
        failures: list[Exception] = []

        def report(start: int, completed: int) -> None:
            done[start] = completed
            if progress is not None:
                progress(sum(done.values()))

        async def serve(rail: int) -> None:
            move = getattr(connections[rail], call)
            ours, theirs, lengths = offsets[rail]
            local, remote = blocks[rail].local, blocks[rail].remote
            begun: list[int] = []
            while left:
                start = left.popleft()
                begun.append(start)
                part = slice(start, start + step)
                some = Blocks(local, remote, ours[part], theirs[part], lengths[part])
                try:
                    await move(some, progress=partial(report, start))
                except Exception as error:
                    if (
                        not isinstance(error, RdmaError)
                        or connections[rail]._endpoint.cause is None
                    ):
                        failures.append(error)  # by an argument of the program's, or the device
                        left.clear()
                        return
                    left.extend(begun)
                    for start in begun:
                        done.pop(start, None)
                    self._break(connections[rail], error)
                    return

        while left:
            rails = [i for i, each in enumerate(connections) if each not in self._broken]
            if not rails:
                raise detached([*self._broken.values()][-1])
            async with anyio.create_task_group() as group:
                for rail in rails:
                    group.start_soon(serve, rail)
        if failures:
            raise detached(failures.pop())

    def _break(self, connection: Connection, error: RdmaError) -> None:
        self._broken[connection] = error
        alive = len(self._connections) - len(self._broken)
        logger.warning("%r broke, and %d rails go on: %s", connection, alive, cause_text(error))

    async def aclose(self) -> None:
        """Close all connections.

        Raises: as `Connection.aclose`.

        Cancellation: as of `Connection.aclose`.
        """
        async with anyio.create_task_group() as group:
            for connection in self._connections:
                group.start_soon(connection.aclose)


@opens
async def open_rails(
    addresses: Sequence[tuple[str, int]],
    *,
    sources: Sequence[tuple[str, int] | None] | None = None,
    timeout: float | None = 30.0,
    device: str = "auto",
    options: ConnectionOptions | None = None,
    **keywords: Unpack[ConnectionKeywords],
) -> Rails:
    """Connect to a peer several times, one connection after the other. Await the call, or enter it
    with `async with`.

    Args:
        addresses: the (host, port) of each connection: of the peer's interfaces, or the same ones.
        sources: the local (host, port) of each connection, which chooses its device, or None. None:
            any.
        timeout: seconds for each connection; None: no limit.
        device, options, receive_buffers, receive_size, peer_timeout, keepalive: as of `connect`.

    Raises:
        as `connect`.
        ValueError: there are no addresses, or not as many sources.

    Cancellation: nothing is left.
    """
    if not addresses:
        raise ValueError("open_rails(): addresses: none: give at least one")
    if sources is None:
        sources = [None] * len(addresses)
    if len(sources) != len(addresses):
        raise ValueError(f"open_rails(): {len(sources)} sources and {len(addresses)} addresses")
    async with AsyncExitStack() as stack:
        connections = [
            await stack.enter_async_context(
                connect(
                    host,
                    port,
                    source=source,
                    timeout=timeout,
                    device=device,
                    options=options,
                    **keywords,
                )
            )
            for (host, port), source in zip(addresses, sources, strict=True)
        ]
        stack.pop_all()
    return Rails(connections)
