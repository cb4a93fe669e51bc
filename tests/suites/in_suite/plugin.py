"""A pytest plugin for other projects' suites: it substitutes the event loop.

Environment: AIORDMA_SUITE_LOOP ("ours" or "stock").
"""

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any

import pytest

from aiordma import streams
from aiordma.bench.loops import SPIN
from aiordma.streams import client as stream_client
from aiordma.streams import connecting
from aiordma.streams.hosts import HostRule

from .gateway import Gateway, has_tcp_listener
from .report import count

STOCK = asyncio.SelectorEventLoop
OURS = os.environ["AIORDMA_SUITE_LOOP"] == "ours"
WITH_GATEWAY = os.environ.get("AIORDMA_SUITE_GATEWAY") == "1"

_ports: dict[int, int] = {}  # a stream server's port: the gateway's TCP port
_gateways: list[Gateway] = []


def _gateway() -> Gateway:
    if not _gateways:
        _gateways.append(Gateway())
    return _gateways[0]


def _in_gateway(loop: object) -> bool:
    return bool(_gateways) and loop is _gateways[0]._loop


class LoopUnderTest(streams.StreamEventLoop):
    """The loop of `new_event_loop`, which also takes a selector, as asyncio's does. It is not
    used: polling has its own."""

    def __init__(self, selector: object = None) -> None:
        super().__init__(SPIN, HostRule("*", "hosts"), {})

    async def create_server(self, *arguments: Any, **keywords: Any) -> Any:
        """Also set a private attribute of asyncio.Server that websockets' tests look at."""
        server = await super().create_server(*arguments, **keywords)
        server._ssl_context = keywords.get("ssl")
        return server


class _Policy(asyncio.DefaultEventLoopPolicy):
    _loop_factory = LoopUnderTest


_connect_rsocket = connecting.connect_rsocket
_connect = socket.socket.connect
_connect_ex = socket.socket.connect_ex
_begin = streams.StreamTransport.__init__
_serve = streams.StreamServer.__init__
_close = streams.StreamServer.close


async def _connect_counted(settings: Any, attempt: Any, *others: Any, **keywords: Any) -> Any:
    port = attempt.port
    if WITH_GATEWAY and port not in _ports and has_tcp_listener(port):
        attempt.port = await asyncio.to_thread(_gateway().to_tcp, attempt.host, port)
        count("gateway")
    return await _connect_rsocket(settings, attempt, *others, **keywords)


def _begin_counted(self: Any, *arguments: Any, **keywords: Any) -> None:
    count("transports")
    _begin(self, *arguments, **keywords)


def _serve_counted(self: Any, *arguments: Any, **keywords: Any) -> None:
    count("servers")
    _serve(self, *arguments, **keywords)
    if WITH_GATEWAY:
        for each in self.sockets:
            host, port = each.getsockname()[:2]
            host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
            _ports[port] = _gateway().to_stream(host, port)


def _close_forgotten(self: Any) -> None:
    for each in self.sockets:
        _ports.pop(each.getsockname()[1], None)
    _close(self)


def _redirected(address: Any) -> Any:
    if isinstance(address, tuple) and address[1] in _ports:
        count("gateway")
        return ("::1" if ":" in address[0] else "127.0.0.1", _ports[address[1]])
    return address


def _connect_redirected(self: socket.socket, address: Any) -> None:
    _connect(self, _redirected(address))


def _connect_ex_redirected(self: socket.socket, address: Any) -> int:
    return _connect_ex(self, _redirected(address))


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("AIORDMA_SUITE_TEST_PACKAGE"):
        # CPython's `test` is a package of the interpreter; Debian has its tests elsewhere.
        import_module("test").__path__.append(os.environ["AIORDMA_SUITE_TEST_PACKAGE"])
    loop: Any = LoopUnderTest if OURS else STOCK
    if OURS:
        asyncio.SelectorEventLoop = LoopUnderTest
        asyncio.DefaultEventLoopPolicy = _Policy
        asyncio.events._init_event_loop_policy = lambda: None  # type: ignore[attr-defined]
        asyncio.set_event_loop_policy(_Policy())
        set_policy = asyncio.set_event_loop_policy

        def set_or_ours(policy: Any) -> None:
            set_policy(_Policy() if policy is None else policy)

        asyncio.set_event_loop_policy = set_or_ours
        stream_client.connect_rsocket = _connect_counted  # type: ignore[attr-defined]
        streams.StreamTransport.__init__ = _begin_counted  # type: ignore[method-assign]
        streams.StreamServer.__init__ = _serve_counted  # type: ignore[method-assign]
        streams.StreamServer.close = _close_forgotten  # type: ignore[method-assign]
        if WITH_GATEWAY:
            patched: Any = socket.socket
            patched.connect, patched.connect_ex = _connect_redirected, _connect_ex_redirected
    # CPython's tests wait until the threads of a test have ended. The gateway's thread stays.
    with suppress(ImportError):
        helper: Any = import_module("test.support.threading_helper")
        helper.threading_cleanup = lambda *_: None
    try:
        import uvloop
    except ImportError:
        return
    uvloop.new_event_loop = loop
    uvloop.Loop = loop  # type: ignore[misc]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[Any]:
    try:
        return (yield)
    finally:
        if _gateways:
            _ports.clear()
            _gateways[0].reset()
