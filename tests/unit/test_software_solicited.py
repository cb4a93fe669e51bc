"""Which completions make an event, on the software device: datagrams to oneself, some solicited."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from aiordma import MemoryRegion
from aiordma.verbs import (
    AddressHandle,
    AddressVector,
    Capacity,
    CompletionChannel,
    CompletionQueue,
    Device,
    QueuePair,
    QueuePairState,
    QueuePairType,
    SendFlag,
    WorkCompletion,
    WorkRequestOpcode,
)
from aiordma.verbs.send_work import SendWork
from tests.unit.software_device import nothing_left
from tests.waiting import wait_until

QKEY = 0x11111111
GRH = 40


@dataclass
class Loop:
    """A queue pair whose datagrams come back to it; `queue` is its receives'."""

    pair: QueuePair
    queue: CompletionQueue
    channel: CompletionChannel
    memory: MemoryRegion
    itself: AddressHandle

    def send(self, *, solicited: bool) -> None:
        """One datagram, there when this returns."""
        self.pair.post_recv(1, [self.memory[:]])
        work = SendWork(
            "UD_SEND",
            WorkRequestOpcode.SEND,
            address=self.itself,
            remote_qpn=self.pair.qp_num,
            remote_qkey=QKEY,
        )
        flags = SendFlag.SOLICITED if solicited else SendFlag(0)
        assert self.pair.post_send_chain([work], [2], [flags]) == (0, 1)
        found: list[WorkCompletion] = []

        def poll() -> bool:
            found.extend(self.queue.poll())
            return bool(found)

        wait_until(poll)
        assert [(one.wr_id, one.ok, one.byte_len) for one in found] == [(1, True, GRH)]


@contextmanager
def looped() -> Iterator[Loop]:
    with (
        nothing_left(),
        Device("software").open() as context,
        context.alloc_pd() as domain,
        CompletionChannel(context) as channel,
        CompletionQueue(context, 16) as sends,
        CompletionQueue(context, 16, channel) as queue,
        MemoryRegion(domain, bytearray(64)) as memory,
        QueuePair.create(
            domain, sends, queue, service=QueuePairType.UD, capacity=Capacity(8, 8)
        ) as pair,
    ):
        pair.modify(QueuePairState.INIT, pkey_index=0, port=1, qkey=QKEY)
        pair.modify(QueuePairState.RTR)
        pair.modify(QueuePairState.RTS, sq_psn=0)
        (local,) = [entry for entry in context.gid_table() if entry.address == "127.0.0.1"]
        vector = AddressVector(gid=local.gid, gid_index=local.index)
        with AddressHandle(domain, vector) as itself:
            yield Loop(pair, queue, channel, memory, itself)


def told(loop: Loop) -> bool:
    return loop.channel.events() == [loop.queue]


def test_armed_queue_reports_every_completion() -> None:
    with looped() as loop:
        loop.send(solicited=True)
        assert not told(loop)
        for solicited in (False, True):
            loop.queue.request_notification()
            loop.send(solicited=solicited)
            assert told(loop)
            loop.send(solicited=solicited)
            assert not told(loop)


def test_solicited_arming_reports_solicited_only() -> None:
    with looped() as loop:
        loop.queue.request_notification(solicited_only=True)
        for _ in range(3):
            loop.send(solicited=False)
            assert not told(loop)
        loop.send(solicited=True)
        assert told(loop)
        loop.send(solicited=True)
        assert not told(loop)


@pytest.mark.parametrize("order", [(False, True), (True, False)])
def test_of_two_requests_the_wider_one_holds(order: tuple[bool, bool]) -> None:
    with looped() as loop:
        for solicited_only in order:
            loop.queue.request_notification(solicited_only=solicited_only)
        loop.send(solicited=False)
        assert told(loop)
