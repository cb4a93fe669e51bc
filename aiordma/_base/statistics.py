"""Snapshots of counters: values without behaviour. Counters only grow, except those that are said
to be a present number."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from typing import Any, Self

from aiordma._base.enums import WorkCompletionOpcode, WorkCompletionStatus

RequestCounters = tuple[tuple[int, int, int, int, int, int, dict[int, int], dict[int, int]], int]
"""The counters of OpenRequests, and how often a coroutine has waited for a slot."""


def _status(number: int) -> WorkCompletionStatus:
    try:
        return WorkCompletionStatus(number)
    except ValueError:  # a status of a newer device
        return WorkCompletionStatus.GENERAL_ERR


def added(one: Any, other: Any) -> Any:
    """Return the sum of two counters: of numbers, of numbers by key, or of each field."""
    if isinstance(one, int):
        return one + other
    if isinstance(one, Mapping):
        # By the keys: without memory, Python 3.11 crashes where it makes an iterator of the items.
        return {key: one.get(key, 0) + other.get(key, 0) for key in sorted({*one, *other})}
    names = [each.name for each in fields(one)]
    return replace(one, **{each: added(getattr(one, each), getattr(other, each)) for each in names})


def summed(all_counted: Iterable[RequestCounters]) -> RequestCounters:
    """Return the sum of counters."""
    numbers, waited = [0] * 6, 0
    completed, failed = Counter[int](), Counter[int]()
    for counters, waits in all_counted:
        for place, count in enumerate(counters[:6]):
            numbers[place] += count
        for number, count in counters[6].items():
            completed[number] += count
        for number, count in counters[7].items():
            failed[number] += count
        waited += waits
    one, two, three, four, five, six = numbers
    return (one, two, three, four, five, six, completed, failed), waited


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatistics:
    """Counters of work requests. `posted_sends + posted_receives` is always `in_flight`, plus
    `discarded`, plus `flushed`, plus all of `completed` and `failed`.

    The bytes are those of requests that completed without an error. What a peer reads from this
    side's memory, or writes to it without immediate data, is not counted: the device does it, and
    reports nothing.
    """

    posted_sends: int = 0
    """Requests on the send queue that the device has accepted: messages, one-sided operations,
    binds and invalidations. Also those that aiordma posts itself (keepalive)."""
    posted_receives: int = 0
    """Receives that the device has accepted, including pooled receives."""
    in_flight: int = 0
    """A present number: posted requests that have not ended."""
    completed: Mapping[WorkCompletionOpcode, int] = field(default_factory=dict)
    """Requests that completed without an error, by the opcode of their completion."""
    failed: Mapping[WorkCompletionStatus, int] = field(default_factory=dict)
    """Requests that completed with an error, by its status; not those that were flushed."""
    flushed: int = 0
    """Requests of the program that were flushed (WR_FLUSH_ERR), because the connection ended."""
    discarded: int = 0
    """Requests that ended without a completion, because their queue was destroyed before the device
    had flushed them; or unsignaled ones, because the last request of their chain was flushed; or
    receives that aiordma had posted itself, because the connection ended."""
    bytes_sent: int = 0
    """The bytes of messages and WRITEs."""
    bytes_received: int = 0
    """The bytes of receives (`byte_len`: of a datagram, with its 40-byte header; of a WRITE with
    immediate data, the bytes that the peer wrote) and of READs."""
    queue_full_waits: int = 0
    """How often a coroutine waited because its queue had no free slot (max_send_wr)."""

    @classmethod
    def _of(cls, counted: RequestCounters) -> Self:
        """Return the statistics of counters."""
        counters, waits = counted
        completed, failed = counters[6], dict[WorkCompletionStatus, int]()
        for number in counters[7]:
            status = _status(number)
            failed[status] = failed.get(status, 0) + counters[7][number]
        return cls(
            posted_sends=counters[0],
            posted_receives=counters[1],
            in_flight=counters[2],
            discarded=counters[3],
            bytes_sent=counters[4],
            bytes_received=counters[5],
            completed={WorkCompletionOpcode(each): completed[each] for each in sorted(completed)},
            flushed=failed.pop(WorkCompletionStatus.WR_FLUSH_ERR, 0),
            failed={each: failed[each] for each in sorted(failed)},
            queue_full_waits=waits,
        )

    @classmethod
    def _sum(cls, all_counted: Iterable[RequestCounters]) -> Self:
        """Return the statistics of the sum of counters."""
        return cls._of(summed(all_counted))


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerStatistics:
    """Counters of a listener's connection requests."""

    connection_requests: int = 0
    """Connection requests that arrived."""
    waiting: int = 0
    """A present number: requests in the backlog."""
    established: int = 0
    """Connections that were accepted and established."""
    rejected: int = 0
    """Requests that the program rejected."""
    backlog_full: int = 0
    """Requests that the listener rejected because its backlog was full."""
    failed: int = 0
    """Requests whose accept failed or was cancelled: for instance, because the peer withdrew, or
    did not finish in time."""
    without_handshake: int = 0
    """Peers that connected by TCP and sent no handshake of iWARP: plain TCP clients, port scans,
    health checks. Only the software device reports them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStatistics:
    """Counters of one device in this process: of all event loops, and of all objects that use or
    have used it."""

    requests: RequestStatistics = RequestStatistics()
    """The requests of all connections, datagram sockets and shared receive queues."""
    queues: int = 0
    """A present number: connections, datagram sockets and shared receive queues that have not
    ended."""
    polls: int = 0
    """How often the completion queues were polled."""
    wakes: int = 0
    """How often a completion channel woke its event loop."""
    completion_events: int = 0
    """Completion events that were taken from the channels."""
    completions: int = 0
    """Completions that were polled."""
    registration_cache_hits: int = 0
    """How often a registration of a large array was used again (`RegistrationCache.hits`)."""
    registration_cache_misses: int = 0
    """How often a large array was registered for the cache."""
    refused_accesses: int = 0
    """Connections that ended because the device refused an access of the peer's to local memory, as
    far as the device reports it (QP_ACCESS_ERR)."""

    @classmethod
    def _sum(cls, all_statistics: Iterable["DeviceStatistics"]) -> "DeviceStatistics":
        total: DeviceStatistics = reduce(added, all_statistics, cls())
        return total
