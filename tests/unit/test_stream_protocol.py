"""rsockets' protocol without I/O: two correct sides under every order of events, and a side whose
peer is not correct."""

import struct
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aiordma import RemoteMemory
from aiordma._base.errors import StreamProtocolError
from aiordma.streams.protocol import (
    GRANT_BYTES,
    HELLO_BYTES,
    TABLE_ENTRIES,
    Hello,
    Operation,
    Receiver,
    Sender,
    immediate_of,
    operation_of,
    unpack_grant,
)

TABLE = RemoteMemory(0x7000, TABLE_ENTRIES * GRANT_BYTES, 7)
RING = RemoteMemory(0x10000, 64, 9)
HELLO = Hello(4, TABLE, RING[:32])

# The private data of rdma-core 44's rstream, as it arrived on rxe with RoCE's padding.
RECORDED = bytes.fromhex(
    "010201800000000000007f9d70003000000003fb0000000200007f9d75d05000000004a5000800000000000000000000"
    "0000000000000000"
)


# -- the handshake --------------------------------------------------------------------------------


@pytest.mark.parametrize("takes_immediate", [False, True])
def test_a_hello_survives_packing(takes_immediate: bool) -> None:
    hello = replace(HELLO, takes_immediate=takes_immediate)
    assert len(hello.pack()) == HELLO_BYTES
    assert Hello.unpack(hello.pack() + bytes(16)) == hello


def test_the_c_librarys_hello_is_read() -> None:
    hello = Hello.unpack(RECORDED)
    assert hello.credits == 384
    assert not hello.takes_immediate
    assert hello.table == RemoteMemory(0x7F9D70003000, 2 * GRANT_BYTES, 0x3FB)
    assert hello.buffer == RemoteMemory(0x7F9D75D05000, 512 * 1024, 0x4A5)
    assert not hello.is_big_endian


@pytest.mark.parametrize(
    ("private_data", "said"),
    [
        (b"", "sent 0 bytes of private data, and rsockets sends 40"),
        (b"\1" * 39, "sent 39 bytes"),
        (b"\2" + HELLO.pack()[1:], "begins with version 2, and rsockets has 1"),
        (bytes(56), "begins with version 0"),
        (Hello(0xFFFF, TABLE, RING).pack(), "announces 65535 credits"),
        (Hello(4, TABLE[:GRANT_BYTES], RING).pack(), r"and 1 grants \(2 to 65534\)"),
        (Hello(4, RemoteMemory(0, 16 * 0xFFFF, 1), RING).pack(), "and 65535 grants"),
        (
            HELLO.pack()[:24] + struct.pack("!QII", 2**64 - 1, 0, 2),
            "memory at 0xffffffffffffffff of 2 bytes, which ends beyond",
        ),
    ],
)
def test_a_wrong_hello_is_refused(private_data: bytes, said: str) -> None:
    with pytest.raises(StreamProtocolError, match=said):
        Hello.unpack(private_data)


@given(st.binary(max_size=80))
def test_any_private_data_is_read_or_refused(private_data: bytes) -> None:
    try:
        hello = Hello.unpack(private_data)
    except StreamProtocolError:
        return
    Sender(hello)
    Receiver(RING, 4, hello).update()


# -- immediate data -------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", Operation)
def test_an_immediate_has_an_operation_and_a_value(operation: Operation) -> None:
    assert operation_of(immediate_of(operation, 2**29 - 1)) == (operation, 2**29 - 1)


@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_reserved_operations_are_refused(number: int) -> None:
    with pytest.raises(StreamProtocolError, match=f"reserves operation {number}"):
        operation_of(number << 29)


# -- two correct sides ----------------------------------------------------------------------------


class TwoSides(RuleBasedStateMachine):
    """One direction of a stream: bytes that are written into the ring's memory are read in order,
    whatever the order of sends, arrivals, reads and updates."""

    CREDITS = 4

    def __init__(self) -> None:
        super().__init__()
        reader = Hello(self.CREDITS, TABLE, RING[:32], is_big_endian=False)
        writer = Hello(self.CREDITS, TABLE, RING[:32], is_big_endian=False)
        self.sender = Sender(reader)
        self.receiver = Receiver(RING, self.CREDITS, writer)
        self.ring = bytearray(RING.length)
        self.table = bytearray(TABLE.length)
        self.next_entry = 1
        self.data: deque[int] = deque()
        self.updates: deque[int] = deque()
        self.written = self.read = self.unread = 0

    @precondition(lambda self: self.sender.room)
    @rule(choice=st.integers(1, 2**16))
    def send(self, choice: int) -> None:
        length = 1 + choice % self.sender.room
        target = self.sender.take(length)
        start = target.address - RING.address
        assert target.rkey == RING.rkey
        assert 0 <= start <= start + length <= RING.length
        for place in range(start, start + length):
            self.ring[place] = self.written & 255
            self.written += 1
        self.data.append(length)

    @precondition(lambda self: self.data)
    @rule()
    def arrive(self) -> None:
        length = self.data.popleft()
        self.receiver.add(length)
        self.unread += length
        assert self.receiver.readable == self.unread

    @precondition(lambda self: self.receiver.readable)
    @rule(limit=st.integers(1, 100))
    def read_some(self, limit: int) -> None:
        start, length = self.receiver.span(limit)
        assert 0 < length <= limit
        for place in range(start, start + length):
            assert self.ring[place] == self.read & 255
            self.read += 1
        self.receiver.consume(length)
        self.unread -= length

    @precondition(lambda self: self.receiver.is_update_due)
    @rule()
    def update(self) -> None:
        update = self.receiver.update()
        if update.grant:
            place = update.target.address - TABLE.address
            assert update.target.rkey == TABLE.rkey
            assert self.table[place : place + GRANT_BYTES] == bytes(GRANT_BYTES)
            self.table[place : place + GRANT_BYTES] = update.grant
        self.updates.append(update.immediate)

    @precondition(lambda self: self.updates)
    @rule()
    def take_update(self) -> None:
        operation, value = operation_of(self.updates.popleft())
        assert operation is Operation.GRANT
        place = self.next_entry * GRANT_BYTES
        grant = unpack_grant(bytes(self.table[place : place + GRANT_BYTES]))
        if grant is not None:
            self.table[place : place + GRANT_BYTES] = bytes(GRANT_BYTES)
            self.next_entry = (self.next_entry + 1) % TABLE_ENTRIES
            self.sender.add_grant(grant)
        self.sender.set_limit(value)

    @invariant()
    def never_stuck(self) -> None:
        idle = not (self.data or self.updates or self.receiver.readable)
        assert not idle or self.sender.room or self.receiver.is_update_due


test_two_sides = TwoSides.TestCase


@pytest.mark.promise("A stream's peer reaches its ring, and nothing else")
def test_sequence_numbers_wrap() -> None:
    sender, receiver = Sender(HELLO), Receiver(RING, 4, HELLO)
    table = bytearray(TABLE.length)
    for number in range(2**16 + 100):
        sender.take(1)
        receiver.add(1)
        receiver.consume(1)
        while receiver.is_update_due:
            update = receiver.update()
            if update.grant:
                table[:GRANT_BYTES] = update.grant
                grant = unpack_grant(bytes(table[:GRANT_BYTES]))
                assert grant is not None
                sender.add_grant(grant)
            sender.set_limit(operation_of(update.immediate)[1])
        assert sender.room, number


# -- an incorrect peer ----------------------------------------------------------------------------


@pytest.mark.promise("A stream's peer reaches its ring, and nothing else")
@pytest.mark.parametrize("length", [0, 33, 2**29 - 1])
def test_data_that_was_not_granted_is_refused(length: int) -> None:
    with pytest.raises(
        StreamProtocolError, match=rf"wrote {length} bytes, and could write 1\.\.32"
    ):
        Receiver(RING, 4, HELLO).add(length)


def test_data_without_any_grant_is_refused() -> None:
    receiver = Receiver(RING, 4, HELLO)
    receiver.update()
    receiver.add(32)
    receiver.add(32)
    with pytest.raises(StreamProtocolError, match=r"wrote 1 bytes, and could write 1\.\.0"):
        receiver.add(1)


@pytest.mark.promise("A stream's peer reaches its ring, and nothing else")
def test_data_beyond_the_credits_is_refused() -> None:
    receiver = Receiver(RING, 4, HELLO)
    for _ in range(4):
        receiver.add(1)
    with pytest.raises(StreamProtocolError, match="beyond its 4 credits"):
        receiver.add(1)


@pytest.mark.parametrize("value", [3, 5, 9, 0xFFFF])
def test_impossible_limits_are_refused(value: int) -> None:
    with pytest.raises(StreamProtocolError, match=f"up to number {value}, where 0 were sent"):
        Sender(HELLO).set_limit(value)


def test_a_third_grant_is_refused() -> None:
    sender = Sender(HELLO)
    sender.add_grant(RING[32:])
    with pytest.raises(StreamProtocolError, match="granted memory a third time"):
        sender.add_grant(RING[:32])


@pytest.mark.parametrize("order", ["<", ">"])
def test_grants_have_the_peers_byte_order(order: str) -> None:
    hello = Hello(4, TABLE, RING[:32], is_big_endian=order == ">")
    update = Receiver(RING, 4, hello).update()
    assert struct.unpack(order + "QII", update.grant) == (RING.address + 32, RING.rkey, 32)
    assert update.target == TABLE[GRANT_BYTES:]


def test_an_empty_entry_is_no_grant() -> None:
    assert unpack_grant(bytes(GRANT_BYTES)) is None
