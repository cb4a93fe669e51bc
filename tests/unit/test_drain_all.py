"""The last drain of an endpoint's end delivers all completions, whatever a callback raises."""

import time

import pytest

import aiordma
from aiordma import Access
from aiordma.testing import connected_pair
from tests.internals import hub_of

pytestmark = pytest.mark.natively

COUNT = 600
"""Requests: more than two batches."""


class Interrupt(BaseException):
    """As a KeyboardInterrupt is, but a failure of this test does not end pytest."""


def interrupt(_: object) -> None:
    raise Interrupt


def fill_queue() -> None:
    """Let the device complete its requests, and no loop deliver them."""
    time.sleep(0.1)


@pytest.mark.promise("SIGINT ends a program as the event loop says")
def test_interrupt_in_one_drain_skips_no_other() -> None:
    async def body() -> None:
        async with connected_pair(max_send_wr=COUNT, receive_buffers=0) as (client, server):
            remote = server.register(bytearray(8), Access.REMOTE_WRITE).remote()
            local = client.register(bytearray(8))[:]
            requests = [client.post_write(local, remote) for _ in range(COUNT)]
            for interrupted in (0, 300):
                requests[interrupted].add_done_callback(interrupt)
            fill_queue()
            with pytest.raises(Interrupt):
                hub_of(client).drain_all()
            assert all(request.done() for request in requests)

    aiordma.run(body())


def test_empty_queue_is_drained_once_however_much_it_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        async with connected_pair(receive_buffers=0) as (client, _):
            hub, drains = hub_of(client), list[int]()
            drain = hub.drain
            monkeypatch.setattr(hub, "drain", lambda: drains.append(drain()))
            for shared in hub._queues:
                monkeypatch.setattr(shared.queue, "cqe", 1 << 22)
            hub.drain_all()
            assert drains == [0]
            monkeypatch.undo()

    aiordma.run(body())
