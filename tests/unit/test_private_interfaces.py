"""The private interfaces of Python 3.11 to 3.14 that aiordma uses, in aiordma/_loop/private.py."""

import ast
import asyncio
import gc
import re
import ssl
import sys
from collections.abc import Callable
from typing import Any, cast

import anyio
import pytest

import aiordma
from aiordma._loop import private
from tests.unit.sources import PACKAGE, ROOT, modules

VERSIONS = [(3, 11), (3, 12), (3, 13), (3, 14)]


def test_versions_are_those_of_the_package() -> None:
    classifiers = (ROOT / "pyproject.toml").read_text()
    found = re.findall(r"Python :: (3)\.(\d+)\"", classifiers)
    assert [(int(major), int(minor)) for major, minor in found] == VERSIONS
    assert sys.version_info[:2] in VERSIONS


def test_private_names_of_asyncio_are_in_one_module() -> None:
    users = {
        name
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "asyncio"
        if node.module in PRIVATE_MODULES or any(alias.name[0] == "_" for alias in node.names)
    }
    assert users == {f"{PACKAGE}._loop.private"}


PRIVATE_MODULES = ("asyncio.sslproto", "asyncio.constants", "asyncio.base_events")


def test_unfinished_task_is_not_logged() -> None:
    logged: list[dict[str, Any]] = []

    def left(expect: Callable[[asyncio.Task[Any]], object]) -> list[dict[str, Any]]:
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda _, context: logged.append(context))
        expect(loop.create_task(asyncio.sleep(10)))
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        gc.collect()
        return logged

    assert left(private.expect_unfinished) == []
    assert len(left(lambda task: None)) == 1


@pytest.mark.anyio
async def test_a_task_knows_whether_it_is_in_a_scope(anyio_backend_name: str) -> None:
    found: list[bool] = []

    async def look() -> None:
        found.append(private.is_in_scope())

    if anyio_backend_name == "asyncio":
        await asyncio.create_task(look())
        assert found.pop() is False
    with anyio.CancelScope():
        await look()
    async with anyio.create_task_group() as group:
        group.start_soon(look)
    assert found == [True, True]


class Reader(asyncio.StreamReader):
    """May keep what it gets."""


@pytest.mark.parametrize(("made", "copies"), [(asyncio.StreamReader, True), (Reader, False)])
def test_only_asyncio_s_own_reader_copies_at_once(
    made: type[asyncio.StreamReader], copies: bool
) -> None:
    async def main() -> None:
        reader = made()
        assert private.copies_at_once(asyncio.StreamReaderProtocol(reader)) is copies
        assert not private.copies_at_once(asyncio.Protocol())
        data = bytearray(b"data")
        with memoryview(data) as view:
            reader.feed_data(cast(bytes, view))
        data[:] = b"else"
        assert await reader.read(4) == b"data"

    asyncio.run(main())


async def _running() -> object:
    return private.running_asyncio_loop()


def test_loop_that_nests_is_refused() -> None:
    """nest_asyncio sets the attribute that this test sets."""
    loop: Any = asyncio.new_event_loop()
    loop._nest_patched = True

    async def use() -> None:
        with pytest.raises(aiordma.EventLoopError, match=r"nest_asyncio .* await in the cell"):
            await aiordma.listen("127.0.0.1", 0, device="software")

    loop.run_until_complete(use())
    loop.close()


def test_running_loop_is_found() -> None:
    assert private.running_asyncio_loop() is None
    with asyncio.Runner() as runner:
        assert runner.run(_running()) is runner.get_loop()


def test_callbacks_that_are_ready_are_counted() -> None:
    loop = asyncio.SelectorEventLoop()
    ready = private.ready_handles(loop)
    for scheduled in (1, 2, 1):
        assert len(ready) == 0
        for _ in range(scheduled):
            loop.call_soon(list)
        assert len(ready) == scheduled
        loop.call_soon(loop.stop)
        loop.run_forever()
    loop.close()


def test_transport_above_tls_is_found() -> None:
    loop, context = asyncio.new_event_loop(), ssl.create_default_context()
    waiter: Any = None
    protocol = private.SSLProtocol(loop, asyncio.Protocol(), context, waiter)
    transport = private.secured_transport(protocol)
    assert not transport.is_closing()
    transport.abort()
    loop.close()


class _Transport(private.FlowControlMixin, asyncio.Transport):
    def get_write_buffer_size(self) -> int:
        return 1 << 20


def test_protocol_is_paused_at_the_limit() -> None:
    class Protocol(asyncio.Protocol):
        paused = 0

        def pause_writing(self) -> None:
            self.paused += 1

        def resume_writing(self) -> None:
            self.paused -= 1

    loop = asyncio.new_event_loop()
    try:
        transport: Any = _Transport({}, loop)
        transport._protocol = protocol = Protocol()
        transport._maybe_pause_protocol()
        assert protocol.paused == 1
        transport.set_write_buffer_limits(high=2 << 20)
        transport.get_write_buffer_size = lambda: 0
        transport._maybe_resume_protocol()
        assert protocol.paused == 0
    finally:
        loop.close()


def test_loop_without_the_system_runs_one_turn_at_a_time() -> None:
    """BaseEventLoop's selector, its events, its clock's resolution and its timers."""
    loop = asyncio.BaseEventLoop()
    ran: list[object] = []
    private.leave_the_system(loop, lambda: [(7, 1)], lambda ready: ran.append(list(ready)))
    loop.call_soon(ran.append, "soon")
    later = loop.call_later(3600, ran.append, "later")
    loop.call_soon_threadsafe(ran.append, "threadsafe")
    loop.stop()
    loop.run_forever()
    assert ran == [[(7, 1)], "soon", "threadsafe"]
    assert private.timers(loop) == [later]
    loop.close()
