"""Identifiers, each with a use of its reactor: made, and given back."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio

from aiordma._base.enums import PortSpace
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
"""For one question to a subnet manager, which InfiniBand repeats; Ethernet asks nobody."""

MOST_SECONDS = 1_000_000.0
"""As good as for ever, and still a number of milliseconds that the kernel takes."""


def milliseconds(timeout: float | None) -> int:
    """Return a time limit as librdmacm takes it."""
    return int(min(MOST_SECONDS if timeout is None else timeout, MOST_SECONDS) * 1000)


@asynccontextmanager
async def new_identifier(
    reactor: Reactor, port_space: PortSpace = PortSpace.TCP
) -> AsyncIterator[Identifier]:
    """Make an identifier, and take over one use of the reactor. If the block fails, both are given
    back; otherwise they belong to the caller."""
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
    """Destroy an identifier, and give up its use of the reactor, whatever cancels the task."""
    gone = anyio.Event()
    give_back_later(reactor, identifier, gone.set)
    await outwait(gone)


def give_back_later(
    reactor: Reactor, identifier: Identifier, then: Callable[[], object] = lambda: None
) -> None:
    """`give_back` in the background, and then `then`, on the loop's thread."""
    reactor.unsubscribe(identifier)
    reactor.destroy(identifier.close, lambda: reactor.release(then))
