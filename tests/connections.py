"""Both ends of a connection in one process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio

import aiordma


async def connect_to(
    listener: aiordma.Listener, address: str, **options: Any
) -> tuple[aiordma.Connection, aiordma.Connection]:
    """Connect to a listener, which accepts meanwhile. Return (client, server)."""
    accepted: list[aiordma.Connection] = []

    async def accept() -> None:
        accepted.append(await listener.accept())

    async with anyio.create_task_group() as group:
        group.start_soon(accept)
        client = await aiordma.connect(address, listener.port, **options)
    return client, accepted[0]


@asynccontextmanager
async def connected(
    address: str, *, server: dict[str, Any] | None = None, client: dict[str, Any] | None = None
) -> AsyncIterator[tuple[aiordma.Connection, aiordma.Connection]]:
    """Yield (client, server), connected with these options; both are closed at the end."""
    async with await aiordma.listen(address, 0, **(server or {})) as listener:
        ours, theirs = await connect_to(listener, address, **(client or {}))
        async with ours, theirs:
            yield ours, theirs
