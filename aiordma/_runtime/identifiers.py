"""Creates and destroys identifiers. Each identifier counts as one user of its reactor."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from aiordma._base.enums import PortSpace
from aiordma._base.provider import Provider
from aiordma._loop.ending import end
from aiordma._loop.threads import Once, outwait
from aiordma._runtime.reactor import Reactor, acquire_reactor
from aiordma.verbs.identifier import Identifier

__all__ = (
    "ROUTE_TIMEOUT_MS",
    "give_back",
    "give_back_later",
    "milliseconds",
    "new_identifier",
    "release_surely",
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
    where: Provider | Reactor, port_space: PortSpace = PortSpace.TCP
) -> AsyncIterator[tuple[Reactor, Identifier]]:
    """Create an identifier, and count it as a user of its reactor. If the block fails, destroy the
    identifier and release the reactor. Otherwise both belong to the caller.

    Args:
        where: the reactor, or the provider of the running loop's reactor.
        port_space: the identifier's.

    Raises:
        as `acquire_reactor`.
        VerbsCallError: librdmacm refused.
    """
    # Here, because without memory for the block itself, the caller's use would be lost.
    if isinstance(where, Reactor):
        where.retain()
        reactor = where
    else:
        reactor = await acquire_reactor(where)
    try:
        gone = Once(reactor.loop)
        notify = gone.set  # before: nothing may fail once the identifier is to be given back
        identifier = Identifier(reactor.channel, port_space)
    except BaseException:
        release_surely(reactor)
        raise
    try:
        yield reactor, identifier
    except BaseException:
        give_back_later(reactor, identifier, notify)
        await outwait(gone)
        raise


async def give_back(reactor: Reactor, identifier: Identifier) -> None:
    """Destroy an identifier and release its reactor, and wait for it, also if the task is
    cancelled."""
    try:
        gone = Once(reactor.loop)
        notify = gone.set
    except MemoryError:
        give_back_later(reactor, identifier)
        raise
    give_back_later(reactor, identifier, notify)
    await outwait(gone)


def release_surely(reactor: Reactor) -> None:
    """Release a reactor. If there is no memory for this, it is done later."""
    try:
        reactor.release()
    except MemoryError:
        end(reactor.loop, reactor.release)


def give_back_later(
    reactor: Reactor, identifier: Identifier, then: Callable[[], object] = lambda: None
) -> None:
    """Destroy an identifier and release its reactor in the background. Then call `then` on the
    loop's thread, as a step of an Ending. If there is no memory for this, it is done later."""
    try:
        _give_back(reactor, identifier, then)
    except MemoryError:
        end(reactor.loop, partial(_give_back, reactor, identifier, then))


def _give_back(reactor: Reactor, identifier: Identifier, then: Callable[[], object]) -> None:
    reactor.unsubscribe(identifier)
    reactor.destroy(identifier.close, closed=then)
