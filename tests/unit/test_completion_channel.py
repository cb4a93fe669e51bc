"""Events of completion queues that other threads create and close meanwhile."""

import select
from types import SimpleNamespace
from typing import Any

from aiordma.verbs import CompletionChannel, CompletionQueue, Context, Device, ProtectionDomain
from tests.internals import software
from tests.unit.software_device import PATIENCE, fail, make_pair, nothing_left, post_receive


def complete(queue: CompletionQueue, domain: ProtectionDomain) -> Any:
    """Arm the queue and make one completion; return the queue pair."""
    queue.request_notification()
    pair = make_pair(domain.pointer, queue.pointer, queue.pointer)
    assert post_receive(pair, 1) == 0
    fail(pair)
    return pair


def meanwhile(channel: CompletionChannel, act: Any) -> None:
    """Have `events` interrupted by `act`, as by another thread, before it takes an event."""

    def get_cq_event(*arguments: Any) -> Any:
        channel.provider = software()
        act()
        return software().get_cq_event(*arguments)

    provider: Any = SimpleNamespace(
        get_cq_event=get_cq_event, ack_cq_events=software().ack_cq_events
    )
    channel.provider = provider


def wait(channel: CompletionChannel) -> None:
    assert select.select([channel.fd], [], [], PATIENCE)[0]


def test_event_of_a_queue_created_meanwhile() -> None:
    with nothing_left(), Device("software").open() as context:
        domain, channel = ProtectionDomain(context), CompletionChannel(context)
        created = []

        def create() -> None:
            created.append(CompletionQueue(context, 4, channel))
            created.append(complete(created[0], domain))
            wait(channel)

        meanwhile(channel, create)
        assert channel.events() == created[:1]
        software().destroy_qp(created[1])


def test_queue_that_is_being_created_is_passed_over() -> None:
    class Slow(CompletionQueue):
        """One that the device has not made yet."""

        def __init__(self, context: Context, channel: CompletionChannel) -> None:
            super(CompletionQueue, self).__init__(context, channel)

        def _destroy(self) -> None:
            pass

    with nothing_left(), Device("software").open() as context:
        domain, channel = ProtectionDomain(context), CompletionChannel(context)
        with Slow(context, channel), CompletionQueue(context, 4, channel) as queue:
            pair = complete(queue, domain)
            wait(channel)
            assert channel.events() == [queue]
            software().destroy_qp(pair)


def test_event_of_a_queue_that_is_unknown_is_acknowledged() -> None:
    # Such as one whose constructor has not returned in another thread.
    with nothing_left(), Device("software").open() as context:
        domain, channel = ProtectionDomain(context), CompletionChannel(context)
        with CompletionQueue(context, 4, channel) as queue:
            pair = complete(queue, domain)
            wait(channel)
            queue._move(context)
            assert channel.events() == []
            software().destroy_qp(pair)


def test_address_of_a_closed_queue_names_the_new_one() -> None:
    with nothing_left(), Device("software").open() as context:
        domain, channel = ProtectionDomain(context), CompletionChannel(context)
        # With neighbours on both sides, its place in memory is not joined to another free one.
        neighbours = [CompletionQueue(context, 4, channel) for _ in range(64)]
        queues = [neighbours.pop(32)]
        pairs = []

        def replace() -> None:
            address = queues[0].pointer
            # glibc puts the first 7 free blocks of a size where calloc does not look (tcache).
            for neighbour in neighbours[:32:4]:
                neighbour.close()
            queues[0].close()
            while queues[-1].closed or queues[-1].pointer != address:
                queues.append(CompletionQueue(context, 4, channel))
                # The allocator returns to the address once it has filled its other holes.
                assert len(queues) < 10_000
            pairs.append(complete(queues[-1], domain))
            wait(channel)

        meanwhile(channel, replace)
        assert channel.events() == queues[-1:]
        software().destroy_qp(pairs[0])
