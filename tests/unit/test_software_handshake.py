"""The software device's MPA handshake (RFC 5044, 7.1; RFC 6581), against peers made of plain
sockets: what it says, what it takes, and what it does not let itself be done."""

import errno
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiordma
from aiordma.testing import software_objects
from aiordma.verbs import CmEventType, ConnectionParameters, EventChannel, Identifier
from tests.internals import unpack_address
from tests.unit.mpa_peer import (
    CRC,
    ENHANCED,
    HOST,
    LOWER,
    MARKERS,
    REJECTS,
    UPPER,
    Device,
    Frame,
    exactly,
    expect,
    has_ended,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

MOST_DEPTH = 128
CLOSE_WAIT = "08"
IP_PKTOPTIONS = 9


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    # The connection manager keeps its device open from the first use on.
    with EventChannel("software") as channel, Identifier(channel) as identifier:
        identifier.bind(HOST, 0)
    before = software_objects()
    yield
    limit = time.monotonic() + 20  # the engine destroys ended streams
    while software_objects() != before and time.monotonic() < limit:
        time.sleep(0.02)
    assert software_objects() == before


@pytest.fixture
def device() -> Iterator[Device]:
    with ExitStack() as stack:
        yield Device(stack)


# -- peers that connect ---------------------------------------------------------------------------


def ask(device: Device, request: Frame | bytes, backlog: int = 4) -> tuple[socket.socket, int]:
    _, port = device.listener(backlog)
    peer = device.stack.enter_context(closing(socket.create_connection((HOST, port), timeout=5)))
    peer.sendall(request.pack() if isinstance(request, Frame) else request)
    return peer, port


@pytest.mark.parametrize("pieces", [1, 3, 20])
def test_request_arrives_in_any_number_of_pieces(device: Device, pieces: int) -> None:
    _, port = device.listener()
    with closing(socket.create_connection((HOST, port), timeout=5)) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = Frame(inbound=3, outbound=300, private_data=b"who I am").pack()
        size = -(-len(data) // pieces)
        for at in range(0, len(data), size):
            peer.sendall(data[at : at + size])
            time.sleep(0.005)
        event = expect(device.channel, CmEventType.CONNECT_REQUEST)
        assert event.private_data == b"who I am"
        # Its outbound depth is our inbound one, as far as we go.
        assert (event.responder_resources, event.initiator_depth) == (MOST_DEPTH, 3)
        request = device.identifier(event.new_key)
        assert request.peer_address == peer.getsockname()
        assert request.local_address == peer.getpeername()


@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        ((UPPER, UPPER), (UPPER, UPPER)),  # a WRITE is fine
        ((UPPER, UPPER | LOWER), (UPPER, UPPER | LOWER)),  # one of our own kind
        ((UPPER, LOWER), (UPPER, LOWER)),  # only a READ, then
        ((UPPER, 0), (UPPER, UPPER)),  # leaves it to us
        ((0, 0), (0, 0)),  # a client that will speak first by itself
    ],
)
def test_the_answer_is_of_the_kind_that_was_asked_for(
    device: Device, asked: tuple[int, int], answered: tuple[int, int]
) -> None:
    peer, _ = ask(device, Frame(inbound=asked[0] | 5, outbound=asked[1] | 7))
    event = expect(device.channel, CmEventType.CONNECT_REQUEST)
    request = device.identifier(event.new_key)
    device.give_queue_pair(request)
    request.accept(ConnectionParameters(b"welcome", responder_resources=6, initiator_depth=9))
    reply = Frame.receive(peer)
    assert reply.is_reply
    assert (reply.flags, reply.revision, reply.private_data) == (ENHANCED, 2, b"welcome")
    # The lesser of what each side says (RFC 6581, 9.2).
    assert (reply.inbound, reply.outbound) == (answered[0] | 6, answered[1] | 5)
    if answered == (0, 0):
        expect(device.channel, CmEventType.ESTABLISHED)
    else:
        # The connection is established with the peer's first frame, which has not come.
        time.sleep(0.05)
        assert list(device.channel.events()) == []
        peer.close()
        assert expect(device.channel, CmEventType.CONNECT_ERROR).status == -errno.ECONNRESET


def test_a_peer_of_the_first_revision_is_answered_in_kind(device: Device) -> None:
    peer, _ = ask(device, Frame(flags=CRC, revision=1, private_data=b"old"))
    event = expect(device.channel, CmEventType.CONNECT_REQUEST)
    assert event.private_data == b"old"
    assert (event.responder_resources, event.initiator_depth) == (MOST_DEPTH, MOST_DEPTH)
    request = device.identifier(event.new_key)
    device.give_queue_pair(request)
    request.accept(ConnectionParameters(b"new"))
    assert Frame.receive(peer) == Frame(True, CRC, 1, 0, 0, b"new")
    expect(device.channel, CmEventType.ESTABLISHED)
    request.disconnect()
    expect(device.channel, CmEventType.DISCONNECTED)
    assert has_ended(peer)


def test_a_refusal_carries_private_data(device: Device) -> None:
    peer, _ = ask(device, Frame())
    request = device.identifier(expect(device.channel, CmEventType.CONNECT_REQUEST).new_key)
    request.reject(b"not today")
    reply = Frame.receive(peer)
    assert (reply.flags & REJECTS, reply.private_data) == (REJECTS, b"not today")
    assert has_ended(peer)
    with pytest.raises(aiordma.VerbsCallError) as caught:
        request.accept(ConnectionParameters())
    assert caught.value.errno == errno.EINVAL


@pytest.mark.parametrize("frame", [Frame(flags=ENHANCED | MARKERS), Frame(private_data=bytes(256))])
def test_what_we_cannot_do_is_refused_in_the_programs_name(device: Device, frame: Frame) -> None:
    peer, _ = ask(device, frame)
    reply = Frame.receive(peer)
    assert reply.flags & REJECTS
    assert not reply.flags & MARKERS
    assert has_ended(peer)
    assert list(device.channel.events()) == []


@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"M" * 20,
        Frame(is_reply=True).pack(),
        Frame(revision=0).pack(),
        Frame(revision=3).pack(),
        b"MPA ID Req Frame" + struct.pack(">BBH", ENHANCED, 2, 3) + b"abc",
        b"MPA ID Req Frame" + struct.pack(">BBH", ENHANCED, 2, 513),
    ],
)
def test_malformed_request_is_dropped_without_reply(device: Device, request_: bytes) -> None:
    peer, port = ask(device, request_)
    assert has_ended(peer)
    (told,) = device.channel.events()  # for the listener: no request
    assert (told.type, told.status) == (CmEventType.CONNECT_ERROR, -errno.EPROTO)
    assert unpack_address(told.private_data) == peer.getsockname()
    # The next peer is served as usual.
    with closing(socket.create_connection((HOST, port), timeout=5)) as good:
        good.sendall(Frame().pack())
        device.identifier(expect(device.channel, CmEventType.CONNECT_REQUEST).new_key)


def test_silent_peer_is_dropped_and_delays_no_other(device: Device) -> None:
    silent, port = ask(device, Frame().pack()[:-1])
    with closing(socket.create_connection((HOST, port), timeout=5)) as good:
        good.sendall(Frame().pack())
        device.identifier(expect(device.channel, CmEventType.CONNECT_REQUEST).new_key)
    silent.settimeout(20)
    assert has_ended(silent)


def tcp_states(port: int, peer_port: int) -> set[str]:
    """The states of TCP's sockets with these two ports, as in /proc/net/tcp."""
    ends = f":{port:04X}", f":{peer_port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    return {row[3] for row in rows if (row[1][-5:], row[2][-5:]) == ends}


def test_accept_reports_a_peer_that_left(device: Device) -> None:
    peer, port = ask(device, Frame())
    request = device.identifier(expect(device.channel, CmEventType.CONNECT_REQUEST).new_key)
    peer_port = peer.getsockname()[1]
    peer.close()
    wait_until(lambda: tcp_states(port, peer_port) == {CLOSE_WAIT})
    device.give_queue_pair(request)
    with pytest.raises(aiordma.VerbsCallError) as caught:
        request.accept(ConnectionParameters())
    assert caught.value.errno == errno.ECONNRESET


def test_requests_beyond_the_backlog_wait_until_one_is_taken(device: Device) -> None:
    _, port = device.listener(backlog=2)
    before = software_objects()

    def has_made(count: int, kind: str) -> bool:
        return software_objects()[kind] - before[kind] == count

    for heard in (1, 2, 2):
        connection = socket.create_connection((HOST, port), timeout=5)
        peer = device.stack.enter_context(closing(connection))
        peer.sendall(Frame().pack())
        wait_until(partial(has_made, heard, "identifiers"))
    time.sleep(0.05)
    # The third waits in TCP's own queue.
    assert has_made(2, "sockets")
    for _ in range(3):
        device.identifier(expect(device.channel, CmEventType.CONNECT_REQUEST).new_key)


def test_closing_listener_rejects_waiting_drops_silent(device: Device) -> None:
    listener, port = device.listener()
    with (
        closing(socket.create_connection((HOST, port), timeout=5)) as asked,
        closing(socket.create_connection((HOST, port), timeout=5)) as silent,
    ):
        asked.sendall(Frame().pack())
        select.select([device.channel.fd], [], [], 5)  # its request waits, and is not taken
        listener.close()
        assert Frame.receive(asked).flags & REJECTS
        assert has_ended(asked)
        assert has_ended(silent)
    assert list(device.channel.events()) == []


# -- peers that are connected to -------------------------------------------------------------------


def answer(
    device: Device,
    reply: Frame | bytes,
    parameters: ConnectionParameters | None = None,
    then: Callable[[socket.socket], None] = lambda _peer: None,
) -> tuple[Identifier, socket.socket, Frame]:
    """Connect to a plain socket that reads the request and sends this reply."""
    with closing(socket.create_server((HOST, 0))) as server:
        port = server.getsockname()[1]
        identifier = device.connecting(port, parameters or ConnectionParameters())
        peer, _ = server.accept()
    peer.settimeout(5)
    device.stack.enter_context(closing(peer))
    request = Frame.receive(peer)
    peer.sendall(reply.pack() if isinstance(reply, Frame) else reply)
    then(peer)
    return identifier, peer, request


def test_a_request_asks_to_speak_first_by_a_write_of_nothing(device: Device) -> None:
    parameters = ConnectionParameters(b"who I am", responder_resources=3, initiator_depth=255)
    reply = Frame(True, inbound=UPPER | 7, outbound=UPPER | 2, private_data=b"welcome")
    identifier, peer, request = answer(device, reply, parameters)
    assert request == Frame(
        False, ENHANCED, 2, UPPER | 3, UPPER | LOWER | MOST_DEPTH, b"who I am"
    )  # no CRC: the bytes stay in this machine's memory
    event = expect(device.channel, CmEventType.ESTABLISHED)
    assert event.private_data == b"welcome"
    assert (event.responder_resources, event.initiator_depth) == (2, 7)
    assert identifier.local_address == peer.getpeername()
    # An FPDU whose DDP segment is tagged, last, and RDMAP's WRITE.
    length, control = struct.unpack(">HH", exactly(peer, 4))
    assert (length, control) == (14, 0xC140)
    exactly(peer, 12 + 4)
    identifier.disconnect()
    expect(device.channel, CmEventType.DISCONNECTED)
    assert has_ended(peer)


def test_the_type_of_service_is_on_the_packets(device: Device) -> None:
    with closing(socket.create_server((HOST, 0))) as server:
        server.setsockopt(socket.IPPROTO_IP, socket.IP_RECVTOS, 1)
        device.connecting(server.getsockname()[1], ConnectionParameters(), tos=0xB8)
        peer, _ = server.accept()
        with closing(peer):
            # A control message of the packet that connected: its header, and the byte.
            told = peer.getsockopt(socket.IPPROTO_IP, IP_PKTOPTIONS, 64)
            assert told[struct.calcsize("@NIi")] == 0xB8


def test_first_frame_is_sent_only_if_negotiated(device: Device) -> None:
    identifier, peer, _ = answer(device, Frame(True, inbound=1, outbound=1))
    expect(device.channel, CmEventType.ESTABLISHED)
    identifier.disconnect()
    expect(device.channel, CmEventType.DISCONNECTED)
    assert has_ended(peer)  # before anything else came


def test_a_peers_refusal_comes_with_its_private_data(device: Device) -> None:
    answer(device, Frame(True, REJECTS | ENHANCED, private_data=b"not today"))
    event = expect(device.channel, CmEventType.REJECTED)
    assert (event.status, event.private_data) == (-errno.ECONNREFUSED, b"not today")


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        Frame(False).pack(),
        Frame(True, flags=0, revision=1).pack(),  # may not be less than was asked for
        Frame(True, flags=ENHANCED | MARKERS).pack(),
        Frame(True, inbound=UPPER | 1, outbound=LOWER | 1).pack(),  # a READ was not offered
        Frame(True, inbound=UPPER | 1, outbound=UPPER | 9).pack(),  # deeper than was offered
        Frame(True, private_data=bytes(256)).pack(),
        b"MPA ID Rep Frame" + struct.pack(">BBH", ENHANCED, 2, 600),
    ],
)
def test_an_answer_that_makes_no_sense_is_an_error(device: Device, reply: bytes) -> None:
    _, peer, _ = answer(device, reply, ConnectionParameters(responder_resources=8))
    event = expect(device.channel, CmEventType.CONNECT_ERROR)
    assert event.status == -errno.EPROTO
    assert has_ended(peer)


def test_a_peer_that_ends_instead_of_answering_has_rejected(device: Device) -> None:
    answer(device, Frame(True).pack()[:10], then=lambda peer: peer.close())
    event = expect(device.channel, CmEventType.REJECTED)
    assert event.status == -errno.ECONNRESET


def test_an_identifier_that_goes_while_it_connects_leaves_nothing(device: Device) -> None:
    with closing(socket.create_server((HOST, 0))) as server:
        identifier = device.connecting(server.getsockname()[1], ConnectionParameters())
        peer, _ = server.accept()
        with closing(peer):
            Frame.receive(peer)
            identifier.close()
            assert has_ended(peer)
    assert list(device.channel.events()) == []


def test_a_queue_pair_that_goes_while_it_connects_is_an_error(device: Device) -> None:
    with closing(socket.create_server((HOST, 0))) as server:
        identifier = device.connecting(server.getsockname()[1], ConnectionParameters())
        assert identifier.queue_pair is not None
        identifier.queue_pair.close()
        assert expect(device.channel, CmEventType.CONNECT_ERROR).status == -errno.ECONNABORTED


# -- anything at all -------------------------------------------------------------------------------


@given(st.binary(max_size=64), st.booleans())
def test_no_bytes_do_more_than_end_their_own_connection(data: bytes, is_framed: bool) -> None:
    with ExitStack() as stack:
        device = Device(stack)
        request = b"MPA ID Req Frame" + data if is_framed else data
        peer, _ = ask(device, request)
        with suppress(OSError):  # it may have been reset by now
            peer.shutdown(socket.SHUT_WR)
        select.select([peer.fileno(), device.channel.fd], [], [], 5)
        for event in device.channel.events():
            if event.type is not CmEventType.CONNECT_ERROR:  # which is for the listener
                assert event.type is CmEventType.CONNECT_REQUEST
                device.identifier(event.new_key)
