"""The end of a stream's connect that is cancelled or times out: its peer may have accepted it."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import aiordma
from aiordma import streams
from aiordma.testing import software_objects
from aiordma.verbs.identifier import Identifier
from tests.device.players import one_loop, reactor_in_use, until
from tests.devices import ADDRESS
from tests.internals import Endpoint, current_reactors, endpoint_of, software

pytestmark = pytest.mark.anyio


class Gate:
    """Holds back the answers of a listener."""

    def __init__(self, listener: streams.StreamListener) -> None:
        self.asked, self.opened = anyio.Event(), anyio.Event()
        handshakes = endpoint_of(listener).handshakes
        self._establish = handshakes._establish
        handshakes._establish = self._wait

    async def _wait(self, request: Any, private_data: bytes) -> aiordma.Connection:
        self.asked.set()
        await self.opened.wait()
        return await self._establish(request, private_data)


@asynccontextmanager
async def gated(**options: Any) -> AsyncIterator[tuple[streams.StreamListener, Gate]]:
    async with streams.listen_stream(ADDRESS, **options) as listener:
        yield listener, Gate(listener)
    await until(lambda: not reactor_in_use())


async def cancel_connect(port: int, gate: Gate, **options: Any) -> None:
    """Cancel a connect to a listener that has its request."""
    async with anyio.create_task_group() as group:
        group.start_soon(partial(streams.connect_stream, ADDRESS, port, **options))
        await gate.asked.wait()
        group.cancel_scope.cancel()


async def expect_end(listener: streams.StreamListener) -> None:
    async with await listener.accept() as stream:
        with pytest.raises(anyio.EndOfStream):
            await stream.receive()


@pytest.mark.promise("Cancellation loses no message and leaves nothing open")
@pytest.mark.capability("iwarp")
async def test_peer_that_accepts_a_cancelled_connect_gets_an_end() -> None:
    """Not an error: it has everything that was sent, which is nothing. So it is over TCP."""
    async with gated() as (listener, gate), anyio.create_task_group() as group:
        group.start_soon(expect_end, listener)
        await cancel_connect(listener.port, gate)
        gate.opened.set()


@pytest.mark.natively
async def test_timeout_closes_the_connection_before_it_raises() -> None:
    async with gated() as (listener, gate):
        before = software_objects()["queue_pairs"]
        with pytest.raises(aiordma.ConnectTimeoutError, match="waiting for the peer to accept"):
            await streams.connect_stream(ADDRESS, listener.port, timeout=0.2)
        assert software_objects()["queue_pairs"] == before
        gate.opened.set()


@pytest.mark.natively
@pytest.mark.capability("iwarp")
async def test_connect_call_that_waits_is_withdrawn_when_it_has_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on siw, whose connect call waits in a worker thread."""
    called, returns = threading.Event(), threading.Event()
    connect = Identifier._connect

    def slow(identifier: Identifier, request: tuple[Any, Any]) -> None:
        connect(identifier, request)
        called.set()
        assert returns.wait(60)

    monkeypatch.setattr(software(), "blocks", True)
    monkeypatch.setattr(Identifier, "_connect", slow)
    async with gated() as (listener, gate), anyio.create_task_group() as group:
        group.start_soon(expect_end, listener)
        await cancel_connect(listener.port, gate)
        await until(called.is_set)  # its request can be here before the call has returned
        gate.opened.set()
        returns.set()


async def test_withdrawn_connect_waits_for_its_peer_for_a_limited_time() -> None:
    async with gated() as (listener, gate), anyio.create_task_group() as group:
        group.start_soon(listener.accept)
        await cancel_connect(listener.port, gate, close_timeout=0.1)
        (found,) = current_reactors()

        def owners() -> list[Any]:
            return [getattr(each, "_owner", None) for each in found.closables]

        await until(lambda: not any(isinstance(owner, Endpoint) for owner in owners()))
        group.cancel_scope.cancel()


@one_loop
@pytest.mark.natively
@pytest.mark.capability("iwarp")
async def test_peer_of_an_ended_loop_gets_an_end() -> None:
    """The loop ends while the connect is withdrawn."""
    async with gated() as (listener, gate):

        async def connect() -> None:
            connecting = asyncio.create_task(connect_and_close(listener.port))
            while not gate.asked.is_set():
                await asyncio.sleep(0.01)
            connecting.cancel()

        async def open_gate() -> None:
            await gate.asked.wait()
            await anyio.sleep(0.1)
            gate.opened.set()

        async with anyio.create_task_group() as group:
            group.start_soon(open_gate)
            group.start_soon(anyio.to_thread.run_sync, lambda: asyncio.run(connect()))
            await expect_end(listener)


async def connect_and_close(port: int) -> None:
    async with streams.connect_stream(ADDRESS, port):
        pass


@pytest.mark.natively
async def test_connect_cancelled_after_any_number_of_turns_is_no_error_of_its_peer() -> None:
    ends: list[bytes] = []

    async def read(stream: streams.Stream) -> None:
        ends.extend([data async for data in stream])

    async with (
        streams.listen_stream(ADDRESS) as listener,
        anyio.create_task_group() as serving,
    ):
        serving.start_soon(listener.serve, read)  # an error would end the group
        for turns in range(0, 200, 3):
            async with anyio.create_task_group() as group:
                group.start_soon(connect_and_close, listener.port)
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()
        async with streams.connect_stream(ADDRESS, listener.port) as stream:
            await stream.send(b"last")
        await until(lambda: ends == [b"last"])
        serving.cancel_scope.cancel()
    await until(lambda: not reactor_in_use())
