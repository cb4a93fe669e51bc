"""The software device's streams (RFC 5040, 5041, 5044), against a peer made of a plain socket: one
that stops reading, ends in the middle, or sends a Terminate of its choice."""

import fcntl
import os
import select
import socket
import stat
import struct
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from mmap import mmap
from pathlib import Path

import pytest

from aiordma import Access, RemoteMemory
from aiordma.verbs import (
    CmEventType,
    QueuePairState,
    Sge,
    WorkCompletionStatus,
    WorkRequestOpcode,
)
from tests.internals import ffi, lib, software
from tests.unit.mpa_peer import expect
from tests.unit.software_device import address_of, take_async_event
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

SUCCESS, FLUSHED = WorkCompletionStatus.SUCCESS, WorkCompletionStatus.WR_FLUSH_ERR
WRITE = 0
LARGE_AFTER, LARGE_BUFFER = 1 << 20, 4 << 20  # of receive.c
BAD = WorkCompletionStatus.LOC_PROT_ERR


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


# -- the ends of requests -------------------------------------------------------------------------


def test_a_request_that_a_peer_cannot_answer_any_more_ends(stack: ExitStack) -> None:
    wire = Wire(stack)
    wire.send(1, wire.region(bytearray(64)))
    assert wire.hear().operation == SEND
    assert wire.hear().operation == READ_REQUEST
    # A message that we have no receive for is held back, and the peer is gone.
    wire.peer.sendall(untagged(SEND, 0, 1, b"nobody waits for this"))
    wire.peer.shutdown(socket.SHUT_WR)
    assert wire.completions(1) == [(1, FLUSHED)]
    expect(wire.channel, CmEventType.DISCONNECTED)


def test_a_peer_that_ends_gives_up_the_messages_that_are_held_back(stack: ExitStack) -> None:
    wire = Wire(stack)
    wire.peer.sendall(untagged(SEND, 0, 1, b"nobody waits for this"))
    wire.peer.shutdown(socket.SHUT_WR)
    expect(wire.channel, CmEventType.DISCONNECTED)
    wire.pair.post_recv(7, [wire.region(bytearray(64))[:]])
    assert wire.completions(1) == [(7, FLUSHED)]


def test_peer_reset_discards_more_than_fits(stack: ExitStack) -> None:
    wire = Wire(stack)
    wire.peer.setblocking(False)
    with suppress(BlockingIOError):
        for number in range(1, 1000):
            # While it is read, sending only a part of it would also raise BlockingIOError.
            whole = memoryview(untagged(SEND, 0, number, bytes(60000)))
            while whole:
                whole = whole[wire.peer.send(whole) :]
                time.sleep(0.001)
    assert number * 60000 > 4 << 20
    wire.peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wire.peer.close()
    expect(wire.channel, CmEventType.DISCONNECTED)


def test_disconnect_resets_a_peer_with_a_full_window(stack: ExitStack) -> None:
    wire = Wire(stack, backlog=4096)
    wire.send(1, wire.region(mmap(-1, 16 << 20)))
    wire.identifier.disconnect()
    assert wire.completions(1) == [(1, FLUSHED)]
    told = select.poll()
    told.register(wire.peer, 0)
    assert told.poll(5000) == [(wire.peer.fileno(), select.POLLERR | select.POLLHUP)]


def test_read_response_arrives_behind_held_messages(stack: ExitStack) -> None:
    wire = Wire(stack)
    wire.peer.setblocking(False)
    whole, number = memoryview(b""), 0
    with suppress(BlockingIOError):
        while number < 1000:
            number += 1
            whole = memoryview(untagged(SEND, 0, number, bytes(60000)))
            while whole:
                whole = whole[wire.peer.send(whole) :]
                time.sleep(0.001)
    assert number * 60000 > 4 << 20
    wire.peer.settimeout(10)
    region = wire.region(bytearray(64))
    wire.send(1, region, opcode=WorkRequestOpcode.RDMA_READ, remote=RemoteMemory(0, 64, 0))
    question = wire.hear()
    assert question.operation == READ_REQUEST
    wire.peer.sendall(whole)
    wire.peer.sendall(tagged(READ_RESPONSE, question.sink, 0, bytes(64)))
    assert wire.completions(1) == [(1, SUCCESS)]


def test_memory_that_goes_while_it_is_sent_is_what_a_request_failed_for(stack: ExitStack) -> None:
    wire = Wire(stack, backlog=4096)
    good, bad = wire.region(bytearray(64)), wire.region(mmap(-1, 16 << 20))
    wire.send(1, bad)
    wire.send(2, good)
    time.sleep(0.2)
    bad.close()
    rest_of(wire.peer)
    assert wire.completions(2) == [(1, BAD), (2, FLUSHED)]
    expect(wire.channel, CmEventType.DISCONNECTED)


def test_memory_that_goes_while_it_is_read_by_the_peer_is_an_access_error(
    stack: ExitStack,
) -> None:
    wire = Wire(stack, backlog=4096)
    context = wire.domain.context.pointer
    while take_async_event(context)[0]:
        continue  # the connection manager's context is kept: earlier tests raised events on all
    memory = mmap(-1, 8 << 20)
    region = wire.region(memory, Access.REMOTE_READ)
    ask = struct.pack(">IQIIQ", 9, 0, len(memory), region.rkey, region.address)
    wire.peer.sendall(untagged(READ_REQUEST, 1, 1, ask))
    time.sleep(0.2)
    region.close()
    rest_of(wire.peer)
    expect(wire.channel, CmEventType.DISCONNECTED)
    assert take_async_event(context) == (lib.IBV_EVENT_QP_ACCESS_ERR, address_of(wire.pair.pointer))


def test_what_another_kind_of_peer_sent_before_its_end_is_received(stack: ExitStack) -> None:
    # Its requests have succeeded: siw's end when TCP has them.
    wire = Wire(stack, is_our_kind=False)
    region = wire.region(bytearray(64))
    wire.peer.sendall(untagged(SEND, 0, 1, b"one") + untagged(SEND, 0, 2, b"two"))
    wire.peer.shutdown(socket.SHUT_WR)
    time.sleep(0.1)
    assert list(wire.channel.events()) == []
    for wr_id in (7, 8):
        wire.pair.post_recv(wr_id, [region[:]])
    assert wire.completions(2) == [(7, SUCCESS), (8, SUCCESS)]
    expect(wire.channel, CmEventType.DISCONNECTED)


def test_a_request_that_is_posted_when_the_peer_has_ended_ends(stack: ExitStack) -> None:
    wire = Wire(stack, is_our_kind=False)
    region = wire.region(bytearray(64))
    wire.peer.sendall(untagged(SEND, 0, 1, b"one") + untagged(SEND, 0, 2, b"two"))
    wire.peer.shutdown(socket.SHUT_WR)
    time.sleep(0.1)
    wire.pair.post_recv(7, [region[:]])  # what was sent before the end is still received
    assert wire.completions(1) == [(7, SUCCESS)]
    wire.send(1, region)
    assert wire.completions(1) == [(1, FLUSHED)]


def test_requests_before_one_that_fails_here_have_their_own_end(stack: ExitStack) -> None:
    wire = Wire(stack)
    good, bad = wire.region(bytearray(64)), wire.region(bytearray(64))
    wire.send(1, good)
    assert wire.hear().operation == SEND
    bad.close()
    wire.pair.post_send(2, [Sge(good.address, 64, 0)])
    wire.send(3, good)
    word = wire.hear()
    assert (word.operation, word.payload[12:16]) == (READ_REQUEST, bytes(4))
    assert wire.queue.poll() == []
    wire.peer.sendall(tagged(READ_RESPONSE, word.sink, 0))
    assert wire.completions(3) == [(1, SUCCESS), (2, BAD), (3, FLUSHED)]
    assert wire.hear().operation == TERMINATE


@pytest.mark.parametrize(
    ("opcode", "reason", "expected"),
    [
        # RDMAP: an access error, an operation that is not accepted, a failure of the peer's
        ("RDMA_READ", b"\x01\x02", "REM_ACCESS_ERR"),
        ("RDMA_READ", b"\x02\x06", "REM_INV_REQ_ERR"),
        ("RDMA_READ", b"\x02\x07", "REM_OP_ERR"),
        # DDP: no buffer. A READ's is the peer's depth, a message's is a receive.
        ("RDMA_READ", b"\x12\x02", "REM_INV_REQ_ERR"),
        ("SEND", b"\x12\x02", "RNR_RETRY_EXC_ERR"),
    ],
)
def test_peers_reason_is_a_requests_status(
    stack: ExitStack, opcode: str, reason: bytes, expected: str
) -> None:
    wire = Wire(stack)
    remote = RemoteMemory(0, 64, 0) if opcode == "RDMA_READ" else None
    wire.send(1, wire.region(bytearray(64)), opcode=WorkRequestOpcode[opcode], remote=remote)
    wire.hear()
    wire.peer.sendall(untagged(TERMINATE, 2, 1, reason + bytes(2)))
    assert wire.completions(1) == [(1, WorkCompletionStatus[expected])]


def test_answers_in_pieces_belong_to_their_reads(stack: ExitStack) -> None:
    wire = Wire(stack)
    parts = [bytearray(size) for size in (64, 5, 64, 3)]
    first, second, third, fourth = (wire.region(part) for part in parts)
    wire.send(1, first)
    assert wire.hear().operation == SEND
    word = wire.hear()  # of the first request, before the READs
    for wr_id, region in ((2, second), (4, fourth)):
        remote = RemoteMemory(0, len(region), 0)
        wire.send(wr_id, region, opcode=WorkRequestOpcode.RDMA_READ, remote=remote)
        wire.send(wr_id + 1, third)
    asked = [wire.hear() for _ in range(4)]
    assert [each.operation for each in asked] == [READ_REQUEST, SEND] * 2
    wire.peer.sendall(tagged(READ_RESPONSE, word.sink, 0))
    assert wire.completions(1) == [(1, SUCCESS)]
    for read, answer in ((asked[0], b"hello"), (asked[2], b"you")):
        for at in range(len(answer)):
            is_last = at == len(answer) - 1
            piece = answer[at : at + 1]
            wire.peer.sendall(tagged(READ_RESPONSE, read.sink, at, piece, is_last=is_last))
    word = wire.hear()
    wire.peer.sendall(tagged(READ_RESPONSE, word.sink, 0))
    assert wire.completions(4) == [(number, SUCCESS) for number in range(2, 6)]
    assert parts[1] == b"hello"
    assert parts[3] == b"you"


def test_empty_piece_of_an_answer_is_refused(stack: ExitStack) -> None:
    """Any number of them could come, and the answer would always be due."""
    wire = Wire(stack)
    region = wire.region(bytearray(64))
    wire.send(1, region, opcode=WorkRequestOpcode.RDMA_READ, remote=RemoteMemory(0, 64, 0))
    sink = wire.hear().sink
    wire.peer.sendall(tagged(READ_RESPONSE, sink, 0, bytes(32), is_last=False))
    wire.peer.sendall(tagged(READ_RESPONSE, sink, 32, is_last=False))
    heard = wire.hear()
    assert (heard.operation, heard.payload[:2]) == (TERMINATE, b"\x11\x01")  # DDP: bounds
    assert wire.completions(1) == [(1, FLUSHED)]


def test_a_peers_read_of_memory_that_changes_has_a_sum_that_is_right(stack: ExitStack) -> None:
    wire = Wire(stack, crc=True, backlog=4096)
    memory = bytearray(8 << 20)
    region = wire.region(memory, Access.REMOTE_READ | Access.REMOTE_WRITE | Access.LOCAL_WRITE)
    ask = struct.pack(">IQIIQ", 9, 0, len(memory), region.rkey, region.address)
    wire.peer.sendall(untagged(READ_REQUEST, 1, 1, ask))
    time.sleep(0.2)  # TCP has taken what it takes, and more is composed already
    for at in range(0, len(memory), 64):
        memory[at] = 1
    left = len(memory)
    while left:
        heard = wire.hear()
        assert heard.operation == READ_RESPONSE
        assert heard.is_intact
        left -= len(heard.payload)


def test_a_region_that_is_now_other_memory_shows_nothing_of_the_first(stack: ExitStack) -> None:
    wire = Wire(stack, backlog=4096)
    first, second = mmap(-1, 8 << 20), mmap(-1, 8 << 20)
    region = wire.region(first, Access.REMOTE_READ | Access.ZERO_BASED)
    ask = struct.pack(">IQIIQ", 9, 0, len(first), region.rkey, 0)
    wire.peer.sendall(untagged(READ_REQUEST, 1, 1, ask))
    time.sleep(0.2)
    change = lib.IBV_REREG_MR_CHANGE_TRANSLATION | lib.IBV_REREG_MR_CHANGE_ACCESS
    arguments = (ffi.NULL, ffi.from_buffer(second), len(second), int(region.access))
    assert not software().rereg_mr(region.pointer, change, *arguments)
    first[:] = b"S" * len(first)  # the program's again
    assert b"S" * 100 not in rest_of(wire.peer)


def test_a_message_that_has_begun_is_sent_to_its_end_before_a_send_queue_is_drained(
    stack: ExitStack,
) -> None:
    wire = Wire(stack, backlog=4096)
    region = wire.region(mmap(-1, 16 << 20))
    wire.send(1, region)
    wire.send(2, region)
    wire.pair.modify(QueuePairState.SQD)
    left = len(region)
    while left:
        heard = wire.hear()
        assert heard.operation == SEND
        left -= len(heard.payload)
    word = wire.hear()
    assert word.operation == READ_REQUEST
    wire.peer.sendall(tagged(READ_RESPONSE, word.sink, 0))
    assert wire.completions(1) == [(1, SUCCESS)]
    wire.pair.modify(QueuePairState.RTS)
    assert wire.hear().operation == SEND


def test_a_read_that_is_refused_late_is_the_one_that_is_blamed(stack: ExitStack) -> None:
    wire = Wire(stack, backlog=4096)
    long, short = mmap(-1, 16 << 20), mmap(-1, 16 << 20)
    first, second = (wire.region(each, Access.REMOTE_READ) for each in (long, short))
    for number, region in enumerate((first, second), 1):
        ask = struct.pack(">IQIIQ", number, 0, len(long), region.rkey, region.address)
        wire.peer.sendall(untagged(READ_REQUEST, 1, number, ask))
    wire.peer.sendall(untagged(READ_REQUEST, 1, 3, struct.pack(">IQIIQ", 3, 0, 0, 0, 0)))
    time.sleep(0.2)
    second.close()
    while (heard := wire.hear()).operation == READ_RESPONSE:
        assert heard.header[:4] == bytes((0, 0, 0, 1))
    assert heard.operation == TERMINATE
    queue, number, _ = struct.unpack(">III", heard.payload[12:24])
    assert (queue, number) == (1, 2)


def rest_of(peer: socket.socket) -> bytes:
    got = bytearray()
    peer.settimeout(1)
    with suppress(TimeoutError, ConnectionResetError):
        while more := peer.recv(1 << 20):
            got += more
    return bytes(got)


# -- TCP's receive buffer -------------------------------------------------------------------------


def device_socket(peer: socket.socket) -> socket.socket:
    """Return the device's end of a connection, as a second descriptor of the same socket."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            found = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed by now
        with suppress(OSError):
            if found.getpeername() == peer.getsockname():
                return found
        found.close()
    raise LookupError("the device has no socket of this connection")


def test_large_payloads_enlarge_tcp_receive_buffer(stack: ExitStack) -> None:
    wire = Wire(stack)
    region = wire.region(mmap(-1, 64_000), Access.LOCAL_WRITE | Access.REMOTE_WRITE)
    theirs = stack.enter_context(device_socket(wire.peer))
    most = int(Path("/proc/sys/net/ipv4/tcp_rmem").read_text().split()[2])
    before = theirs.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    whole = tagged(WRITE, region.rkey, region.address, bytes(64_000))
    for _ in range(2 * LARGE_AFTER // len(whole)):
        # The device has the header: it reads the rest of the payload directly to its place.
        wire.peer.sendall(whole[:100])
        wait_until(lambda: not unread(theirs))
        wire.peer.sendall(whole[100:])
        wait_until(lambda: not unread(theirs))
    after = theirs.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    assert before < after
    assert after >= min(LARGE_BUFFER, most // 2)
    assert theirs.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1


def unread(end: socket.socket) -> int:
    """Return the number of bytes that a socket has received and its owner has not read."""
    found = fcntl.ioctl(end, termios.FIONREAD, bytes(4))
    return int.from_bytes(found, sys.byteorder)
