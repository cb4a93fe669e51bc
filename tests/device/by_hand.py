"""Queue pairs connected by hand, in pairs: what the tests of the synchronous objects share."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import aiordma
from aiordma import Access
from aiordma.verbs import (
    AddressVector,
    Capacity,
    CompletionChannel,
    CompletionQueue,
    Device,
    Mtu,
    QueuePair,
    QueuePairState,
)
from tests.devices import BUILT_IN, DeviceUnderTest

GID_INDEX = 0 if BUILT_IN else 1
"""The IPv4-mapped one. On rxe, 0 is the link-local one."""
REMOTE = Access.REMOTE_READ | Access.REMOTE_WRITE


@dataclass
class End:
    """One queue pair and what it works with."""

    domain: aiordma.verbs.ProtectionDomain
    channel: CompletionChannel
    queue: CompletionQueue
    pair: QueuePair

    def connect(self, peer: "End", *, rnr_retry: int = 7, max_dest_rd_atomic: int = 1) -> None:
        self.pair.modify(QueuePairState.INIT, pkey_index=0, port=1, access=REMOTE)
        gid = self.domain.context.query_gid(1, GID_INDEX)
        self.pair.modify(
            QueuePairState.RTR,
            address=AddressVector(gid=gid, gid_index=GID_INDEX),
            path_mtu=Mtu.MTU_1024,
            dest_qp_num=peer.pair.qp_num,
            rq_psn=0,
            max_dest_rd_atomic=max_dest_rd_atomic,
            min_rnr_timer=5,
        )
        self.pair.modify(
            QueuePairState.RTS,
            sq_psn=0,
            timeout=14,
            retry_cnt=7,
            rnr_retry=rnr_retry,
            max_rd_atomic=1,
        )

    def completions(self, count: int) -> list[aiordma.verbs.WorkCompletion]:
        found: list[aiordma.verbs.WorkCompletion] = []
        while len(found) < count:
            found += self.queue.poll()
        assert len(found) == count
        return found


@contextmanager
def end_in(
    domain: aiordma.verbs.ProtectionDomain,
    shared_receive: aiordma.verbs.RawSharedReceiveQueue | None = None,
) -> Iterator[End]:
    with (
        CompletionChannel(domain.context) as channel,
        CompletionQueue(domain.context, 16, channel) as queue,
        QueuePair.create(
            domain, queue, queue, capacity=Capacity(8, 8), shared_receive=shared_receive
        ) as pair,
    ):
        yield End(domain, channel, queue, pair)


@contextmanager
def open_end(device: DeviceUnderTest) -> Iterator[End]:
    with (
        Device(device.by_hand).open() as context,
        context.alloc_pd() as domain,
        end_in(domain) as end,
    ):
        yield end


@contextmanager
def connected_pair(device: DeviceUnderTest, **options: Any) -> Iterator[tuple[End, End]]:
    with open_end(device) as one, open_end(device) as other:
        one.connect(other, **options)
        other.connect(one, **options)
        yield one, other
