"""Which thread serves a software device's sockets: the program's while it polls often, the engine
as soon as it does not; and the answers that travel with the program's own messages."""

import os
import select
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import count

import pytest

from aiordma import Access, MemoryRegion
from aiordma.verbs import CompletionChannel, CompletionQueue, QueuePairState
from tests.internals import ffi
from tests.unit.engine_thread import EngineThread
from tests.unit.software_device import Aside, take_event
from tests.unit.stream_peer import (
    READ_REQUEST,
    READ_RESPONSE,
    SEND,
    TERMINATE,
    Wire,
    tagged,
    untagged,
)
from tests.waiting import wait_until

WRITE = 0
PATIENCE = 10.0
ROUNDS = 60  # so that one in which the test itself was held up does not matter


class Talk:
    """A connection whose peer, the test, sends messages."""

    def __init__(self, stack: ExitStack, *, has_channel: bool = True) -> None:
        self.wire = Wire(stack, has_channel=has_channel)
        self.wire.peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.region = self.wire.region(bytearray(64))
        self.sent = self.asked = 0

    @property
    def channel(self) -> CompletionChannel:
        assert self.wire.events is not None
        return self.wire.events

    def say(self, *, and_ask: bool = False) -> None:
        """A message comes, and a word is asked for behind it."""
        self.wire.pair.post_recv(1, [self.region[:]])
        self.sent += 1
        frames = untagged(SEND, 0, self.sent, b"hello")
        if and_ask:
            self.asked += 1
            frames += untagged(READ_REQUEST, 1, self.asked, struct.pack(">IQIIQ", 7, 0, 0, 0, 0))
        self.wire.peer.sendall(frames)

    def read(self, region: MemoryRegion) -> None:
        """The peer asks for 8 bytes."""
        self.asked += 1
        ask = struct.pack(">IQIIQ", 7, 0, 8, region.rkey, region.address)
        self.wire.peer.sendall(untagged(READ_REQUEST, 1, self.asked, ask))

    def take(self) -> None:
        """The oldest message's completion, by polling."""
        limit = time.monotonic() + PATIENCE
        while not (found := self.wire.queue.poll(1)):
            assert time.monotonic() < limit
        assert [one.ok for one in found] == [True]

    def answer(self) -> None:
        """A message goes the other way, and the peer has it."""
        self.wire.send(2, self.region)
        while self.wire.hear().operation != SEND:
            pass
        word = self.wire.hear()
        assert word.operation == READ_REQUEST
        self.wire.peer.sendall(tagged(READ_RESPONSE, word.sink, 0))
        self.take()

    def chat(self, rounds: int = 12) -> None:
        """So many messages come and are answered, as fast as can be."""
        for _ in range(rounds):
            self.say()
            self.take()
            self.answer()

    def is_lent(self) -> bool:
        """Whether a packet makes the descriptor readable, though no queue is armed."""
        self.say()
        lent = bool(select.select([self.channel.fd], [], [], 0.0005)[0])
        self.take()
        return lent

    def lend(self) -> None:
        """Poll often until the sockets are the program's. A busy machine takes long."""
        limit = time.monotonic() + PATIENCE
        while time.monotonic() < limit:
            self.chat()
            if self.is_lent():
                return
        raise AssertionError(f"the sockets were not lent within {PATIENCE} s")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def is_readable(channel: CompletionChannel) -> bool:
    return bool(select.select([channel.fd], [], [], 0)[0])


def waiting(peer: socket.socket) -> bool:
    """Whether something has arrived there."""
    return bool(select.select([peer], [], [], 0)[0])


# -- whose turn it is -----------------------------------------------------------------------------


def test_frequent_poller_is_woken_by_the_packet(stack: ExitStack) -> None:
    talk = Talk(stack)

    def is_taken_back() -> bool:
        time.sleep(0.02)  # a new connection is lent for a moment
        return not talk.is_lent()

    wait_until(is_taken_back)
    talk.lend()
    talk.say()
    select.select([talk.channel.fd], [], [], PATIENCE)
    assert talk.channel.events() == []  # the queue was not armed, and the packet has been read
    assert not is_readable(talk.channel)
    talk.take()


def test_vain_polls_of_another_queue_do_the_work_of_the_engine(stack: ExitStack) -> None:
    """perftest's server polls for the end of a test, while WRITEs arrive on another queue."""
    writes, number = 10, count(1)
    wire = Wire(stack)
    memory = bytearray(8)
    region = wire.region(memory, Access.LOCAL_WRITE | Access.REMOTE_WRITE)
    context = wire.domain.context
    queue = stack.enter_context(CompletionQueue(context, 1)).pointer
    poll, completion = context.pointer.ops.poll_cq, ffi.new("struct ibv_wc *")
    engine = stack.enter_context(closing(EngineThread()))

    def engine_rests() -> bool:
        """Where all processors are busy, a poll gives way, and the engine looks meanwhile."""
        before = engine.sleeps
        for _ in range(writes):
            sent = struct.pack(">Q", next(number))
            wire.peer.sendall(tagged(WRITE, region.rkey, region.address, sent))
            while memory != sent:
                for _ in range(64):
                    assert poll(queue, 1, completion) == 0
        return engine.sleeps - before < writes / 2

    wait_until(engine_rests)


def test_a_packet_that_completes_on_an_armed_queue_is_an_event_at_once(stack: ExitStack) -> None:
    talk = Talk(stack)
    talk.lend()
    for _ in range(ROUNDS):
        talk.wire.queue.request_notification()
        talk.say()
        assert select.select([talk.channel.fd], [], [], PATIENCE)[0]
        assert talk.channel.events() == [talk.wire.queue]
        assert not is_readable(talk.channel)
        talk.take()


@pytest.mark.parametrize("has_channel", [True, False], ids=["channel", "no-channel"])
def test_engine_serves_a_program_that_stops_polling(stack: ExitStack, has_channel: bool) -> None:
    talk = Talk(stack, has_channel=has_channel)
    region = talk.wire.region(bytearray(b"it works"), Access.REMOTE_READ)
    talk.chat(40)
    if has_channel:
        talk.lend()
    for _ in range(20):
        talk.read(region)
        heard = talk.wire.hear()  # by the engine: this thread polls nothing
        assert (heard.operation, heard.payload) == (READ_RESPONSE, b"it works")
    if has_channel:
        assert not is_readable(talk.channel)


def test_peer_reads_do_not_wake_the_program(stack: ExitStack) -> None:
    talk = Talk(stack)
    region = talk.wire.region(bytearray(b"it works"), Access.REMOTE_READ)
    talk.lend()
    woken = 0
    for _ in range(ROUNDS):
        talk.read(region)
        woken += bool(select.select([talk.channel.fd], [], [], 0.0005)[0])
        assert talk.channel.events() == []
        assert talk.wire.hear().operation == READ_RESPONSE
    assert woken <= 3


def test_idle_connection_wakes_no_thread(stack: ExitStack) -> None:
    talk = Talk(stack)
    talk.lend()
    engine = stack.enter_context(closing(EngineThread()))
    wait_until(lambda: engine.is_resting(0.3))


# -- other ways to wait ---------------------------------------------------------------------------


def test_edge_triggered_watcher_misses_no_event(stack: ExitStack) -> None:
    talk = Talk(stack)
    with select.epoll() as edges:
        edges.register(talk.channel.fd, select.EPOLLIN | select.EPOLLET)
        for number in range(500):
            if number % 100 == 50:
                time.sleep(0.02)  # the engine takes over
            talk.wire.queue.request_notification()
            if number % 3:
                talk.say()
            else:  # in two packets, the first of which ends nothing
                talk.wire.pair.post_recv(1, [talk.region[:]])
                talk.sent += 1
                whole = untagged(SEND, 0, talk.sent, b"hello")
                talk.wire.peer.sendall(whole[:30])
                edges.poll(0)
                assert talk.channel.events() == []
                talk.wire.peer.sendall(whole[30:])
            found: list[object] = []
            while not found:
                assert edges.poll(PATIENCE), f"message {number} was never told of"
                found += talk.channel.events()
            assert found == [talk.wire.queue]
            talk.take()


def test_a_blocking_wait_ends_with_an_event_and_not_before(stack: ExitStack) -> None:
    talk = Talk(stack)
    talk.lend()
    os.set_blocking(talk.channel.fd, True)
    pointer = talk.channel.pointer
    for _ in range(5):
        talk.chat()
        talk.wire.queue.request_notification()
        waiter = Aside(lambda: take_event(pointer))
        whole = untagged(SEND, 0, talk.sent + 1, b"hello")
        talk.sent += 1
        talk.wire.pair.post_recv(1, [talk.region[:]])
        talk.wire.peer.sendall(whole[:30])
        assert waiter.blocks(0.05)
        talk.wire.peer.sendall(whole[30:])
        assert waiter.end() == talk.wire.queue.pointer
        talk.channel.provider.ack_cq_events(talk.wire.queue.pointer, 1)
        talk.take()
    os.set_blocking(talk.channel.fd, False)


# -- answers that travel with messages ------------------------------------------------------------


def held(talk: Talk) -> None:
    """A message whose word is held back, taken by the program; it has not answered yet."""
    for _ in range(ROUNDS):
        talk.lend()
        talk.answer()
        talk.chat()
        talk.say(and_ask=True)
        talk.take()
        if not waiting(talk.wire.peer):
            return
        assert talk.wire.hear().operation == READ_RESPONSE
    raise AssertionError("no answer was ever held back")


def test_an_answer_goes_with_the_message_that_is_posted(stack: ExitStack) -> None:
    talk = Talk(stack)
    message = 20 + 64 + 4
    question = 20 + 28 + 4
    for _ in range(ROUNDS):
        held(talk)
        talk.wire.send(2, talk.region)
        packet = talk.wire.peer.recv(4096, socket.MSG_PEEK)
        heard = {one.operation: one for one in (talk.wire.hear() for _ in range(3))}
        assert set(heard) == {READ_RESPONSE, SEND, READ_REQUEST}
        talk.wire.peer.sendall(tagged(READ_RESPONSE, heard[READ_REQUEST].sink, 0))
        talk.take()
        if len(packet) == 16 + 4 + message + question:
            return
    raise AssertionError("the answers always went by themselves")


def test_an_answer_that_nothing_takes_along_goes_by_itself(stack: ExitStack) -> None:
    talk = Talk(stack)
    held(talk)  # and this thread looks no more
    assert talk.wire.hear().operation == READ_RESPONSE
    talk.say(and_ask=True)  # it waited in vain: the next does not
    talk.take()
    assert waiting(talk.wire.peer)
    assert talk.wire.hear().operation == READ_RESPONSE


def test_an_answer_waits_for_some_more_looks_of_the_program_at_most(stack: ExitStack) -> None:
    talk = Talk(stack)
    held(talk)
    for _ in range(8):
        assert talk.channel.events() == []
    assert waiting(talk.wire.peer)
    assert talk.wire.hear().operation == READ_RESPONSE


def test_an_answer_that_waits_goes_before_the_end(stack: ExitStack) -> None:
    talk = Talk(stack)
    held(talk)
    talk.wire.pair.modify(QueuePairState.ERR)
    assert talk.wire.hear().operation == READ_RESPONSE
    assert talk.wire.peer.recv(1) == b""


def test_an_answer_that_waits_takes_none_of_bytes_with_it_at_the_end(stack: ExitStack) -> None:
    """The peer asks for bytes meanwhile, and violates the protocol in the same packet."""
    for _ in range(5):
        with ExitStack() as inner:
            talk = Talk(inner)
            region = talk.wire.region(bytearray(8), Access.REMOTE_READ)
            held(talk)
            ask = struct.pack(">IQIIQ", 7, 0, 8, region.rkey, region.address)
            wrong = tagged(WRITE, region.rkey ^ 1, region.address, b"wrong")
            talk.wire.peer.sendall(untagged(READ_REQUEST, 1, talk.asked + 1, ask) + wrong)
            talk.channel.events()  # serves the sockets
            heard = [talk.wire.hear() for _ in range(2)]
            assert [one.operation for one in heard] == [READ_RESPONSE, TERMINATE]
            assert talk.wire.peer.recv(1) == b""


def test_unanswered_message_is_acknowledged_at_once(stack: ExitStack) -> None:
    talk = Talk(stack)
    for _ in range(ROUNDS):
        talk.say(and_ask=True)
        talk.take()
        assert waiting(talk.wire.peer)
        assert talk.wire.hear().operation == READ_RESPONSE
