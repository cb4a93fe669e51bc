"""Queue pairs that librdmacm has not made: CONNECT_RESPONSE, establish, notify, and ECE."""

import select
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import pytest

import aiordma
from aiordma import MemoryRegion
from aiordma.verbs import (
    AsyncEventType,
    Capacity,
    CmEventType,
    CompletionQueue,
    ConnectionParameters,
    Context,
    Ece,
    EventChannel,
    Identifier,
    QueuePair,
    QueuePairState,
)
from tests.device.identifiers import expect, listening, next_event, no_event, resolved
from tests.devices import DeviceUnderTest
from tests.internals import REJECT_REASONS


class End:
    """A queue pair made without librdmacm, and a buffer."""

    def __init__(self, context: Context, stack: ExitStack) -> None:
        domain = stack.enter_context(context.alloc_pd())
        self.queue = stack.enter_context(CompletionQueue(context, 8))
        self.pair = stack.enter_context(
            QueuePair.create(domain, self.queue, self.queue, capacity=Capacity(4, 4))
        )
        self.buffer = bytearray(64)
        self.memory = stack.enter_context(MemoryRegion(domain, self.buffer))

    def move(self, identifier: Identifier, *states: QueuePairState) -> None:
        for state in states:
            self.pair.modify(**identifier.init_qp_attr(state))
        assert self.pair.state is states[-1]

    def completion(self) -> aiordma.verbs.WorkCompletion:
        while True:
            for completion in self.queue.poll():
                return completion


S = QueuePairState


@contextmanager
def answered(ece: Ece | None = None) -> Iterator[tuple[EventChannel, list[Identifier], list[End]]]:
    """A client and a server that make their queue pairs themselves, up to the point where the
    server has accepted, and the client has the event: (events, identifiers, ends)."""
    with ExitStack() as stack:
        channel = stack.enter_context(EventChannel())
        _, port = listening(channel, stack)
        client = resolved(channel, port, stack)
        context = stack.enter_context(client.context())
        ours, theirs = End(context, stack), End(context, stack)
        ours.move(client, S.INIT)
        if ece is not None:
            client.set_local_ece(ece)
        client.connect(ConnectionParameters(qp_num=ours.pair.qp_num))
        request = expect(channel, CmEventType.CONNECT_REQUEST)
        assert request.qp_num == ours.pair.qp_num
        server = stack.enter_context(Identifier(channel, key=request.new_key))
        theirs.move(server, S.INIT, S.RTR, S.RTS)
        if ece is not None:
            assert server.remote_ece == ece
            server.set_local_ece(Ece(ece.vendor_id, ece.options & 1))
        server.accept(ConnectionParameters(qp_num=theirs.pair.qp_num))
        response = expect(channel, CmEventType.CONNECT_RESPONSE)
        assert (response.key, response.qp_num) == (client.key, theirs.pair.qp_num)
        yield channel, [client, server], [ours, theirs]


@pytest.mark.capability("rdma_establish")
def test_a_queue_pair_of_ones_own_is_moved_and_established_by_hand() -> None:
    with answered() as (channel, (client, server), (ours, theirs)):
        ours.move(client, S.RTR, S.RTS)
        assert no_event(channel)  # the server waits for our word
        client.establish()
        assert expect(channel, CmEventType.ESTABLISHED).key == server.key
        theirs.pair.post_recv(1, [theirs.memory[0:32]])
        ours.buffer[0:5] = b"hello"
        ours.pair.post_send(2, [ours.memory[0:5]])
        assert ours.completion().status == 0
        received = theirs.completion()
        assert (received.status, received.byte_len) == (0, 5)
        assert bytes(theirs.buffer[0:5]) == b"hello"
        client.disconnect()
        assert expect(channel, CmEventType.DISCONNECTED).key == server.key


@pytest.mark.capability("rdma_establish")
def test_message_replaces_a_lost_establish() -> None:
    with answered() as (channel, (client, server), (ours, theirs)):
        theirs.pair.post_recv(1, [theirs.memory[0:32]])
        ours.move(client, S.RTR, S.RTS)
        ours.pair.post_send(2, [ours.memory[0:5]])
        assert theirs.completion().status == 0
        assert no_event(channel)  # ours has not been said, and never will be
        server.notify(AsyncEventType.COMM_EST)
        assert expect(channel, CmEventType.ESTABLISHED).key == server.key
        server.notify()  # known by now
        assert no_event(channel)


@contextmanager
def accepted_unnoticed() -> Iterator[tuple[tuple[EventChannel, Identifier], ...]]:
    """A client with librdmacm's queue pair, and a server that has accepted it. The client's program
    has not taken its event."""
    with ExitStack() as stack:
        theirs, ours = (stack.enter_context(EventChannel()) for _ in range(2))
        _, port = listening(theirs, stack)
        client = resolved(ours, port, stack)
        context = stack.enter_context(client.context())
        domain = stack.enter_context(context.alloc_pd())
        queue = stack.enter_context(CompletionQueue(context, 8))
        client.create_queue_pair(domain, queue, queue, Capacity(4, 4))
        client.connect(ConnectionParameters())
        request = expect(theirs, CmEventType.CONNECT_REQUEST)
        server = stack.enter_context(Identifier(theirs, key=request.new_key))
        end = End(context, stack)
        end.move(server, S.INIT, S.RTR, S.RTS)
        server.accept(ConnectionParameters(qp_num=end.pair.qp_num))
        select.select([ours.fd], [], [])
        yield (ours, client), (theirs, server)


@pytest.mark.capability("rdma_establish")
def test_peer_is_not_connected_before_the_program_learns_of_it() -> None:
    with accepted_unnoticed() as ((_, client), (theirs, server)):
        assert no_event(theirs)
        client.close()
        assert expect(theirs, CmEventType.REJECTED).key == server.key


@pytest.mark.capability("rdma_establish")
def test_peer_that_accepts_and_leaves_at_once_has_disconnected() -> None:
    with accepted_unnoticed() as ((ours, client), (_, server)):
        server.close()
        time.sleep(0.1)  # both events are there
        first = next_event(ours)
        if first.type is CmEventType.ESTABLISHED:
            first = expect(ours, CmEventType.DISCONNECTED)
        else:
            assert first.type in (CmEventType.REJECTED, CmEventType.CONNECT_ERROR)
        assert first.key == client.key


@pytest.mark.capability("rdma_establish")
def test_modify_rejects_incomplete_attributes() -> None:
    with ExitStack() as stack:
        channel = stack.enter_context(EventChannel())
        client = resolved(channel, 7471, stack)
        end = End(stack.enter_context(client.context()), stack)
        end.move(client, S.INIT)
        with pytest.raises(ValueError, match="INIT to RTR of a RC queue pair needs AV"):
            end.move(client, S.RTR)
        with pytest.raises(aiordma.VerbsCallError, match="rdma_establish"):
            client.establish()
        with pytest.raises(aiordma.VerbsCallError, match="rdma_notify"):
            client.notify()
        with Identifier(channel) as unbound, pytest.raises(aiordma.VerbsCallError):
            unbound.init_qp_attr(S.INIT)


def test_what_librdmacm_sees_to_is_not_done_by_hand() -> None:
    with ExitStack() as stack:
        channel = stack.enter_context(EventChannel())
        client = resolved(channel, 7471, stack)
        context = stack.enter_context(client.context())
        domain = stack.enter_context(context.alloc_pd())
        queue = stack.enter_context(CompletionQueue(context, 8))
        client.create_queue_pair(domain, queue, queue, Capacity(4, 4))
        for call in (
            client.establish,
            client.reject_ece,
            lambda: client.set_local_ece(Ece(1, 1)),
            lambda: client.remote_ece,
        ):
            with pytest.raises(ValueError, match="librdmacm created the queue pair"):
                call()


# -- enhanced connection establishment ------------------------------------------------------------


@pytest.mark.capability("ece")
def test_options_are_offered_and_agreed_to() -> None:
    with answered(Ece(0x15B3, 7)) as (_, (client, _server), _ends):
        assert client.remote_ece == Ece(0x15B3, 1)


@pytest.mark.capability("ece")
def test_options_that_do_not_suit_are_a_refusal_of_their_own() -> None:
    with ExitStack() as stack:
        channel = stack.enter_context(EventChannel())
        _, port = listening(channel, stack)
        client = resolved(channel, port, stack)
        end = End(stack.enter_context(client.context()), stack)
        client.set_local_ece(Ece(0x15B3, 7))
        client.connect(ConnectionParameters(qp_num=end.pair.qp_num))
        request = expect(channel, CmEventType.CONNECT_REQUEST)
        with Identifier(channel, key=request.new_key) as server:
            with pytest.raises(ValueError, match="at most 148"):
                server.reject_ece(bytes(149))
            server.reject_ece(b"without, please")
            refusal = expect(channel, CmEventType.REJECTED)
        assert refusal.status in REJECT_REASONS
        assert "options" in REJECT_REASONS[refusal.status]
        assert refusal.private_data.rstrip(b"\0") == b"without, please"


def test_options_where_the_handshake_has_none_name_the_device(device: DeviceUnderTest) -> None:
    refused = pytest.raises(aiordma.NotSupportedError, match=rf"{device.name}.*no ECE")
    with ExitStack() as stack:
        channel = stack.enter_context(EventChannel())
        client = resolved(channel, 7471, stack)
        with refused if device.lacks("ece") else nullcontext():
            client.set_local_ece(Ece(1, 1))
        with refused if device.lacks("ece") else nullcontext():
            assert client.remote_ece == Ece(0, 0)  # neither side has sent anything
