"""Use of a connection while another event loop runs in the thread: EventLoopError, whether or not
the operation could have completed at once."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

import aiordma
from aiordma import Access
from tests.connections import connect_to
from tests.device.players import REMOTE, both_ways
from tests.devices import ADDRESS

pytestmark = pytest.mark.natively


class Ends:
    """Two connections, with a message that has arrived."""

    async def open(self) -> None:
        self.listener = await aiordma.listen(ADDRESS, 0)
        self.client, self.server = await connect_to(self.listener, ADDRESS)
        self.datagram = await aiordma.open_datagram(ADDRESS)
        region = self.server.register(bytearray(8), REMOTE | Access.REMOTE_ATOMIC)
        self.remote = region.remote()
        await self.client.send(b"waits")
        await asyncio.sleep(0.05)

    async def close(self) -> None:
        for each in (self.client, self.server, self.datagram, self.listener):
            await each.aclose()


USES: dict[str, Callable[[Ends], Any]] = {
    "send": lambda ends: ends.client.send(b"hello"),
    "sendv": lambda ends: ends.client.sendv([b"he", b"llo"]),
    "write": lambda ends: ends.client.write(b"hello", ends.remote[:5]),
    "read": lambda ends: ends.client.read(bytearray(8), ends.remote),
    "read_bytes": lambda ends: ends.client.read_bytes(ends.remote),
    "fetch_add": lambda ends: ends.client.fetch_add(ends.remote, 1),
    "receive": lambda ends: ends.server.receive(),
    "receive_message": lambda ends: ends.server.receive_message(),
    "receive_view": lambda ends: ends.server.receive_view().__aenter__(),
    "post_send": lambda ends: ends.client.post_send(b"hello"),
    "grant": lambda ends: ends.client.grant(bytearray(8), Access.REMOTE_READ),
    "datagram": lambda ends: ends.datagram.receive(),
}


async def use(ends: Ends, how: str) -> None:
    with pytest.raises(aiordma.EventLoopError, match="belongs to the event loop"):
        await USES[how](ends)


@pytest.mark.parametrize("how", USES)
def test_use_from_another_loop_raises_event_loop_error(how: str) -> None:
    ends, own, other = Ends(), asyncio.new_event_loop(), asyncio.new_event_loop()
    own.run_until_complete(ends.open())
    other.run_until_complete(use(ends, how))
    other.close()
    # Nothing has happened, and the own loop goes on.
    assert own.run_until_complete(ends.server.receive()) == b"waits"
    own.run_until_complete(both_ways(ends.client, ends.server))
    own.run_until_complete(ends.close())
    own.close()


@pytest.mark.parametrize("how", USES)
@pytest.mark.filterwarnings("ignore:left open")
def test_use_after_the_loop_raises_event_loop_error(how: str) -> None:
    ends, own, other = Ends(), asyncio.new_event_loop(), asyncio.new_event_loop()
    own.run_until_complete(ends.open())
    own.close()
    other.run_until_complete(use(ends, how))
    for each in (ends.client, ends.server, ends.datagram, ends.listener):
        with suppress(aiordma.EventLoopError):  # "it is closed now"
            other.run_until_complete(each.aclose())
    other.close()
