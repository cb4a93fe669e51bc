"""The UDP port space and its groups, one call and one event at a time."""

import errno
import ipaddress
import os
import select
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import aiordma
from aiordma import MemoryRegion
from aiordma.verbs import (
    AddressHandle,
    Capacity,
    CmEvent,
    CmEventType,
    CompletionQueue,
    ConnectionParameters,
    EventChannel,
    Identifier,
    PortSpace,
    ProtectionDomain,
    QueuePair,
    QueuePairType,
    SendFlag,
    SendWork,
    WorkRequestOpcode,
)
from aiordma.verbs.memory import gather
from tests.conftest import DEVICE
from tests.device.identifiers import expect, no_event
from tests.devices import ADDRESS, IPV6, kernel_objects, own_group
from tests.internals import UDP_QKEY

pytestmark = [pytest.mark.capability("datagrams")]

GROUP, OTHER_GROUP = own_group(5), own_group(6)
REFUSED, NOBODY = 2, 1


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Bed:
    """A channel, a listener, and clients that know the route to it."""

    def __init__(self, stack: ExitStack, backlog: int = 4) -> None:
        self.stack = stack
        self.channel = stack.enter_context(EventChannel(DEVICE))
        self.listener = self.bound()
        self.listener.listen(backlog)
        assert self.listener.local_address is not None
        self.port = self.listener.local_address[1]

    def bound(self) -> Identifier:
        identifier = self.stack.enter_context(Identifier(self.channel, PortSpace.UDP))
        identifier.bind(ADDRESS, 0)
        return identifier

    def resolved(self, port: int) -> Identifier:
        client = self.stack.enter_context(Identifier(self.channel, PortSpace.UDP))
        client.resolve_address(ADDRESS, port, None, 5000)
        expect(self.channel, CmEventType.ADDR_RESOLVED)
        client.resolve_route(5000)
        expect(self.channel, CmEventType.ROUTE_RESOLVED)
        return client

    def asked(self, private_data: bytes = b"") -> tuple[Identifier, Identifier, CmEvent]:
        """A client that asks, and the identifier to answer it with."""
        client = self.resolved(self.port)
        client.connect(ConnectionParameters(private_data=private_data))
        event = expect(self.channel, CmEventType.CONNECT_REQUEST)
        assert event.key == self.listener.key
        request = Identifier(self.channel, PortSpace.UDP, key=event.new_key)
        self.stack.enter_context(request)
        return client, request, event


def test_reply_names_the_queue_pair(stack: ExitStack) -> None:
    bed = Bed(stack)
    client, request, event = bed.asked(b"who asks")
    assert event.private_data == b"who asks".ljust(180, b"\0")
    assert request.local_address == bed.listener.local_address
    assert request.peer_address == client.local_address
    assert request.device_key == client.device_key
    request.accept(ConnectionParameters(private_data=b"who I am", qp_num=0x123456))
    found = expect(bed.channel, CmEventType.ESTABLISHED)
    assert found.key == client.key
    assert found.private_data == b"who I am".ljust(136, b"\0")
    assert (found.qp_num, found.qkey) == (0x123456, UDP_QKEY)
    assert no_event(bed.channel)
    with pytest.raises(aiordma.VerbsCallError):
        request.accept(ConnectionParameters(qp_num=1))  # answered already
    with pytest.raises(aiordma.VerbsCallError):
        client.connect(ConnectionParameters())


def test_a_refusal_has_a_status(stack: ExitStack) -> None:
    bed = Bed(stack)
    client, request, _ = bed.asked()
    request.reject(b"not you")
    refused = expect(bed.channel, CmEventType.UNREACHABLE)
    assert (refused.key, refused.status) == (client.key, REFUSED)


def test_a_question_that_is_thrown_away_is_refused(stack: ExitStack) -> None:
    bed = Bed(stack)
    client, request, _ = bed.asked()
    request.close()
    refused = expect(bed.channel, CmEventType.UNREACHABLE)
    assert (refused.key, refused.status) == (client.key, REFUSED)


def test_request_without_a_listener_is_refused(stack: ExitStack) -> None:
    bed = Bed(stack)
    bound = bed.bound()
    assert bound.local_address is not None
    port = bound.local_address[1]
    client = bed.resolved(port)
    client.connect(ConnectionParameters())
    event = expect(bed.channel, CmEventType.UNREACHABLE)
    assert (event.key, event.status) == (client.key, NOBODY)
    bound.close()  # not even a socket is there now
    client = bed.resolved(port)
    client.connect(ConnectionParameters())
    event = expect(bed.channel, CmEventType.UNREACHABLE)
    assert (event.key, event.status) == (client.key, NOBODY)


def test_a_listener_that_is_gone_leaves_its_questions_to_be_answered(stack: ExitStack) -> None:
    bed = Bed(stack)
    client, request, _ = bed.asked()
    other, late, _ = bed.asked()
    untaken = bed.resolved(bed.port)
    untaken.connect(ConnectionParameters())
    # Its request has come when that of a later one has; those are taken one by one.
    while not (events := list_requests(bed)):
        pass
    assert len(events) == 1
    bed.listener.close()
    request.accept(ConnectionParameters(qp_num=5))
    found = expect(bed.channel, CmEventType.ESTABLISHED)
    assert (found.key, found.qp_num) == (client.key, 5)
    late.close()
    refused = expect(bed.channel, CmEventType.UNREACHABLE)
    assert (refused.key, refused.status) == (other.key, REFUSED)
    Identifier(bed.channel, PortSpace.UDP, key=events[0].new_key).close()
    refused = expect(bed.channel, CmEventType.UNREACHABLE)
    assert (refused.key, refused.status) == (untaken.key, REFUSED)


def list_requests(bed: Bed) -> list[CmEvent]:
    return [each for each in bed.channel.events() if each.type is CmEventType.CONNECT_REQUEST]


def test_untaken_requests_are_rejected_with_the_listener(stack: ExitStack) -> None:
    bed = Bed(stack)
    away = stack.enter_context(EventChannel(DEVICE))
    client = bed.resolved(bed.port)
    client.migrate(away)
    client.connect(ConnectionParameters())
    wait_readable(bed.channel)
    bed.listener.close()
    refused = expect(away, CmEventType.UNREACHABLE)
    assert (refused.key, refused.status) == (client.key, REFUSED)
    assert no_event(bed.channel)


def wait_readable(channel: EventChannel) -> None:
    assert select.select([channel.fd], [], [], 10)[0]


@pytest.mark.capability("questions_wait")
def test_questions_beyond_the_backlog_wait_to_be_repeated(stack: ExitStack) -> None:
    bed = Bed(stack, backlog=1)
    away = stack.enter_context(EventChannel(DEVICE))
    clients = [bed.resolved(bed.port) for _ in range(3)]
    for client in clients:
        client.migrate(away)
        client.connect(ConnectionParameters())
    answered = []
    for number in range(3):
        wait_readable(bed.channel)
        if not number:
            time.sleep(0.05)  # all three have asked, and not again yet
        (event,) = bed.channel.events()
        assert event.type is CmEventType.CONNECT_REQUEST
        request = Identifier(bed.channel, PortSpace.UDP, key=event.new_key)
        stack.enter_context(request)
        request.accept(ConnectionParameters(qp_num=number))
        answered.append(expect(away, CmEventType.ESTABLISHED).key)
    assert sorted(answered) == sorted(client.key for client in clients)


def test_shared_port_delivers_replies_to_their_sender(stack: ExitStack) -> None:
    bed = Bed(stack)
    one = stack.enter_context(Identifier(bed.channel, PortSpace.UDP))
    one.set_reuse_address(True)
    one.bind(ADDRESS, 0)
    assert one.local_address is not None
    other = stack.enter_context(Identifier(bed.channel, PortSpace.UDP))
    other.set_reuse_address(True)
    other.bind(ADDRESS, one.local_address[1])
    requests = []
    for client in (one, other):
        client.resolve_address(ADDRESS, bed.port, None, 5000)
        expect(bed.channel, CmEventType.ADDR_RESOLVED)
        client.resolve_route(5000)
        expect(bed.channel, CmEventType.ROUTE_RESOLVED)
        client.connect(ConnectionParameters())
        event = expect(bed.channel, CmEventType.CONNECT_REQUEST)
        request = Identifier(bed.channel, PortSpace.UDP, key=event.new_key)
        requests.append(stack.enter_context(request))
    for client, request, qp_num in zip((one, other), requests, (3, 4), strict=True):
        request.accept(ConnectionParameters(qp_num=qp_num))
        found = expect(bed.channel, CmEventType.ESTABLISHED)
        assert (found.key, found.qp_num) == (client.key, qp_num)


def test_a_wildcard_answers_from_the_address_that_was_asked(stack: ExitStack) -> None:
    bed = Bed(stack)
    anywhere = stack.enter_context(Identifier(bed.channel, PortSpace.UDP))
    anywhere.bind("::", 0)
    anywhere.listen(4)
    assert anywhere.local_address is not None
    port = anywhere.local_address[1]
    for host in (IPV6, ADDRESS):
        client = stack.enter_context(Identifier(bed.channel, PortSpace.UDP))
        client.resolve_address(host, port, None, 5000)
        expect(bed.channel, CmEventType.ADDR_RESOLVED)
        client.resolve_route(5000)
        expect(bed.channel, CmEventType.ROUTE_RESOLVED)
        client.connect(ConnectionParameters())
        event = expect(bed.channel, CmEventType.CONNECT_REQUEST)
        request = Identifier(bed.channel, PortSpace.UDP, key=event.new_key)
        stack.enter_context(request)
        assert request.local_address is not None
        assert request.local_address[:2] == (host, port)
        request.accept(ConnectionParameters(qp_num=9))
        assert expect(bed.channel, CmEventType.ESTABLISHED).key == client.key


# -- groups ---------------------------------------------------------------------------------------


def refused(code: int) -> "pytest.RaisesExc[aiordma.VerbsCallError]":
    return pytest.raises(aiordma.VerbsCallError, match=os.strerror(code))


def test_joining_says_the_way(stack: ExitStack) -> None:
    bed = Bed(stack)
    member = bed.bound()
    member.join_multicast(GROUP)
    event = expect(bed.channel, CmEventType.MULTICAST_JOIN)
    assert (event.key, event.qp_num, event.qkey) == (member.key, 0xFFFFFF, UDP_QKEY)
    assert event.address is not None
    assert event.address.gid == bytes(10) + b"\xff\xff" + ipaddress.ip_address(GROUP).packed
    member.leave_multicast(GROUP)
    with refused(errno.EADDRNOTAVAIL):
        member.leave_multicast(GROUP)


def test_left_group_raises_no_more_events(stack: ExitStack) -> None:
    bed = Bed(stack)
    member = bed.bound()
    member.join_multicast(GROUP)
    member.join_multicast(OTHER_GROUP)
    member.leave_multicast(GROUP)
    event = expect(bed.channel, CmEventType.MULTICAST_JOIN)
    assert event.address is not None
    assert event.address.gid is not None
    assert event.address.gid[12:] == ipaddress.ip_address(OTHER_GROUP).packed
    assert no_event(bed.channel)
    member.join_multicast(GROUP)
    member.leave_multicast(GROUP)
    assert no_event(bed.channel)


def test_join_rejects_unbound_identifier(stack: ExitStack) -> None:
    bed = Bed(stack)
    with refused(errno.EINVAL):
        bed.listener.join_multicast(GROUP)
    stranger = stack.enter_context(Identifier(bed.channel, PortSpace.UDP))
    with refused(errno.EINVAL):
        stranger.join_multicast(GROUP)
    stranger.bind("0.0.0.0", 0)
    with refused(errno.EINVAL):  # which interface?
        stranger.join_multicast(GROUP)
    stream = stack.enter_context(Identifier(bed.channel, PortSpace.TCP))
    stream.bind(ADDRESS, 0)
    with refused(errno.EINVAL):
        stream.join_multicast(GROUP)


@pytest.mark.capability("joins_checked")
def test_what_cannot_be_joined_is_refused(stack: ExitStack) -> None:
    bed = Bed(stack)
    member = bed.bound()
    for group in (ADDRESS, "ff0e::1"):
        with refused(errno.EINVAL):
            member.join_multicast(group)
        with refused(errno.EINVAL):
            member.leave_multicast(group)
    member.join_multicast(GROUP)
    with refused(errno.EADDRINUSE):
        member.join_multicast(GROUP)
    expect(bed.channel, CmEventType.MULTICAST_JOIN)


def test_an_identifiers_own_queue_pair_is_in_its_groups(stack: ExitStack) -> None:
    """As mckey of rdma-core has it: nothing is attached by the program."""
    bed = Bed(stack)
    ends = []
    for _ in range(2):
        member = bed.bound()
        context = stack.enter_context(member.context())
        domain = stack.enter_context(context.alloc_pd())
        queue = stack.enter_context(CompletionQueue(domain.context, 16))
        pair = member.create_queue_pair(domain, queue, queue, Capacity(), QueuePairType.UD)
        stack.enter_context(pair)
        region = MemoryRegion(domain, bytearray(1000), aiordma.Access.LOCAL_WRITE)
        stack.enter_context(region)
        ends.append((member, domain, queue, pair, region))
    way = None
    for number, (member, _, _, pair, region) in enumerate(ends):
        member.join_multicast(GROUP, send_only=number == 0)
        event = expect(bed.channel, CmEventType.MULTICAST_JOIN)
        way = event.address
        pair.post_recv(number, [region[500:600]])
    assert way is not None
    _, domain, queue, pair, region = ends[0]
    handle = stack.enter_context(AddressHandle(domain, way))

    def send(length: int) -> None:
        work = SendWork("SEND", WorkRequestOpcode.SEND, gather([region[:length]]), 1, length)
        work.address, work.remote_qpn, work.remote_qkey = handle, 0xFFFFFF, UDP_QKEY
        assert pair.post_send_chain([work], [7], [SendFlag.SIGNALED]) == (0, 1)
        assert [each.wr_id for each in polled(queue)] == [7]  # and not what it sent

    send(5)
    member, _, theirs, other, region_of_other = ends[1]
    (received,) = polled(theirs)
    assert (received.wr_id, received.byte_len) == (1, 45)
    assert received.src_qp == pair.qp_num
    other.post_recv(2, [region_of_other[500:600]])
    member.leave_multicast(GROUP)
    send(6)
    time.sleep(0.1)
    assert list(theirs.poll()) == []


def with_queue_pair(
    stack: ExitStack, member: Identifier
) -> tuple[ProtectionDomain, CompletionQueue, QueuePair]:
    """Make a queue pair for datagrams, and what it needs."""
    context = stack.enter_context(member.context())
    domain = stack.enter_context(context.alloc_pd())
    queue = stack.enter_context(CompletionQueue(context, 16))
    pair = member.create_queue_pair(domain, queue, queue, Capacity(), QueuePairType.UD)
    return domain, queue, stack.enter_context(pair)


@pytest.mark.parametrize("first", ["identifier", "queue pair", "domain"])
def test_close_leaves_the_groups_of_a_queue_pair(stack: ExitStack, first: str) -> None:
    """The kernel refuses to destroy a queue pair in a group, which librdmacm does not report."""
    bed = Bed(stack)
    member, before = bed.bound(), kernel_objects(DEVICE)
    domain, queue, pair = with_queue_pair(stack, member)
    for group in (GROUP, OTHER_GROUP):
        member.join_multicast(group)
        expect(bed.channel, CmEventType.MULTICAST_JOIN)
    {"identifier": member, "queue pair": pair, "domain": domain}[first].close()
    assert kernel_objects(DEVICE)["qp"] == before["qp"]
    queue.close()
    domain.close()
    assert kernel_objects(DEVICE)["pd"] == before["pd"]
    if first != "identifier":
        with refused(errno.EADDRNOTAVAIL):
            member.leave_multicast(GROUP)
        member.join_multicast(GROUP)
        expect(bed.channel, CmEventType.MULTICAST_JOIN)


def test_close_keeps_what_a_queue_pair_is_not_in(stack: ExitStack) -> None:
    bed = Bed(stack)
    member = bed.bound()
    _, _, pair = with_queue_pair(stack, member)
    member.join_multicast(GROUP, send_only=True)
    expect(bed.channel, CmEventType.MULTICAST_JOIN)
    member.join_multicast(OTHER_GROUP)
    expect(bed.channel, CmEventType.MULTICAST_JOIN)
    member.leave_multicast(OTHER_GROUP)
    pair.close()
    member.leave_multicast(GROUP)


def test_identifier_closes_though_a_group_cannot_be_left(stack: ExitStack) -> None:
    bed = Bed(stack)
    before = kernel_objects(DEVICE)
    member = bed.bound()
    _, _, pair = with_queue_pair(stack, member)
    pair._groups.add((bytes(16), 0))  # which it is not in
    member.close()
    after = kernel_objects(DEVICE)
    assert (after["qp"], after["cm_id"]) == (before["qp"], before["cm_id"])


def polled(queue: CompletionQueue) -> list[aiordma.verbs.WorkCompletion]:
    """What completes first, and with it."""
    end = time.monotonic() + 10
    while not (found := list(queue.poll())):
        assert time.monotonic() < end
    return found
