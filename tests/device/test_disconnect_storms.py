"""An orderly disconnect is an end of the stream however busy the process is: the flush, which the
device delivers at once, is explained by the connection manager's event, however late that comes."""

import threading
from collections import Counter
from collections.abc import Iterator

import anyio
import pytest

import aiordma
from tests.device.players import connected
from tests.devices import ADDRESS, BUILT_IN
from tests.forked import python
from tests.internals import endpoint, endpoint_of

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PEERS = 150

CLIENTS = """
import sys
import anyio
import aiordma

async def main():
    host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    connections = [await aiordma.connect(host, port, receive_buffers=4) for _ in range(count)]
    print("connected", flush=True)
    sys.stdin.readline()
    for connection in connections:
        await connection.aclose()

anyio.run(main)
"""


async def test_disconnect_explains_flush_after_a_slow_destroy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "FLUSH_CAUSE_SECONDS", 0.01)
    may_end = threading.Event()
    async with connected() as (client, server):
        reactor = endpoint_of(server).reactor
        monkeypatch.setattr(reactor, "blocks", True)  # also of the software device
        reactor.destroy(lambda: may_end.wait(20), lambda _: None)
        async with anyio.create_task_group() as group:
            group.start_soon(client.aclose)
            await anyio.sleep(0.2)  # no event can be taken; the flush has been delivered
            may_end.set()
            with pytest.raises(anyio.EndOfStream):
                await server.receive()


@pytest.fixture
def busy_thread() -> Iterator[threading.Event]:
    """A thread that computes once the event is set, until the test has ended."""
    begin, end = threading.Event(), threading.Event()

    def compute() -> None:
        begin.wait()
        while not end.is_set():
            sum(range(10000))

    thread = threading.Thread(target=compute, name="busy")
    thread.start()
    yield begin
    end.set()
    begin.set()
    thread.join()


@pytest.mark.skipif(not BUILT_IN, reason="150 peers are too many for an emulated machine")
async def test_a_storm_of_disconnects_ends_every_stream(busy_thread: threading.Event) -> None:
    ends: Counter[type[BaseException]] = Counter()
    all_ended = anyio.Event()

    async def receive(connection: aiordma.Connection) -> None:
        try:
            await connection.receive()
        except (aiordma.RdmaError, anyio.EndOfStream) as error:
            ends[type(error)] += 1
        if ends.total() == PEERS:
            all_ended.set()

    async with await aiordma.listen(ADDRESS, 0, backlog=PEERS, receive_buffers=4) as listener:
        arguments = [ADDRESS, str(listener.port), str(PEERS)]
        peers = await anyio.open_process([*python(), "-c", CLIENTS, *arguments])
        assert peers.stdin is not None
        assert peers.stdout is not None
        async with peers, anyio.create_task_group() as group:
            group.start_soon(listener.serve, receive)
            assert (await peers.stdout.receive()).startswith(b"connected")
            busy_thread.set()
            await peers.stdin.aclose()
            await all_ended.wait()
            group.cancel_scope.cancel()
    assert ends == {anyio.EndOfStream: PEERS}
