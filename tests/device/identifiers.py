"""Identifiers of the connection manager, one call and one event at a time."""

import select
from contextlib import ExitStack

from aiordma.verbs import CmEvent, CmEventType, EventChannel, Identifier
from tests.devices import ADDRESS


def next_event(channel: EventChannel) -> CmEvent:
    """The next event; pytest's timeout is the limit."""
    while True:
        select.select([channel.fd], [], [])
        for event in channel.events():
            return event


def expect(channel: EventChannel, kind: CmEventType) -> CmEvent:
    event = next_event(channel)
    assert event.type is kind
    return event


def no_event(channel: EventChannel) -> bool:
    return list(channel.events()) == []


def resolved(channel: EventChannel, port: int, stack: ExitStack) -> Identifier:
    identifier = stack.enter_context(Identifier(channel))
    identifier.resolve_address(ADDRESS, port, None, 5000)
    expect(channel, CmEventType.ADDR_RESOLVED)
    identifier.resolve_route(5000)
    expect(channel, CmEventType.ROUTE_RESOLVED)
    return identifier


def listening(channel: EventChannel, stack: ExitStack) -> tuple[Identifier, int]:
    listener = stack.enter_context(Identifier(channel))
    listener.bind(ADDRESS, 0)
    listener.listen(4)
    assert listener.local_address is not None
    return listener, listener.local_address[1]
