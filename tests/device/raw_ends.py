"""Queue pairs of the synchronous verbs, connected by the connection manager."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import aiordma
from aiordma import MemoryRegion
from aiordma.verbs import (
    Capacity,
    CmEventType,
    CompletionQueue,
    ConnectionParameters,
    EventChannel,
    Identifier,
    QueuePair,
    SendFlag,
)
from tests.device.identifiers import expect, listening, resolved


@dataclass
class End:
    """A queue pair that the connection manager has connected, its queue and its domain."""

    pair: QueuePair
    queue: CompletionQueue
    domain: aiordma.verbs.ProtectionDomain

    def completion(self) -> aiordma.verbs.WorkCompletion:
        while True:
            for completion in self.queue.poll(1):
                return completion

    def nothing_completes(self) -> bool:
        time.sleep(0.05)
        return not self.queue.poll()


def make_end(identifier: Identifier, stack: ExitStack, *, timestamps: bool = False) -> End:
    context = stack.enter_context(identifier.context())
    domain = stack.enter_context(context.alloc_pd())
    queue = stack.enter_context(CompletionQueue(context, 16, timestamps=timestamps))
    pair = identifier.create_queue_pair(domain, queue, queue, Capacity(8, 8))
    return End(stack.enter_context(pair), queue, domain)


@contextmanager
def connected(
    *, timestamps: bool = False, accepting: ConnectionParameters | None = None
) -> Iterator[tuple[End, End]]:
    """The side that connected, and the one that accepted, with the parameters `accepting`."""
    with ExitStack() as stack:
        channel = stack.enter_context(EventChannel())
        _, port = listening(channel, stack)
        client = resolved(channel, port, stack)
        ours = make_end(client, stack, timestamps=timestamps)
        client.connect(ConnectionParameters())
        request = expect(channel, CmEventType.CONNECT_REQUEST)
        server = stack.enter_context(Identifier(channel, key=request.new_key))
        theirs = make_end(server, stack)
        # iWARP: the accepting side waits for a message. (siw takes no receive without parts.)
        first = stack.enter_context(MemoryRegion(theirs.domain, bytearray(1)))
        theirs.pair.post_recv(100, [first])
        server.accept(accepting or ConnectionParameters())
        for _ in range(2):
            expect(channel, CmEventType.ESTABLISHED)
        ours.pair.post_send(100, [b"1"], flags=SendFlag.INLINE | SendFlag.SIGNALED)
        assert theirs.completion().wr_id == 100
        if not timestamps:
            assert ours.completion().ok
        yield ours, theirs
