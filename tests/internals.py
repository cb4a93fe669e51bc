"""What tests need below the public API: to count what is held, and to break what cannot be broken
from outside. The endpoint below a public object, and a listener's own, are reached here only."""

from typing import TypeAlias, overload

from aiordma import Connection, ConnectionRequest, Datagram, Listener, SharedReceiveQueue
from aiordma._base.fair_queue import FairQueue
from aiordma._connection.handshakes import Handshakes
from aiordma._connection.shared_endpoint import SharedReceiveEndpoint
from aiordma._datagram.endpoint import DatagramEndpoint
from aiordma._endpoint.arrivals import Arrivals
from aiordma._endpoint.endpoint import Endpoint
from aiordma._native import Drain
from aiordma._requests.pool import BufferPool
from aiordma._runtime.hub import CompletionQueueShare, DeviceHub
from aiordma._runtime.reactor import Reactor
from aiordma.verbs import CompletionQueue, QueuePair
from aiordma.verbs.identifier import Identifier

User: TypeAlias = Connection | Datagram


@overload
def endpoint_of(user: Connection) -> Endpoint: ...
@overload
def endpoint_of(user: Datagram) -> DatagramEndpoint: ...
@overload
def endpoint_of(user: SharedReceiveQueue) -> SharedReceiveEndpoint: ...
def endpoint_of(user: User | SharedReceiveQueue) -> Endpoint | SharedReceiveEndpoint:
    return user._endpoint


def hub_of(user: User | SharedReceiveQueue) -> DeviceHub:
    """The objects that all users of the device on this loop share."""
    return user._endpoint.hub


def probes_of(user: User) -> int:
    """How many entries it has reserved beyond its options, for the probe of a silent peer."""
    return int(user._endpoint.pair.has_probe_entry)


def drain_of(user: User | SharedReceiveQueue) -> Drain:
    """The hub's drain, with its counters of polls, wake-ups and calls."""
    return user._endpoint.hub.steps


def pool_of(user: User) -> BufferPool:
    """The hub's registered blocks."""
    return user._endpoint.hub.pool


def arrivals_of(connection: Connection) -> Arrivals:
    """What its pooled receives got, and what the engine asks for on behalf of its views."""
    return connection._messages


def unposted_of(connection: Connection) -> int:
    """The number of its pooled receives that will be posted in the next chain."""
    return connection._messages.receives.unposted


def identifier_of(user: User) -> Identifier:
    """The connection manager's identifier that it was made with."""
    identifier = user._endpoint.identifier
    assert isinstance(identifier, Identifier)
    return identifier


def queue_pair_of(user: User) -> QueuePair:
    pair = user._endpoint.pair.raw
    assert pair is not None
    return pair


def completion_queue_of(user: User) -> CompletionQueue:
    """The completion queue of its sends."""
    share = endpoint_of(user).pair._share
    assert share is not None
    return share.queue


def free_sends(user: User) -> int:
    """Free slots of the send queue."""
    return user._endpoint.work.sends.slots.free


def open_regions(user: User) -> int:
    """How many regions it remembers that are not closed."""
    return sum(not region.closed for region in user._endpoint.regions.values())


def has_ended(user: User) -> bool:
    """Whether its queue pair is gone and every request has ended."""
    return user._endpoint.teardown.has_ended


def is_closed(user: User) -> bool:
    """Whether a close has given everything back."""
    return user._endpoint.teardown.closed.is_set()


def fail(user: User, cause: Exception) -> None:
    """End it as a failure of the device does."""
    user._endpoint.fail(cause)


def queues_of(hub: DeviceHub) -> list[CompletionQueueShare]:
    """The completion queues that the hub's users share."""
    return hub._queues


def reactor_of(listener: Listener) -> Reactor:
    return listener._reactor


def open_on(listener: Listener) -> int:
    """How many objects of its loop are open, with the listener."""
    return len(listener._reactor.closables)


def hubs_of(listener: Listener) -> list[DeviceHub]:
    """The hubs of the listener's reactor, one for each device."""
    return list(listener._reactor._hubs.values())


def requests_of(listener: Listener) -> FairQueue[ConnectionRequest]:
    """The requests that wait for the program."""
    return listener._requests


def kept_queues(listener: Listener) -> list[SharedReceiveEndpoint]:
    """The shared receive queues that it has made for its connections, and not dropped."""
    return list(listener._receives._made.values())


def handshakes_of(listener: Listener) -> Handshakes:
    """The accepted connections whose handshake has not finished."""
    return listener._handshakes
