"""Snapshots of counters: values without behaviour. Counters only grow, except those that are said
to be a present number."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from aiordma._base.enums import WorkCompletionOpcode, WorkCompletionStatus

__all__ = ("DeviceStatistics", "ListenerStatistics", "RequestStatistics")

_Counters = tuple[int, int, int, int, int, int, dict[int, int], dict[int, int]]


def _status(number: int) -> WorkCompletionStatus:
    try:
        return WorkCompletionStatus(number)
    except ValueError:  # a status of a newer device
        return WorkCompletionStatus.GENERAL_ERR


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatistics:
    """Counters of work requests. `posted_sends + posted_receives` is always `in_flight`, plus
    `discarded`, plus all of `completed` and `failed`.

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
    """Requests that completed with an error, by its status."""
    discarded: int = 0
    """Requests that ended without a completion, because their queue was destroyed before the device
    had flushed them; or unsignaled ones, because the last request of their chain was flushed."""
    bytes_sent: int = 0
    """The bytes of messages and WRITEs."""
    bytes_received: int = 0
    """The bytes of receives (`byte_len`: of a datagram, with its 40-byte header; of a WRITE with
    immediate data, the bytes that the peer wrote) and of READs."""
    queue_full_waits: int = 0
    """How often a coroutine waited because its queue had no free slot (max_send_wr)."""

    @classmethod
    def _of(cls, counters: _Counters, waits: int = 0) -> Self:
        """Return the statistics of the counters of OpenRequests."""
        completed: Counter[WorkCompletionOpcode] = Counter()
        for opcode, count in counters[6].items():
            completed[WorkCompletionOpcode(opcode)] += count
        failed: Counter[WorkCompletionStatus] = Counter()
        for status, count in counters[7].items():
            failed[_status(status)] += count
        return cls(
            posted_sends=counters[0],
            posted_receives=counters[1],
            in_flight=counters[2],
            discarded=counters[3],
            bytes_sent=counters[4],
            bytes_received=counters[5],
            completed=dict(sorted(completed.items())),
            failed=dict(sorted(failed.items())),
            queue_full_waits=waits,
        )

    @classmethod
    def _sum(cls, all_statistics: Iterable["RequestStatistics"]) -> Self:
        every = list(all_statistics)
        completed: Counter[WorkCompletionOpcode] = Counter()
        failed: Counter[WorkCompletionStatus] = Counter()
        for each in every:
            completed.update(each.completed)
            failed.update(each.failed)
        return cls(
            posted_sends=sum(each.posted_sends for each in every),
            posted_receives=sum(each.posted_receives for each in every),
            in_flight=sum(each.in_flight for each in every),
            discarded=sum(each.discarded for each in every),
            bytes_sent=sum(each.bytes_sent for each in every),
            bytes_received=sum(each.bytes_received for each in every),
            completed=dict(sorted(completed.items())),
            failed=dict(sorted(failed.items())),
            queue_full_waits=sum(each.queue_full_waits for each in every),
        )


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

    @classmethod
    def _sum(cls, all_statistics: Iterable["DeviceStatistics"]) -> Self:
        every = list(all_statistics)
        return cls(
            requests=RequestStatistics._sum(each.requests for each in every),
            queues=sum(each.queues for each in every),
            polls=sum(each.polls for each in every),
            wakes=sum(each.wakes for each in every),
            completion_events=sum(each.completion_events for each in every),
            completions=sum(each.completions for each in every),
            registration_cache_hits=sum(each.registration_cache_hits for each in every),
            registration_cache_misses=sum(each.registration_cache_misses for each in every),
        )
