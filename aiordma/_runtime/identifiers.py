"""Creates and destroys identifiers of the connection manager."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiordma._base.enums import PortSpace
from aiordma._base.errors import AddressError
from aiordma._base.provider import Provider, Requirement
from aiordma._loop.threads import Once, outwait
from aiordma._runtime.hub import DeviceHub
from aiordma._runtime.reactor import Reactor, reactor_of
from aiordma.verbs.identifier import Identifier

ROUTE_TIMEOUT_MS = 2000
"""Timeout of one query to InfiniBand's subnet manager, which is repeated. Ethernet has no query."""

MOST_SECONDS = 1_000_000.0
"""Stands for no limit: a very long time that the kernel accepts in milliseconds."""


def milliseconds(timeout: float | None) -> int:
    """Return a timeout in milliseconds, for librdmacm."""
    return int(min(MOST_SECONDS if timeout is None else timeout, MOST_SECONDS) * 1000)


@asynccontextmanager
async def new_identifier(
    provider: Provider, port_space: PortSpace = PortSpace.TCP
) -> AsyncIterator[tuple[Reactor, Identifier]]:
    """Create an identifier on the running loop's reactor. If the block fails, destroy it. Otherwise
    it belongs to the caller.

    Raises:
        as `reactor_of`.
        VerbsCallError: librdmacm refused.
    """
    reactor = await reactor_of(provider)
    identifier = Identifier(reactor.channel, port_space)
    try:
        yield reactor, identifier
    except BaseException:
        await drop(reactor, identifier)
        raise


async def hub_of(
    reactor: Reactor, identifier: Identifier, requirement: Requirement, what: str
) -> DeviceHub:
    """Return the hub of the device that a bound identifier has.

    Raises:
        as `Requirement.check`, whose `what` it takes, and as `Reactor.hub`.
        AddressError: the identifier has no device.
    """
    if not identifier.device_key:
        raise AddressError._unreached(f"{what}: that is not the address of an RDMA device")
    hub = await reactor.hub(identifier)
    requirement.check(hub.context.device_name, hub.context.kind, what)
    return hub


async def drop(reactor: Reactor, identifier: Identifier) -> None:
    """Destroy an identifier, and wait for it, also if the task is cancelled."""
    gone = Once(reactor.loop)
    reactor.drop(identifier, gone.set)
    await outwait(gone)
