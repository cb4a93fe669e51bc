"""A scenario for each await of aiordma.integrations, as in awaits.py."""

import asyncio
from contextlib import suppress
from typing import Any

import anyio
from distributed.comm import core
from distributed.comm.core import CommClosedError

from aiordma import streams
from aiordma.integrations import dask, httpcore, opentelemetry, prometheus, valkey
from aiordma.integrations.dask import RdmaComm, RdmaConnector, RdmaListener
from aiordma.integrations.httpcore import StreamBackend
from tests.dask.test_channel import comms
from tests.devices import ADDRESS
from tests.faults.awaits import ASYNCIO, of
from tests.faults.stream_awaits import read_until_eof
from tests.faults.suspensions import CANCELLED, Cut
from tests.valkey.server import serving

__all__ = ("PACKAGES",)

PACKAGES: dict[Any, str] = {
    dask: "dask.",
    httpcore: "httpcore.",
    opentelemetry: "opentelemetry.",
    prometheus: "prometheus.",
    valkey: "valkey.",
}
"""The packages, and how the names of their awaits begin here."""

connect: Any = core.connect
listen: Any = core.listen


# -- Dask -----------------------------------------------------------------------------------------


@of("dask.RdmaComm.write", on=ASYNCIO)
async def comm_write(cut: Cut) -> None:
    async with comms() as (client, server), anyio.create_task_group() as group:
        found: list[Any] = []

        async def read() -> None:
            with suppress(CommClosedError):
                found.append(await server.read())

        group.start_soon(read)
        if await cut.run(client.write("message")) is CANCELLED:
            assert client.closed()
            assert found in ([], ["message"])


@of("dask.RdmaComm.read", on=ASYNCIO)
async def comm_read(cut: Cut) -> None:
    async with comms() as (client, server), anyio.create_task_group() as group:

        async def write() -> None:
            with suppress(CommClosedError):
                await anyio.wait_all_tasks_blocked()
                await client.write("message")

        group.start_soon(write)
        found = await cut.run(server.read())
        assert server.closed() if found is CANCELLED else found == "message"


@of("dask.RdmaComm.close", on=ASYNCIO)
async def comm_close(cut: Cut) -> None:
    async with comms() as (client, server):
        await cut.run(client.close())
        assert client.closed()
        with suppress(CommClosedError):
            await server.read()
        assert server.closed()


@of("dask.RdmaConnector.connect", on=ASYNCIO)
async def comm_connect(cut: Cut) -> None:
    accepted: asyncio.Queue[RdmaComm] = asyncio.Queue()
    async with listen(f"rdma://{ADDRESS}", accepted.put) as listener:
        location = listener.contact_address.removeprefix("rdma://")
        comm = await cut.run(RdmaConnector().connect(location))
        if comm is not CANCELLED:
            await comm.close()
        other = await connect(listener.contact_address)  # the listener serves the next peer
        await (await accepted.get()).close()
        await other.close()


@of("dask.RdmaListener.start", on=ASYNCIO)
async def comm_listen(cut: Cut) -> None:
    listener = RdmaListener(ADDRESS, lambda comm: None)
    await cut.run(listener.start())
    closing = listener.stop()
    if closing is not None:
        await closing


# -- Valkey ---------------------------------------------------------------------------------------


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send back what arrives, until the peer ends."""
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)


@of("valkey.open_connection", needs="immediate", on=ASYNCIO)
async def valkey_open(cut: Cut) -> None:
    async with serving(echo) as port:
        opened = await cut.run(valkey.open_connection(ADDRESS, port))
        writers = [] if opened is CANCELLED else [opened[1]]
        reader, writer = await valkey.open_connection(ADDRESS, port)  # the next client is served
        writer.write(b"last")
        assert await reader.readexactly(4) == b"last"
        for each in [*writers, writer]:
            each.close()
            await each.wait_closed()


# -- httpcore -------------------------------------------------------------------------------------


@of("httpcore.StreamBackend.connect_tcp", "httpcore.StreamBackend.sleep", on=ASYNCIO)
async def backend_connect(cut: Cut) -> None:
    backend, sleeping = StreamBackend(), Cut(cut.at, cut.mode)
    await sleeping.run(backend.sleep(0.001))
    async with (
        await streams.listen_stream(ADDRESS) as listener,
        anyio.create_task_group() as group,
    ):
        group.start_soon(listener.serve, read_until_eof)
        stream = await cut.run(backend.connect_tcp(ADDRESS, listener.port))
        if stream is not CANCELLED:
            await stream.aclose()
        async with streams.connect_stream(ADDRESS, listener.port) as other:
            await other.send(b"x")  # the listener serves the next peer
        group.cancel_scope.cancel()
    cut.reached |= sleeping.reached
