"""The last drain of an endpoint's end ends at an empty queue."""

import pytest

import aiordma
from aiordma.testing import connected_pair
from tests.internals import hub_of

pytestmark = pytest.mark.natively


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
