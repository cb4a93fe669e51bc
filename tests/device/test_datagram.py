"""Datagram sockets: resolving, sending, replying, and what is left afterwards."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

import aiordma
from tests.device.players import one_loop
from tests.devices import ADDRESS

pytestmark = [pytest.mark.anyio, pytest.mark.capability("datagrams")]


@asynccontextmanager
async def sockets(
    *, one: dict[str, Any] | None = None, other: dict[str, Any] | None = None
) -> AsyncIterator[tuple[aiordma.Datagram, aiordma.Datagram]]:
    async with (
        await aiordma.open_datagram(ADDRESS, **(one or {})) as first,
        await aiordma.open_datagram(ADDRESS, **(other or {})) as second,
    ):
        yield first, second


async def test_a_datagram_and_its_answer() -> None:
    async with sockets() as (one, other):
        peer = await one.resolve(ADDRESS, other.port)
        assert (peer.qpn, peer.qkey) == (other.qpn, 0x01234567)
        await one.send(b"hello", peer)
        message = await other.receive()
        assert (message.data, message.immediate) == (b"hello", None)
        assert message.sender_qpn == message.source.qpn == one.qpn
        await other.send(b"and back", message.source, immediate=0xFEEDBEEF)
        answer = await one.receive()
        assert (answer.data, answer.immediate) == (b"and back", 0xFEEDBEEF)


@one_loop
async def test_debug() -> None:
    async with sockets() as (one, other):
        print(one, other, one.gid, one.mtu, one.lid)
        group = await one.join("239.1.2.3")
        g2 = await other.join("239.1.2.3")
        print(group.peer)
        await one.send(b"to all", group)
        message = await other.receive()
        print(message, message.data, message._grh, message._completion, message.source)
        with anyio.move_on_after(2):
            message = await one.receive()
            print("self", message, message.data, message._grh, message._completion, message.source)
        await other.send(b"reply", message.source)
        print(await one.receive())
