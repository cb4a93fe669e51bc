"""Queue pairs in multicast groups of their identifier: a group that cannot be left does not hide
that the driver refuses to destroy the queue pair."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from aiordma import CmEventType, EventChannel, Identifier, PortSpace, QueuePairType
from aiordma._base.errors import VerbsCallError
from aiordma._base.provider import software
from aiordma.testing import Faults, software_objects
from aiordma.verbs import Capacity, CompletionQueue, MemoryRegion, ProtectionDomain, QueuePair
from tests.waiting import wait_until

pytestmark = pytest.mark.natively

GROUP = "239.7.7.7"


@contextmanager
def member() -> Iterator[tuple[Identifier, QueuePair]]:
    """An identifier that is in a group, and its queue pair. Nothing is left behind the block."""
    before = objects()
    with EventChannel(software()) as channel:
        identifier = Identifier(channel, PortSpace.UDP)
        identifier.bind("127.0.0.1", 0)
        with identifier.context() as context:
            domain, queue = ProtectionDomain(context), CompletionQueue(context, 8)
            pair = identifier.create_queue_pair(domain, queue, queue, Capacity(), QueuePairType.UD)
            identifier.join_multicast(GROUP)
            events: list[CmEventType] = []

            def arrived() -> list[CmEventType]:
                events.extend(each.type for each in channel.events())
                return events

            wait_until(arrived)
            assert events == [CmEventType.MULTICAST_JOIN]
            yield identifier, pair
    assert objects() == before


def objects() -> dict[str, int]:
    """The device's objects, without librdmacm's context, which stays open for the process."""
    return {**software_objects(), "contexts": 0}


def test_refused_queue_pair_stays_open_if_leaving_the_group_fails_too() -> None:
    with member() as (identifier, pair):
        memory = bytearray(4096)
        region = MemoryRegion(pair.domain, memory)
        pair.post_recv(1, [region[:]])
        with Faults() as faults:
            faults.refuse_call("leave_multicast", errno.EADDRNOTAVAIL, times=0)
            refusal = faults.refuse_call("destroy_qp", errno.EBUSY, times=0)
            for number, thing in enumerate((pair, pair, identifier, pair.domain), 1):
                with pytest.raises(VerbsCallError, match="ibv_destroy_qp"):
                    thing.close()
                assert refusal.struck == number
                assert (pair.closed, identifier.closed) == (False, False)
                assert software_objects()["queue_pairs"] == 1
        identifier.close()
        assert (pair.closed, identifier.closed) == (True, True)


def test_group_that_could_not_be_left_is_left_by_the_next_close() -> None:
    with member() as (identifier, pair):
        with Faults() as faults:
            leaving = faults.refuse_call("leave_multicast", errno.ENOBUFS, times=1)
            faults.refuse_call("destroy_qp", errno.EBUSY, times=1)
            with pytest.raises(VerbsCallError, match="ibv_destroy_qp"):
                pair.close()
            assert leaving.struck == 1
            leaving = faults.refuse_call("leave_multicast", errno.ENOBUFS, times=1)
            with pytest.raises(VerbsCallError, match="rdma_leave_multicast"):
                pair.close()  # the queue pair is destroyed nevertheless
            assert leaving.struck == 1
        assert pair.closed
        assert software_objects()["queue_pairs"] == 0
        identifier.close()
