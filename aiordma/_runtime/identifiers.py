"""Creates and destroys identifiers. Each identifier counts as one user of its reactor."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import anyio

from aiordma._base.enums import PortSpace
from aiordma._loop.ending import end
from aiordma._loop.threads import outwait
from aiordma._runtime.reactor import Reactor
from aiordma.verbs.identifier import Identifier

__all__ = (
    "ROUTE_TIMEOUT_MS",
    "give_back",
    "give_back_later",
    "milliseconds",
    "new_identifier",
)

ROUTE_TIMEOUT_MS = 2000
"""Timeout of one query to InfiniBand's subnet manager, which is repeated. Ethernet has no query."""

MOST_SECONDS = 1_000_000.0
"""Stands for no limit: a very long time that the kernel accepts in milliseconds."""


def milliseconds(timeout: float | None) -> int:
    """Return a timeout in milliseconds, for librdmacm."""
    return int(min(MOST_SECONDS if timeout is None else timeout, MOST_SECONDS) * 1000)


@asynccontextmanager
async def new_identifier(
    reactor: Reactor, port_space: PortSpace = PortSpace.TCP
) -> AsyncIterator[Identifier]:
    """Create an identifier, for a reactor that the caller has retained. If the block fails, destroy
    the identifier and release the reactor. Otherwise both belong to the caller."""
    try:
        identifier = Identifier(reactor.channel, port_space)
    except BaseException:
        reactor.release()
        raise
    try:
        yield identifier
    except BaseException:
        await give_back(reactor, identifier)
        raise


async def give_back(reactor: Reactor, identifier: Identifier) -> None:
    """Destroy an identifier and release its reactor, and wait for it, also if the task is
    cancelled."""
    gone = anyio.Event()
    give_back_later(reactor, identifier, gone.set)
    await outwait(gone)


def give_back_later(
    reactor: Reactor, identifier: Identifier, then: Callable[[], object] = lambda: None
) -> None:
    """Destroy an identifier and release its reactor in the background. Then call `then` on the
    loop's thread, as a step of an Ending. If there is no memory for this, it is done later."""
    begin = partial(reactor.destroy, identifier.close, closed=then)
    reactor.unsubscribe(identifier)
    try:
        begin()
    except MemoryError:
        end(reactor.loop, begin)
