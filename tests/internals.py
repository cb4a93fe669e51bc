"""What tests need below the public API: to count what is held, and to break what cannot be broken
from outside. A private module is imported here and in its own test only, so that its successor
changes two files."""

from typing import TypeAlias, overload

import anyio

import aiordma._native._engine as engine
from aiordma import Connection, Datagram, Listener, SharedReceiveQueue
from aiordma._base.arguments import Buffer
from aiordma._base.calls import check_positive_errno
from aiordma._base.enums import QueuePairAttribute, names_of
from aiordma._base.errors import cause_text, completion_error, retry_seconds
from aiordma._base.fair_queue import FairQueue
from aiordma._base.origin import Place
from aiordma._base.process import here
from aiordma._base.provider import (
    CLASSES,
    RDMA_CORE_VERSIONS,
    SOFTWARE,
    Provider,
    Requirement,
    capture,
    provider_of,
    rdma_core,
    real_devices_are_here,
    software,
)
from aiordma._base.rejections import BACKLOG_IS_FULL, NOT_ACCEPTED, NOT_SERVING, REJECT_REASONS
from aiordma._base.socket_address import SocketAddress, address_text, pack_address, unpack_address
from aiordma._base.states import NEXT_STATES, ConnectionState
from aiordma._connection import (
    connector,
    gpu_staging,
    handshakes,
    incoming,
    listener_endpoint,
)
from aiordma._connection.handshakes import MOST_HANDSHAKES, Handshakes
from aiordma._connection.incoming import IncomingRequest
from aiordma._connection.listener_endpoint import ListenerEndpoint
from aiordma._connection.listener_receives import ListenerReceives
from aiordma._connection.local_ports import MOST_ATTEMPTS
from aiordma._connection.shared_endpoint import SharedReceiveEndpoint
from aiordma._datagram import address_handles, resolution
from aiordma._datagram.endpoint import DatagramEndpoint
from aiordma._datagram.local_gid import find_gid
from aiordma._datagram.peer import UDP_QKEY
from aiordma._endpoint import endpoint, staging
from aiordma._endpoint.arrivals import Arrivals
from aiordma._endpoint.capabilities import has_immediate
from aiordma._endpoint.domain_state import start_deregistering
from aiordma._endpoint.endpoint import Endpoint
from aiordma._endpoint.peer_watch import Probe
from aiordma._endpoint.registration import make_in_thread
from aiordma._endpoint.staging import THREAD_LIMIT
from aiordma._loop import threads
from aiordma._loop.event_loop import EventLoop, current_event_loop
from aiordma._loop.polling import SPIN
from aiordma._loop.threads import (
    ACCEPTS,
    CREATES,
    DESTROYS,
    PEERS,
    THREAD_NAME,
    Once,
    start_call,
)
from aiordma._native import (
    BATCH,
    COPY_LIMIT,
    Drain,
    InFlightTable,
    OpenRequests,
    StreamPath,
    Waiter,
    call_at_end,
    call_then_run,
    ffi,
    grh_ends,
    lib,
    take_trace,
)
from aiordma._requests.pool import BufferPool, Lease
from aiordma._runtime import async_events, device_choice, hub, reactor
from aiordma._runtime.device_choice import with_device
from aiordma._runtime.hub import CompletionQueueShare, DeviceHub
from aiordma._runtime.reactor import Reactor, current_reactors
from aiordma._runtime.teardown import Phase, Teardown
from aiordma.streams import Stream, StreamListener
from aiordma.verbs import CompletionQueue, QueuePair
from aiordma.verbs.identifier import Identifier

User: TypeAlias = Connection | Datagram


@overload
def endpoint_of(user: Connection) -> Endpoint: ...
@overload
def endpoint_of(user: Datagram) -> DatagramEndpoint: ...
@overload
def endpoint_of(user: SharedReceiveQueue) -> SharedReceiveEndpoint: ...
@overload
def endpoint_of(user: Listener | StreamListener) -> ListenerEndpoint: ...
def endpoint_of(
    user: User | SharedReceiveQueue | Listener | StreamListener,
) -> Endpoint | SharedReceiveEndpoint | ListenerEndpoint:
    return user._endpoint


def hub_of(user: User | SharedReceiveQueue) -> DeviceHub:
    """The objects that all users of the device on this loop share."""
    return user._endpoint.hub


def probes_of(user: User) -> int:
    """How many entries it has reserved beyond its options, for the probe of a silent peer."""
    return int(user._endpoint.pair.has_probe_entry)


def drain_of(user: User | SharedReceiveQueue) -> Drain:
    """The hub's drain, with its counters of polls, wake-ups and calls."""
    return user._endpoint.hub.poller


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
    return sum(not region.closed for region in user._endpoint.memory.regions.values())


def has_ended(user: User) -> bool:
    """Whether its queue pair is gone and every request has ended."""
    return user._endpoint.teardown.has_ended


def is_closed(user: User) -> bool:
    """Whether a close has given everything back."""
    return user._endpoint.teardown.closed.is_set()


def fail(user: User, cause: Exception) -> None:
    """End it as a failure of the device does."""
    user._endpoint.fail(cause)


def queues_of(of: DeviceHub) -> list[CompletionQueueShare]:
    """The completion queues that the hub's users share."""
    return of._queues


def reactor_of(listener: Listener) -> Reactor:
    return listener._endpoint.reactor


def open_on(listener: Listener) -> int:
    """How many objects of its loop are open, with the listener."""
    return len(listener._endpoint.reactor.closables)


def hubs_of(listener: Listener) -> list[DeviceHub]:
    """The hubs of the listener's reactor, one for each device."""
    return list(listener._endpoint.reactor._hubs.values())


def path_of(stream: Stream) -> StreamPath:
    """The data path of a stream."""
    return stream._path


def requests_of(listener: Listener) -> FairQueue[IncomingRequest]:
    """The requests that wait for the program."""
    return listener._endpoint.requests


def kept_queues(listener: Listener) -> list[SharedReceiveEndpoint]:
    """The shared receive queues that it has made for its connections, and not dropped."""
    return list(listener._endpoint.receives._made.values())


def handshakes_of(listener: Listener) -> Handshakes:
    """The accepted connections whose handshake has not finished."""
    return listener._endpoint.handshakes


def handshakes_under_way(listener: Listener) -> int:
    """How many handshakes are in progress, or have ended and were not taken."""
    found = handshakes_of(listener)
    return len(found._running) + len(found._finished)


def calls_under_way() -> int:
    """Return how many calls of all event loops wait for a worker or run."""
    return sum(lane.calls for lane in (PEERS, CREATES, ACCEPTS, DESTROYS))


async def close_if_unused(one: Reactor) -> None:
    """Close the reactor if nothing uses it, and wait for it. The next object opens another one."""
    one._close_if_unused()
    if one.ended:
        await one._closed.wait()


async def close_unused_reactors() -> None:
    """Close the running loop's reactors that nothing uses, to count what is left. Calls under way
    in worker threads are waited for."""
    for each in current_reactors():
        while each.loop.calls:
            await anyio.sleep(0.001)
        await close_if_unused(each)
