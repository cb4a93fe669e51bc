"""`aiordma ping` and a peer that does not keep to rping's protocol."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from aiordma import Access, Connection
from aiordma.cli import rping
from aiordma.testing import connected_pair
from tests.devices import ADDRESS, DEVICE

pytestmark = [pytest.mark.anyio, pytest.mark.one_kernel_device]

HOSTILE = b"\x1b]0;owned\x07\r\xc3\xa9\xff"
"""A terminal's escape sequence, and bytes that are no ASCII."""
SHOWN = r"\x1b]0;owned\x07\x0d\xc3\xa9\xff"


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Connection, Connection]]:
    with anyio.fail_after(30):
        async with connected_pair(ADDRESS, DEVICE, options=rping.OPTIONS) as ends:
            yield ends


@pytest.mark.parametrize(
    ("address", "length", "said"),
    [(2**64 - 1, 100, "address space"), (2**64 - 100, 100, "address space"), (0, 0, "0 bytes")],
)
async def test_server_refuses_a_buffer_that_cannot_be(address: int, length: int, said: str) -> None:
    async with connected() as (client, server):
        await client.send(rping.DESCRIPTION.pack(address, 5, length))
        with pytest.raises(rping.PingError, match=said):
            await rping.answer(server)


async def test_server_shows_a_clients_text_in_printable_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with connected() as (client, server), anyio.create_task_group() as group:

        async def answer() -> None:
            with pytest.raises(rping.PingError, match="the peer left"):
                await rping.answer(server, show=True)

        group.start_soon(answer)
        source = client.register(bytearray(HOSTILE + b"\0\0"), Access.REMOTE_READ)
        await client.send(rping.describe(source.remote()))
        await client.receive()
        await client.aclose()
    assert capsys.readouterr().out == f"server ping data: {SHOWN}\n"


async def test_client_shows_a_servers_text_in_printable_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with connected() as (client, server), anyio.create_task_group() as group:

        async def write() -> None:
            await server.receive()
            await server.send(rping.GO_AHEAD)
            sink = rping.described(await server.receive())
            await server.write(HOSTILE + b"\0", sink[: len(HOSTILE) + 1])
            await server.send(rping.GO_AHEAD)

        group.start_soon(write)
        await rping.ping(client, count=1, size=len(HOSTILE) + 1, show=True)
    assert capsys.readouterr().out == f"ping data: {SHOWN}\n"
