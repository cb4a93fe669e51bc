"""Which thread serves the handshakes of the software device: the program's, while it makes calls or
waits in the device, and else the engine."""

import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from aiordma.testing import software_objects
from aiordma.verbs import CmEvent, CmEventType, ConnectionParameters, EventChannel
from tests.internals import ffi, lib, software
from tests.unit.engine_thread import EngineThread
from tests.unit.mpa_peer import HOST, Device, Frame, expect, has_ended
from tests.unit.software_device import Aside, take_event
from tests.unit.stream_peer import SEND, Wire, untagged
from tests.waiting import wait_until

ROUNDS = 60
MOST_VAIN = 16


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    before = software_objects()["identifiers"]
    with ExitStack() as made:
        yield made
    assert software_objects()["identifiers"] == before


def is_readable(fd: int, seconds: float = 0) -> bool:
    return bool(select.select([fd], [], [], seconds)[0])


class Server:
    """A listener of the device, and peers that the test plays."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.device = Device(stack)
        self.channel: EventChannel = self.device.channel
        self.listener, self.port = self.device.listener(backlog=2 * ROUNDS)

    def peer(self, request: bytes = b"") -> socket.socket:
        made = self.stack.enter_context(closing(socket.create_connection((HOST, self.port), 10)))
        if request:
            made.sendall(request)
        return made

    def lend(self) -> None:
        """Take an event: after that, the sockets are lent for a moment."""
        self.peer(Frame().pack())
        # Peers without a handshake are told up to a tenth of a second later.
        told = CmEventType.CONNECT_ERROR
        event = expect(self.channel, CmEventType.CONNECT_REQUEST, passing=told)
        self.device.identifier(event.new_key)

    def wakes(self) -> bool:
        """Whether a silent peer makes the descriptor readable."""
        self.peer()
        woken = is_readable(self.channel.fd, 0.0005)
        assert list(self.channel.events()) == []
        return woken


def take_request(channel: EventChannel) -> bool:
    """Wait for an event in the device. Return whether it was a request, which is rejected then."""
    event = ffi.new("struct rdma_cm_event **")
    assert software().get_cm_event(channel.pointer, event) == 0
    request, kind = event[0].id, CmEventType(event[0].event)
    software().ack_cm_event(event[0])
    if kind is not CmEventType.CONNECT_REQUEST:
        return False
    return bool(software().destroy_id(request) == 0)


# -- whose turn it is -----------------------------------------------------------------------------


def test_call_lends_the_handshakes_of_its_channel(stack: ExitStack) -> None:
    """A silent peer, which makes no event, wakes the program that has just taken one."""
    server = Server(stack)

    def is_lent() -> bool:
        server.lend()
        return server.wakes()

    wait_until(is_lent)


def test_engine_serves_a_program_that_makes_no_call(stack: ExitStack) -> None:
    server = Server(stack)
    for _ in range(ROUNDS):
        server.lend()
        peer = server.peer(b"GET / HTTP/1.1\r\n")
        assert has_ended(peer)  # this thread only waits for the peer
        told = list(server.channel.events())  # of such peers, ten times a second at most
        assert {event.type for event in told} <= {CmEventType.CONNECT_ERROR}


def test_idle_channel_wakes_no_thread(stack: ExitStack) -> None:
    server = Server(stack)
    server.lend()
    engine = stack.enter_context(closing(EngineThread()))
    wait_until(lambda: engine.is_resting(0.3))


def test_silent_peers_wake_the_program_a_few_times(stack: ExitStack) -> None:
    """Then the engine serves them until the next event. Without a bound, each wakes it."""
    server = Server(stack)
    server.lend()
    assert sum(server.wakes() for _ in range(4 * MOST_VAIN)) <= MOST_VAIN


# -- other ways to wait ---------------------------------------------------------------------------


def test_blocking_descriptor_is_readable_only_for_an_event(stack: ExitStack) -> None:
    """A program may poll it, and then call rdma_get_cm_event, which must not block."""
    server = Server(stack)
    os.set_blocking(server.channel.fd, True)
    for _ in range(20):
        server.peer(Frame().pack())
        assert is_readable(server.channel.fd, 10)
        assert take_request(server.channel)  # this lends nothing
        half = Frame().pack()
        peer = server.peer(half[:10])
        assert not is_readable(server.channel.fd, 0.003)
        peer.sendall(half[10:])
        assert is_readable(server.channel.fd, 10)
        assert take_request(server.channel)
    os.set_blocking(server.channel.fd, False)


def test_blocking_wait_ends_with_an_event_and_not_before(stack: ExitStack) -> None:
    server = Server(stack)
    os.set_blocking(server.channel.fd, True)
    for _ in range(5):
        waiter = Aside(lambda: take_request(server.channel))
        request = Frame().pack()
        peer = server.peer(request[:10])
        assert waiter.blocks(0.05)
        peer.sendall(request[10:])
        assert waiter.end()
    os.set_blocking(server.channel.fd, False)


def test_edge_triggered_watcher_misses_no_request(stack: ExitStack) -> None:
    server = Server(stack)
    request = Frame().pack()
    with select.epoll() as edges:
        edges.register(server.channel.fd, select.EPOLLIN | select.EPOLLET)
        for number in range(2 * ROUNDS):
            if number % 20 == 10:
                time.sleep(0.02)  # the engine takes over
            peer = server.peer(request[:10])
            edges.poll(0)
            assert list(server.channel.events()) == []
            peer.sendall(request[10:])
            found: list[CmEvent] = []
            while not found:
                assert edges.poll(10), f"request {number} was never reported"
                found += server.channel.events()
            (event,) = found
            assert event.type is CmEventType.CONNECT_REQUEST
            server.device.identifier(event.new_key).close()


def test_waiting_thread_needs_no_engine(stack: ExitStack) -> None:
    """Neither for packets of its own channel, nor for those that the engine has no timer for."""
    wire = Wire(stack, has_channel=True)
    assert wire.events is not None
    region = wire.region(bytearray(64))
    engine = stack.enter_context(closing(EngineThread()))
    os.set_blocking(wire.events.fd, True)
    pointer = wire.events.pointer
    time.sleep(0.1)
    before = engine.sleeps
    for number in range(20):
        wire.pair.post_recv(1, [region[:]])
        wire.queue.request_notification()
        waiter = Aside(lambda: take_event(pointer))
        assert waiter.blocks(0.02)
        wire.peer.sendall(untagged(SEND, 0, number + 1, b"hello"))
        assert waiter.end() == wire.queue.pointer
        wire.events.provider.ack_cq_events(wire.queue.pointer, 1)
        assert [one.ok for one in wire.queue.poll()] == [True]
    assert engine.sleeps - before <= 10
    os.set_blocking(wire.events.fd, False)


def test_waiting_thread_serves_its_other_channels(stack: ExitStack) -> None:
    """A thread waits for a request. Meanwhile its connection ends, which another thread sees."""
    server = Server(stack)
    wire = Wire(stack, has_channel=True)
    region = wire.region(bytearray(64))
    os.set_blocking(server.channel.fd, True)

    polled = threading.Event()

    def poll_and_wait() -> bool:
        for _ in range(20):
            wire.queue.poll(1)  # often: the socket is lent to this thread
        polled.set()
        return take_request(server.channel)

    for number in range(20):
        wire.pair.post_recv(1, [region[:]])
        polled.clear()
        waiter = Aside(poll_and_wait)
        assert polled.wait(10)
        wire.peer.sendall(untagged(SEND, 0, number + 1, b"hello"))
        wait_until(lambda: wire.queue.poll(1))
        server.peer(Frame().pack())
        assert waiter.end()
    os.set_blocking(server.channel.fd, False)


def test_channel_is_destroyed_while_its_sockets_are_lent(stack: ExitStack) -> None:
    """The engine serves the listener, which has no channel then."""
    device = Device(stack)
    listener = device.identifier()
    listener.bind(HOST, 0)
    assert listener.local_address is not None
    address = listener.local_address[:2]
    table = listener.provider
    channel = table.create_event_channel()
    os.set_blocking(channel.fd, False)
    assert table.migrate_id(listener.pointer, channel) == 0
    listener.listen(4)
    event = ffi.new("struct aiordma_cm_event *")
    with closing(socket.create_connection(address, 10)) as peer:
        peer.sendall(Frame().pack())
        assert is_readable(channel.fd, 10)
        assert lib.aiordma_next_cm_event(table.table, channel, event) == 1
    table.destroy_id(ffi.cast("struct rdma_cm_id *", event.id))
    table.destroy_event_channel(channel)
    with closing(socket.create_connection(address, 10)) as peer:
        peer.sendall(b"GET / HTTP/1.1\r\n")
        assert has_ended(peer)


def test_connect_goes_on_without_waiting_for_the_socket(stack: ExitStack) -> None:
    """On one machine, the request has been sent when connect() returns."""
    device = Device(stack)
    with closing(socket.create_server((HOST, 0))) as listening:
        identifier = device.connecting(listening.getsockname()[1], ConnectionParameters())
        assert identifier.local_address is not None
        peer, address = listening.accept()
        with closing(peer):
            assert address == identifier.local_address
            assert peer.recv(20, socket.MSG_DONTWAIT).startswith(b"MPA ID Req Frame")


def test_reply_and_first_messages_in_one_packet(stack: ExitStack) -> None:
    """A peer may send as soon as it has replied, if it is allowed to send first (revision 1)."""
    device = Device(stack)
    with closing(socket.create_server((HOST, 0))) as listening:
        device.connecting(listening.getsockname()[1], ConnectionParameters())
        peer, _ = listening.accept()
        with closing(peer):
            peer.settimeout(10)
            Frame.receive(peer)
            malformed = b"\x00\x10" + bytes(20)
            peer.sendall(Frame(True, outbound=0).pack() + malformed)
            expect(device.channel, CmEventType.ESTABLISHED)
            expect(device.channel, CmEventType.DISCONNECTED)  # for the bytes after the reply
