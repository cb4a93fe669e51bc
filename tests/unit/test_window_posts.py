"""Binds and invalidations of memory windows by the engine: what they hold, and until when."""

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

import aiordma
from aiordma import Access, Connection, MemoryRegion
from aiordma.types import BoundWindow
from aiordma.verbs import MemoryWindowType
from tests import connections
from tests.bench.instant import doorbell_fails, instant, prepare, refuses
from tests.internals import drain_of, free_sends
from tests.unit.test_hot_path import Calls

pytestmark = pytest.mark.anyio

DEPTH = 8
ACCESS = Access.REMOTE_READ | Access.REMOTE_WRITE


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[Connection, BoundWindow, MemoryRegion]]:
    """A connection with a window that is not bound, and memory for it."""
    prepare()
    keywords: Any = {"device": "software", "options": aiordma.ConnectionOptions(max_send_wr=DEPTH)}
    async with connections.connected("127.0.0.1", server=keywords, client=keywords) as ends:
        client, _ = ends
        region = client.register(bytearray(64), Access.MW_BIND | Access.LOCAL_WRITE)
        yield client, await client.open_window(), region


def assert_free(client: Connection, window: BoundWindow, region: MemoryRegion) -> None:
    assert not window.is_bound
    assert free_sends(client) == DEPTH
    region.close()


async def test_bind_and_invalidate_are_no_python_calls() -> None:
    async with opened() as (client, window, region):
        with instant(client):
            part, steps = region[8:16], drain_of(client)
            for _ in range(2):  # the first bind finds out what a call needs
                crossings = steps.crossings
                with Calls() as calls:
                    await client.post_bind_window(window, part, ACCESS, fence=True)
                    await client.post_invalidate(window)
                assert (calls.python, calls.c) == (0, 0)
                assert steps.crossings == crossings + 2
            with Calls() as calls, client.chain() as chain:
                before = calls.python
                chain.post_bind_window(window, part, ACCESS)
                chain.post_invalidate(window, fence=True)
                assert calls.python == before
            for request in chain.requests:
                await request
        assert_free(client, window, region)


async def test_rkey_changes_with_each_bind() -> None:
    async with opened() as (client, window, region):
        with instant(client):
            rkeys = []
            for _ in range(3):
                await client.post_bind_window(window, region[:], ACCESS)
                assert window.remote.rkey == window._window.rkey
                rkeys.append(window.rkey)
                await client.revoke(window)
            assert len({*rkeys}) == 3
        assert_free(client, window, region)


async def test_bound_window_holds_its_region() -> None:
    async with opened() as (client, window, region):
        with instant(client):
            request = client.post_bind_window(window, region[:], ACCESS)
            assert window.is_bound
            await request
            with pytest.raises(aiordma.BusyError, match="bound windows"):
                region.close()
            assert region._users == 1
            await client.post_invalidate(window)
        assert_free(client, window, region)


async def test_marking_an_invalidated_window_releases_the_region() -> None:
    async with opened() as (client, window, region):
        with instant(client):
            await client.post_bind_window(window, region[:], ACCESS)
            window.mark_invalidated()
            window.mark_invalidated()
            assert region._users == 0
            await client.post_bind_window(window, region[:32], ACCESS)
            await client.post_invalidate(window)
        assert_free(client, window, region)


async def test_refused_bind_leaves_the_window_unbound() -> None:
    async with opened() as (client, window, region):
        with instant(client):
            refuses(errno.EINVAL)
            with pytest.raises(aiordma.VerbsCallError):
                client.post_bind_window(window, region[:], ACCESS)
            assert not window.is_bound
            assert window.rkey == 0
            assert (region._users, free_sends(client)) == (0, DEPTH)
            await client.post_bind_window(window, region[:], ACCESS)
            refuses(errno.EINVAL)
            with pytest.raises(aiordma.VerbsCallError):
                client.post_invalidate(window)
            assert window.is_bound
            await client.post_invalidate(window)
        assert_free(client, window, region)


async def test_bind_beyond_a_full_queue_leaves_the_window_unbound() -> None:
    async with opened() as (client, window, region):
        part = client.register(bytearray(8))[:]
        with client.chain() as chain:
            for _ in range(DEPTH):
                chain.post_send(part)
            for post in (client.post_bind_window, chain.post_bind_window):
                with pytest.raises(aiordma.QueueFullError):
                    post(window, region[:], ACCESS)
            assert not window.is_bound
        for request in chain.requests:
            await request
        assert_free(client, window, region)


async def test_bind_of_a_chain_that_is_not_posted_is_undone() -> None:
    async with opened() as (client, window, region):
        requests = []

        def collect() -> None:
            with client.chain() as chain:
                requests.append(chain.post_bind_window(window, region[:], ACCESS))
                assert window.is_bound
                raise KeyError

        with pytest.raises(KeyError):
            collect()
        assert not window.is_bound
        with pytest.raises(aiordma.RdmaError, match="not posted"):
            await requests[0]
        with instant(client):
            refuses(errno.EINVAL)
            with pytest.raises(aiordma.VerbsCallError), client.chain() as chain:
                chain.post_bind_window(window, region[:], ACCESS)
        assert_free(client, window, region)


async def test_invalidation_that_was_not_posted_can_be_posted_again() -> None:
    async with opened() as (client, window, region):

        def collect() -> None:
            with client.chain() as chain:
                chain.post_invalidate(window).add_done_callback(aiordma.WorkRequest.exception)
                for post in (chain.post_invalidate, client.post_invalidate):
                    with pytest.raises(ValueError, match="posted already"):
                        post(window)
                raise KeyError

        with instant(client):
            await client.post_bind_window(window, region[:], ACCESS)
            with pytest.raises(KeyError):
                collect()
            assert window.is_bound
            await client.post_invalidate(window)
        assert_free(client, window, region)


async def test_failed_doorbell_of_a_bind_ends_the_connection() -> None:
    async with opened() as (client, window, region):
        with instant(client):
            doorbell_fails(errno.EIO)
            request = client.post_bind_window(window, region[:], ACCESS)
            request.add_done_callback(aiordma.WorkRequest.exception)
        with anyio.fail_after(30):
            await client.ended()
            with pytest.raises(aiordma.WorkCompletionError):
                await request
        assert not window.is_bound
        with pytest.raises(aiordma.RdmaError):
            client.post_bind_window(window, region[:], ACCESS)


async def test_windows_of_type_1_take_the_general_path() -> None:
    async with opened() as (client, _, region):
        window = await client.open_window(MemoryWindowType.TYPE_1)
        assert client._port.bind(window, region[:], ACCESS) is None
        await client.post_bind_window(window, region[:], ACCESS)
        assert client._port.local_invalidate(window) is None
        await client.post_invalidate(window)
        assert_free(client, window, region)


async def test_port_leaves_wrong_binds_to_the_general_path() -> None:
    async with opened() as (client, window, region):
        other = client.register(bytearray(64))
        bind: Any = client._port.bind
        for arguments in (
            (window, region, ACCESS),
            (window, bytearray(8), ACCESS),
            (window, region[:0], ACCESS),
            (window, other[:], ACCESS),
            (window, region[:], 0),
            (window, region[:], True),
            (window, region[:], -1),
            (window, region[:], 1 << 40),
            (window, region[:], Access.LOCAL_WRITE),
            (window, region[:], "read"),
            (window._window, region[:], ACCESS),
        ):
            assert bind(*arguments) is None, arguments
        assert bind(window, region[:], ACCESS, fence=1) is None
        assert client._port.local_invalidate(window) is None
        window.close()
        assert bind(window, region[:], ACCESS) is None
        with pytest.raises(aiordma.ClosedError):
            client.post_bind_window(window, region[:], ACCESS)
        assert_free(client, window, region)


@pytest.mark.natively
async def test_peers_bad_invalidation_is_a_local_access_error() -> None:
    """As the docstring of LocalAccessError says."""
    keywords: Any = {"device": "software"}
    async with connections.connected("127.0.0.1", server=keywords, client=keywords) as ends:
        client, server = ends
        request = client.post_send(b"x", invalidate=0x12345678)
        with pytest.raises(
            aiordma.verbs.LocalAccessError, match="invalidates an rkey that is unknown"
        ):
            await server.receive()
        with pytest.raises(aiordma.RemoteAccessError):
            await request
