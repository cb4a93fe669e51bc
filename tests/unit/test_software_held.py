"""What the software device keeps in memory for its connections: bytes that it holds back because a
message finds no receive, buffers, and their limit for all connections together."""

import os
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import pytest

from aiordma import Access, RemoteMemory
from aiordma.verbs import CmEventType, WorkCompletionStatus, WorkRequestOpcode
from tests.internals import lib, software
from tests.unit.mpa_peer import expect
from tests.unit.software_device import memory, take_async_event
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

pytestmark = pytest.mark.slow

SUCCESS = WorkCompletionStatus.SUCCESS
KIB, MIB = 1 << 10, 1 << 20
ONE_KEEPS = 4 * MIB
"""What a connection that waits for no answer may keep (SW_KEPT_SIZE)."""


@contextmanager
def limited(size: int) -> Iterator[None]:
    before = memory("most_held")
    lib.aiordma_software_limit_held(size)
    try:
        yield
    finally:
        lib.aiordma_software_limit_held(before)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Nothing is borrowed after a test, whatever became of its connections."""
    with ExitStack() as made:
        yield made
    assert memory("held") == memory("blocks") == 0


def message(number: int, payload: bytes) -> bytes:
    """A SEND whose CRC is 0, since none was agreed on: that of Python would take long."""
    header = struct.pack(">BBIIII", 0x41, 0x40 | SEND, 0, 0, number, 0)
    whole = struct.pack(">H", len(header) + len(payload)) + header + payload
    return whole + bytes(-len(whole) % 4 + 4)


class Flood:
    """Sends numbered messages without a receive until the device takes no more."""

    def __init__(self, wire: Wire, size: int) -> None:
        self._peer, self._size = wire.peer, size
        self._left = memoryview(b"")
        self.number = 0
        self.sent = 0

    def send(self, most: int = 1 << 30) -> bool:
        """Send so many bytes more, or until TCP takes none. Whether it took all."""
        goal = self.sent + most
        self._peer.settimeout(0.5)
        try:
            while self.sent < goal:
                if not self._left:
                    count = max(1, 60000 // self._size)
                    numbers = range(self.number + 1, self.number + count + 1)
                    payload = partial(int.to_bytes, length=self._size, byteorder="big")
                    self._left = memoryview(
                        b"".join([message(number, payload(number)) for number in numbers])
                    )
                    self.number += count
                taken = self._peer.send(self._left)
                self.sent += taken
                self._left = self._left[taken:]
        except TimeoutError:
            return False
        finally:
            self._peer.settimeout(10)
        return True

    def finish(self) -> None:
        """Send the rest of a message that TCP did not take."""
        self._peer.sendall(self._left)
        self._left = memoryview(b"")


def ask(wire: Wire) -> Callable[[], None]:
    """Post a READ that the peer does not answer. Return a function with which it does."""
    region = wire.region(bytearray(64))
    wire.send(99, region, opcode=WorkRequestOpcode.RDMA_READ, remote=RemoteMemory(0, 64, 0))
    question = wire.hear()
    assert question.operation == READ_REQUEST

    def answer() -> None:
        wire.peer.sendall(tagged(READ_RESPONSE, question.sink, 0, bytes(64)))
        assert wire.completions(1) == [(99, SUCCESS)]

    return answer


def drain_async_events(wire: Wire) -> list[int]:
    found = []
    while (event := take_async_event(wire.domain.context.pointer))[0]:
        found.append(event[0])
    return found


def receive_in_order(wire: Wire, count: int, size: int) -> None:
    buffer = bytearray(size)
    region = wire.region(buffer)
    for number in range(1, count + 1):
        wire.pair.post_recv(number, [region[:]])
        assert wire.completions(1) == [(number, SUCCESS)]
        assert int.from_bytes(buffer, "big") == number


# -- what is held back ----------------------------------------------------------------------------


def test_held_messages_are_received_in_order(stack: ExitStack) -> None:
    wire = Wire(stack)
    flood = Flood(wire, 3000)
    flood.send(2 * MIB)
    receive_in_order(wire, 2 * MIB // 3100, 3000)


@pytest.mark.parametrize("size", [40, 3000, 60000])
def test_nearly_full_buffer_moves_few_bytes(stack: ExitStack, size: int) -> None:
    wire = Wire(stack)
    flood = Flood(wire, size)
    assert not flood.send()
    held, moved = memory("held"), memory("moved")
    assert held > ONE_KEEPS / 2
    count = min(300, MIB // size)
    receive_in_order(wire, count, size)
    # Every receive takes one message more: the waiting ones are not moved for that.
    assert memory("moved") - moved <= 4 * count * size + 65536
    assert memory("held") > ONE_KEEPS / 2


def test_idle_connection_borrows_nothing(stack: ExitStack) -> None:
    wire = Wire(stack)
    region = wire.region(bytearray(64))
    wire.pair.post_recv(1, [region[:]])
    whole = message(1, b"hello")
    wire.peer.sendall(whole[:9])
    wait_until(lambda: memory("blocks") == 1)  # a part of a frame is kept
    wire.peer.sendall(whole[9:])
    assert wire.completions(1) == [(1, SUCCESS)]
    assert memory("blocks") == 0


def test_answers_with_sums_borrow_while_they_wait(stack: ExitStack) -> None:
    wire = Wire(stack, crc=True, backlog=4096)
    region = wire.region(bytearray(8 * MIB), Access.REMOTE_READ)
    payload = struct.pack(">IQIIQ", 9, 0, len(region), region.rkey, region.address)
    wire.peer.sendall(untagged(READ_REQUEST, 1, 1, payload))
    wait_until(lambda: memory("blocks") > 1)
    left = len(region)
    while left:
        heard = wire.hear()
        assert heard.operation == READ_RESPONSE
        left -= len(heard.payload)
    wait_until(lambda: memory("blocks") == 0)


def test_many_questions_are_answered_in_order(stack: ExitStack) -> None:
    wire = Wire(stack, backlog=4096)
    memory_read = wire.region(bytearray(range(256)) * 4096, Access.REMOTE_READ)
    for sink in range(1, 14):  # more than one growth of the ring, and while it is not at its begin
        where = memory_read.address + sink
        size = 500_000 if sink < 4 else 5
        payload = struct.pack(">IQIIQ", sink, 0, size, memory_read.rkey, where)
        wire.peer.sendall(untagged(READ_REQUEST, 1, sink, payload))
    for sink in range(1, 14):
        got = b""
        while len(got) < (500_000 if sink < 4 else 5):
            heard = wire.hear()
            assert int.from_bytes(heard.header[:4], "big") == sink
            got += heard.payload
        assert got[:5] == bytes(range(sink, sink + 5))


# -- the limit for all ----------------------------------------------------------------------------


def test_all_connections_hold_back_half_the_limit(stack: ExitStack) -> None:
    with limited(8 * MIB):
        wires = [Wire(stack) for _ in range(3)]
        floods = [Flood(wire, 3000) for wire in wires]
        for flood in floods:
            assert not flood.send()
        assert 3 * MIB < memory("held") <= 4 * MIB
        # All of them work on, also those for which nothing is held back.
        for wire in wires:
            receive_in_order(wire, 50, 3000)
        assert memory("held") <= 4 * MIB


def test_answer_overtakes_where_others_hold_all(stack: ExitStack) -> None:
    with limited(16 * MIB):
        crowd = [Wire(stack) for _ in range(3)]
        for wire in crowd:
            assert not Flood(wire, 3000).send()
        assert memory("held") > 7 * MIB
        wire = Wire(stack)
        flood = Flood(wire, 3000)
        assert not flood.send()
        region = wire.region(bytearray(64))
        wire.send(1, region, opcode=WorkRequestOpcode.RDMA_READ, remote=RemoteMemory(0, 64, 0))
        question = wire.hear()
        flood.finish()
        wire.peer.sendall(tagged(READ_RESPONSE, question.sink, 0, bytes(64)))
        assert wire.completions(1) == [(1, SUCCESS)]
        assert not any(list(each.channel.events()) for each in crowd)


def test_unanswered_read_alone_reaches_the_limit(stack: ExitStack) -> None:
    with limited(8 * MIB):
        wire = Wire(stack)
        drain_async_events(wire)
        ask(wire)
        with suppress(ConnectionError):
            Flood(wire, 3000).send(64 * MIB)
        expect(wire.channel, CmEventType.DISCONNECTED)
        assert drain_async_events(wire) == [lib.IBV_EVENT_QP_FATAL]
        assert memory("held") == 0


def test_connection_that_holds_most_ends_first(stack: ExitStack) -> None:
    with limited(16 * MIB):
        greedy, modest, slow = (Wire(stack) for _ in range(3))
        assert not Flood(slow, 3000).send()  # has asked nothing: it never ends for that
        for wire in (greedy, modest):
            ask(wire)
        assert Flood(greedy, 3000).send(9 * MIB)
        wait_until(lambda: memory("held") > 12 * MIB)
        flood = Flood(modest, 3000)
        assert flood.send(5 * MIB)
        expect(greedy.channel, CmEventType.DISCONNECTED)
        assert greedy.hear().operation == TERMINATE
        receive_in_order(modest, 50, 3000)
        receive_in_order(slow, 50, 3000)


def test_peers_that_do_not_answer_end_before_a_modest_one(stack: ExitStack) -> None:
    """Two of them fill the limit, and each holds no more than a slow reader may."""
    with limited(8 * MIB):
        greedy = [Wire(stack) for _ in range(2)]
        for wire in greedy:
            ask(wire)
            assert Flood(wire, 3000).send(ONE_KEEPS - 256 * KIB)
        wait_until(lambda: memory("held") > 8 * MIB - 512 * KIB)
        modest = Wire(stack)
        ask(modest)
        flood = Flood(modest, 3000)
        assert flood.send(500 * KIB)
        flood.finish()
        wait_until(lambda: memory("held") < 5 * MIB)
        receive_in_order(modest, 500 * KIB // 3100, 3000)
        assert sum(bool(drain_async_events(wire)) for wire in greedy) == 1


def test_answered_connection_keeps_no_right_to_its_excess(stack: ExitStack) -> None:
    """It waits for no answer any more, and keeps more than the half for such connections."""
    with limited(8 * MIB):
        slow, asking = Wire(stack), Wire(stack)
        assert not Flood(slow, 3000).send()  # it fills its half
        answer = ask(asking)
        flood = Flood(asking, 3000)
        assert flood.send(ONE_KEEPS - 256 * KIB)
        flood.finish()
        wait_until(lambda: memory("held") > 8 * MIB - 512 * KIB)
        answer()
        modest = Wire(stack)
        ask(modest)
        flood = Flood(modest, 3000)
        assert flood.send(500 * KIB)
        flood.finish()
        expect(asking.channel, CmEventType.DISCONNECTED)
        receive_in_order(modest, 500 * KIB // 3100, 3000)
        receive_in_order(slow, 50, 3000)


@pytest.mark.parametrize("size", [3000, 36_840])
def test_connection_holds_no_more_than_its_limit(stack: ExitStack, size: int) -> None:
    """Blocks are counted whole: of the larger messages, two do not fit in one."""
    wire = Wire(stack)
    assert not Flood(wire, size).send()
    assert ONE_KEEPS - 72 * KIB < memory("held") <= ONE_KEEPS


@pytest.mark.parametrize("value", ["0", "-1", "", "many", "1.5", "1e3", "9" * 20])
def test_limit_of_the_environment_is_checked(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIORDMA_SOFTWARE_HELD_MIB", value)
    message = f"AIORDMA_SOFTWARE_HELD_MIB='{value}': give a whole number of MiB"
    with pytest.raises(ValueError, match=re.escape(message)):
        software.__wrapped__()


def test_limit_of_the_environment_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIORDMA_SOFTWARE_HELD_MIB", "12")
    with limited(memory("most_held")):
        software.__wrapped__()
        assert memory("most_held") == 12 * MIB
    assert memory("most_held") == 256 * MIB


def test_child_begins_with_nothing_held(stack: ExitStack) -> None:
    wire = Wire(stack)
    Flood(wire, 3000).send(MIB)
    wait_until(lambda: memory("held") > 0)
    child = os.fork()
    if not child:
        os._exit(memory("held") + memory("blocks") != 0)
    assert os.waitpid(child, 0)[1] == 0
    assert memory("held") > 0
