"""Whatever is passed to the public functions and methods: what will not do is refused in the terms
of the call, by the parameter's name, and nothing of it is left."""

import asyncio
import inspect
import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from mmap import PAGESIZE
from typing import Any

import anyio
import pytest

import aiordma
from aiordma import RemoteMemory, streams
from tests.device.players import (
    OWN_RECEIVES,
    REMOTE,
    both_ways,
    connected,
    one_loop,
    reactor_in_use,
)
from tests.device.test_bad_input import held
from tests.devices import ADDRESS
from tests.internals import hub_of, pool_of

pytestmark = [pytest.mark.anyio, pytest.mark.natively]

HUGE = 1 << 20_000  # more digits than Python prints
BUFFER, PARTS, MANY = object(), object(), object()
REMOTE_RANGE, TEXT, DATA, SECONDS, ACCESS = object(), object(), object(), object(), object()
FLAG = object()
HOST, SERVICE = object(), object()


class Whole:
    """A whole number of so many bits, or one of an enumeration."""

    def __init__(self, bits: int, *, signed: bool = False, none: bool = False) -> None:
        self.wrong = ["1", b"1", 1.0, True, object(), [1]] + ([] if none else [None])
        self.beyond = [1 << bits, HUGE, -HUGE] + ([] if signed else [-1])


class An:
    """An object of one of our classes."""


def bad_values(kind: object) -> list[tuple[Any, type[Exception]]]:
    """What a parameter of a kind refuses, and with which exception."""
    wrong: list[Any]
    beyond: list[Any] = []
    if isinstance(kind, Whole):
        wrong, beyond = kind.wrong, kind.beyond
    elif kind is BUFFER:
        wrong = ["text", 5, None, 1.5, object(), [b"x"]]
    elif kind is PARTS:
        wrong = [b"abc", bytearray(b"abc"), memoryview(b"abc"), "abc", 5, None]
        wrong += [[5], ["x"], [bytearray(1), None]]
    elif kind is MANY:
        wrong = [b"abc", bytearray(b"abc"), "abc", 5, None, [5], [[bytearray(8), "x"]]]
    elif kind is REMOTE_RANGE:
        wrong = [None, 5, b"twenty bytes in here", (0, 8, 1)]
    elif kind is TEXT:
        wrong, beyond = [None, 5, b"127.0.0.1", ["127.0.0.1"]], ["", "a\0b"]
    elif kind is HOST:  # of asyncio's functions, some of which take several, or ""
        wrong, beyond = [5, b"127.0.0.1", [5], [b"127.0.0.1"]], ["a\0b"]
    elif kind is SERVICE:  # a port's number, or a name
        wrong, beyond = (
            [b"1", 1.0, True, object(), [1]],
            [1 << 16, HUGE, -1, "70000", "-1", "9" * 5000],
        )
    elif kind is DATA:
        wrong = ["text", 5, [1, 2], 1.5]
    elif kind is SECONDS:
        wrong, beyond = ["3", b"3", True, [1.0]], [float("nan")]
    elif kind is ACCESS:
        wrong, beyond = ["read", 1.5, True, [1]], [-1, 1 << 40]
    elif kind is FLAG:
        wrong = [0, 1, "yes", None, 1.0, object()]
    else:
        assert kind is An
        wrong = [5, "x", b"x", object()]
    return [(value, TypeError) for value in wrong] + [(value, ValueError) for value in beyond]


@cache
def page() -> int:
    """Return the descriptor of a page of memory, which stays open."""
    memory = os.memfd_create("page")
    os.ftruncate(memory, PAGESIZE)
    return memory


@dataclass
class World:
    """What the calls under test are made on."""

    client: aiordma.Connection
    server: aiordma.Connection
    region: aiordma.MemoryRegion
    remote: RemoteMemory


@dataclass
class Call:
    """A call that works with its arguments as they are, but for the one that is replaced."""

    use: Callable[..., Any]
    arguments: Callable[[World], dict[str, Any]]
    kinds: dict[str, object]
    needs: str | None = None


WORD, ANY32 = Whole(64, signed=True), Whole(32, none=True)

READS = {"remote": REMOTE_RANGE, "local": BUFFER}, None
READVS = {"remote": REMOTE_RANGE, "parts": PARTS}, "scattered_read"
WRITEVS = {"remote": REMOTE_RANGE, "parts": PARTS}, None
SWAP = {"remote": REMOTE_RANGE, "compare": WORD, "swap": WORD}
ADD = {"remote": REMOTE_RANGE, "add": WORD}
BUFFERS = {"buffer": BUFFER, "access": ACCESS}
DMABUF = {
    "fd": Whole(31),
    "length": Whole(63),
    "offset": Whole(63),
    "access": ACCESS,
    "iova": Whole(64, none=True),
}


def _nothing(_: World) -> dict[str, Any]:
    return {}


def _beside(w: World, **others: Any) -> dict[str, Any]:
    return {"remote": w.remote, **others}


def _to_grant(w: World) -> dict[str, Any]:
    return {"memory": w.region[:8], "access": aiordma.Access.REMOTE_READ}


METHODS: dict[
    str, tuple[Callable[[World], dict[str, Any]], tuple[dict[str, object], str | None]]
] = {
    "post_send": (_nothing, ({"data": BUFFER}, None)),
    "post_sendv": (_nothing, ({"parts": PARTS}, None)),
    "send": (_nothing, ({"item": BUFFER}, None)),
    "sendv": (_nothing, ({"parts": PARTS}, None)),
    "post_recv": (_nothing, ({"buffer": BUFFER}, None)),
    "post_recvv": (_nothing, ({"parts": PARTS}, None)),
    "post_read": (lambda w: _beside(w, local=bytearray(8)), READS),
    "post_readv": (lambda w: _beside(w, parts=[bytearray(8)]), READVS),
    "read": (lambda w: _beside(w, local=bytearray(8)), READS),
    "readv": (lambda w: _beside(w, parts=[bytearray(8)]), READVS),
    "read_bytes": (_beside, ({"remote": REMOTE_RANGE, "max_bytes": Whole(64)}, None)),
    "post_write": (lambda w: _beside(w, local=bytes(8)), READS),
    "post_writev": (lambda w: _beside(w, parts=[bytes(8)]), WRITEVS),
    "write": (lambda w: _beside(w, local=bytes(8)), READS),
    "writev": (lambda w: _beside(w, parts=[bytes(8)]), WRITEVS),
    "post_compare_swap": (
        lambda w: _beside(w, local=bytearray(8), compare=0, swap=1),
        ({"local": BUFFER, **SWAP}, "atomics"),
    ),
    "post_fetch_add": (
        lambda w: _beside(w, local=bytearray(8), add=0),
        ({"local": BUFFER, **ADD}, "atomics"),
    ),
    "compare_swap": (lambda w: _beside(w, compare=0, swap=1), (SWAP, "atomics")),
    "fetch_add": (lambda w: _beside(w, add=0), (ADD, "atomics")),
    "register": (lambda w: {"buffer": bytearray(8)}, (BUFFERS, None)),
    "register_dmabuf": (lambda w: {"fd": page(), "length": PAGESIZE}, (DMABUF, "dmabuf")),
    "register_in_thread": (lambda w: {"buffer": bytearray(8)}, (BUFFERS, None)),
    "open_window": (_nothing, ({"kind": Whole(32)}, "memory_windows")),
    "bind": (_to_grant, ({"memory": An, "access": ACCESS, "kind": Whole(32)}, "memory_windows")),
    "grant": (
        lambda w: {"memory": bytearray(8), "access": aiordma.Access.REMOTE_READ},
        ({"memory": BUFFER, "access": ACCESS, "expires": SECONDS}, None),
    ),
    "revoke": (_nothing, ({"window": An}, None)),
    "post_bind_window": (_to_grant, ({"window": An}, "memory_windows")),
    "post_invalidate": (_nothing, ({"window": An}, None)),
}


def _of_client(name: str, arguments: Callable[[World], Any], kinds: Any, needs: Any) -> Call:
    return Call(lambda w, **k: getattr(w.client, name)(**k), arguments, kinds, needs)


CONNECTION: dict[str, Call] = {
    name: _of_client(name, arguments, *of) for name, (arguments, of) in METHODS.items()
}


def _with_immediate(name: str) -> Call:
    kinds = CONNECTION[name].kinds
    return Call(
        lambda w, **k: getattr(w.client, name)(**k),
        lambda w: {
            **({"remote": w.remote} if "remote" in kinds else {}),
            next(kind for kind in kinds if kind != "remote"): (
                [bytes(8)] if "parts" in kinds else bytes(8)
            ),
        },
        {"immediate": ANY32},
        "immediate",
    )


for _name in ("post_send", "post_sendv", "send", "sendv", "post_write", "post_writev"):
    CONNECTION[f"{_name} with immediate"] = _with_immediate(_name)

NO_PARAMETERS = {
    *("aclose", "drain", "receive", "receive_message", "receive_view", "send_eof", "prepare"),
    *(
        "extra",
        "begin",
        "chain",
        "counter",
        "write_blocks",  # test_blocks.py
        "read_blocks",
        "ended",
        "query",
        "statistics",
    ),  # of anyio; for the listener; a flag
    "establish",  # below
}


@pytest.mark.promise("Invalid arguments raise before any C call")
def test_every_method_of_a_connection_is_in_the_table() -> None:
    methods = {
        name
        for name, value in inspect.getmembers(aiordma.Connection, callable)
        if not name.startswith("_")
    }
    assert methods - NO_PARAMETERS - set(CONNECTION) == set()


async def _used(call: Call, world: World, arguments: dict[str, Any]) -> None:
    result = call.use(world, **arguments)
    if inspect.isawaitable(result):
        await result


async def refuses(call: Call, name: str, parameter: str, world: World) -> None:
    """Try every bad value; each is refused, and what the refusal says names call and parameter."""
    function = name.partition(" ")[0]
    for value, error in bad_values(call.kinds[parameter]):
        arguments = {**call.arguments(world), parameter: value}
        with pytest.raises(error) as caught:
            await _used(call, world, arguments)
        assert type(caught.value) is error, value if value is not HUGE else "huge"
        text = str(caught.value)
        assert parameter in text, text
        assert len(text) < 600
        assert text.startswith(f"{function}(): {parameter}"), text


@pytest.mark.promise("Invalid arguments raise before any C call")
@one_loop
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.capability(call.needs)] if call.needs else [])
        for name, call in CONNECTION.items()
    ],
)
async def test_a_connection_refuses_in_the_terms_of_the_call(name: str) -> None:
    call = CONNECTION[name]
    options = {"options": aiordma.ConnectionOptions(max_send_wr=4), **OWN_RECEIVES}
    async with connected(server=OWN_RECEIVES, client=options) as (client, server):
        region = client.register(bytearray(64), REMOTE)
        remote = RemoteMemory(server.register(bytearray(64), REMOTE).address & ~7, 8, 1)
        world = World(client, server, region, remote)
        before = held(client)
        for parameter in call.kinds:
            await refuses(call, name, parameter, world)
            assert held(client) == before
        # It works on, and so do all of its slots.
        for i in range(6):
            receive = server.post_recv(bytearray(8))
            await client.send(b"intact")
            assert (await receive).byte_len == 6, i
        assert await client.read(bytearray(8), server.register(bytearray(8), REMOTE).remote())


CHAINED = ("post_send", "post_sendv", "post_read", "post_write", "post_writev")


@one_loop
@pytest.mark.parametrize("name", CHAINED)
async def test_a_chain_refuses_in_the_terms_of_the_call(name: str) -> None:
    call = CONNECTION[name]
    async with connected() as (client, server):
        remote = server.register(bytearray(8), REMOTE).remote()
        world = World(client, server, client.register(bytearray(8)), remote)
        before = held(client)
        with client.chain() as chain:
            world.client = chain  # type: ignore[assignment]
            for parameter in call.kinds:
                await refuses(call, name, parameter, world)
            assert chain.requests == []
        assert held(client) == before
        await both_ways(client, server)


@one_loop
async def test_a_shared_receive_queue_refuses_in_the_terms_of_the_call() -> None:
    async with aiordma.open_shared_receive(ADDRESS, depth=8) as shared:
        calls = {
            "post_srq_recv": Call(
                lambda w, buffers: shared.post_srq_recv(buffers), lambda w: {}, {"buffers": MANY}
            ),
            "register": Call(
                lambda w, buffer: shared.register(buffer), lambda w: {}, {"buffer": BUFFER}
            ),
            "limit": Call(lambda w, count: shared.limit(count), lambda w: {}, {"count": Whole(32)}),
            "resize": Call(
                lambda w, depth: shared.resize(depth), lambda w: {}, {"depth": Whole(32)}
            ),
            "connection_of": Call(
                lambda w, completion: shared.connection_of(completion),
                lambda w: {},
                {"completion": An},
            ),
        }
        for name, call in calls.items():
            for parameter in call.kinds:
                await refuses(call, name, parameter, None)  # type: ignore[arg-type]
        hub = hub_of(shared)
        assert (shared.posted, hub.pool.leased, len(hub.in_flight)) == (0, 0, 0)
        assert len(shared.post_srq_recv([bytearray(8)] * 8)) == 8


@one_loop
@pytest.mark.capability("datagrams")
async def test_a_datagram_socket_refuses_in_the_terms_of_the_call() -> None:
    async with aiordma.open_datagram(ADDRESS, receive_buffers=4) as socket:
        ours = await socket.resolve(ADDRESS, socket.port)

        def sending(name: str) -> Call:
            data = {"parts": [b"x"]} if name.endswith("v") else {"data": b"x"}
            kinds = {"parts": PARTS} if name.endswith("v") else {"data": BUFFER}
            return Call(
                lambda w, **k: getattr(socket, name)(**k),
                lambda w: {**data, "peer": ours},
                {**kinds, "peer": An, "immediate": ANY32},
            )

        names = ("post_ud_send", "post_ud_sendv", "send", "sendv")
        calls = {name: sending(name) for name in names}
        calls["resolve"] = Call(
            lambda w, **k: socket.resolve(**k),
            lambda w: {"host": ADDRESS, "port": socket.port},
            {"host": TEXT, "port": Whole(16), "private_data": DATA, "timeout": SECONDS},
        )
        calls["peer"] = Call(
            lambda w, **k: socket.peer(**k),
            lambda w: {"gid": socket.gid, "qp_num": socket.qp_num},
            {"gid": DATA, "qp_num": Whole(24), "qkey": ANY32, "lid": Whole(16)},
        )
        calls["join"] = Call(
            lambda w, **k: socket.join(**k),
            lambda w: {"group": "239.1.2.3"},
            {"group": TEXT, "timeout": SECONDS},
        )
        before = held(socket)  # type: ignore[arg-type]
        for name, call in calls.items():
            for parameter in call.kinds:
                await refuses(call, name, parameter, None)  # type: ignore[arg-type]
        assert held(socket) == before  # type: ignore[arg-type]
        await socket.send(b"to myself", ours)
        assert (await socket.receive()).data == b"to myself"
    async with aiordma.open_datagram(ADDRESS, receive_buffers=0) as socket:
        receives = {"post_recv": ("buffer", BUFFER), "post_recvv": ("parts", PARTS)}
        for name, (parameter, kind) in receives.items():
            call = Call(
                lambda w, n=name, **k: getattr(socket, n)(**k), lambda w: {}, {parameter: kind}
            )
            await refuses(call, name, parameter, None)  # type: ignore[arg-type]
        assert pool_of(socket).leased == 0


@one_loop
async def test_accepting_and_rejecting_refuse_and_stay_possible() -> None:
    options = OPTIONS
    async with aiordma.listen(ADDRESS, 0) as listener, anyio.create_task_group() as group:
        group.start_soon(_talk, listener.port)
        request = await listener.request()
        calls = {
            "accept": Call(
                lambda w, **k: request.accept(**k), lambda w: {}, {"private_data": DATA, **options}
            ),
            "reject": Call(
                lambda w, **k: request.reject(**k), lambda w: {}, {"private_data": DATA}
            ),
            "serve": Call(
                lambda w, **k: listener.serve(**k),
                lambda w: {"handler": _talk},
                {"handler": An, "task_group": An},
            ),
        }
        for name, call in calls.items():
            for parameter in call.kinds:
                await refuses(call, name, parameter, None)  # type: ignore[arg-type]
        for value, error in bad_values(DATA):
            with pytest.raises(error, match=r"^accept\(\): private_data"):
                await listener.accept(private_data=value)
        calls["prepare"] = Call(lambda w, **k: request.prepare(**k), lambda w: {}, options)
        for parameter in options:
            await refuses(calls["prepare"], "prepare", parameter, None)  # type: ignore[arg-type]
        async with request.prepare() as connection:
            establish = Call(
                lambda w, **k: connection.establish(**k), lambda w: {}, {"private_data": DATA}
            )
            await refuses(establish, "establish", "private_data", None)  # type: ignore[arg-type]
            await connection.establish()
            assert await connection.receive() == b"hello"


async def _talk(port: int) -> None:
    async with aiordma.connect(ADDRESS, port) as connection:
        await connection.send(b"hello")


OPTIONS: dict[str, object] = {
    "receive_buffers": Whole(31),
    "receive_size": Whole(31),
    "peer_timeout": SECONDS,
    "keepalive": SECONDS,
    "options": An,
}
OPENERS: dict[str, tuple[dict[str, Any], dict[str, object]]] = {
    "connect": (
        {"host": ADDRESS, "port": 1},
        {
            "host": TEXT,
            "port": Whole(16),
            "private_data": DATA,
            "source": An,
            "timeout": SECONDS,
            "device": TEXT,
            "shared_receive": An,
            **OPTIONS,
        },
    ),
    "prepare_connection": (
        {"host": ADDRESS, "port": 1},
        {
            "host": TEXT,
            "port": Whole(16),
            "source": An,
            "timeout": SECONDS,
            "device": TEXT,
            "shared_receive": An,
            **OPTIONS,
        },
    ),
    "listen": (
        {"host": ADDRESS, "port": 0},
        {
            "host": TEXT,
            "port": Whole(16),
            "backlog": Whole(31),
            "device": TEXT,
            "accept_timeout": SECONDS,
            **OPTIONS,
        },
    ),
    "open_datagram": (
        {"host": ADDRESS, "port": 0},
        {
            "host": TEXT,
            "port": Whole(16),
            "device": TEXT,
            "most_handles": Whole(31),
            "qkey": Whole(32),
            "private_data": DATA,
            "gid_index": Whole(8, none=True),
            "service_level": Whole(4, none=True),
            "receive_buffers": Whole(31, none=True),
            "options": An,
        },
    ),
    "open_shared_receive": (
        {"host": ADDRESS},
        {
            "host": TEXT,
            "depth": Whole(32, none=True),
            "max_sge": Whole(32, none=True),
            "buffers": Whole(32),
            "buffer_size": Whole(32),
            "comp_vector": Whole(31),
            "cqe": Whole(31, none=True),
            "device": TEXT,
        },
    ),
    "open_queue_pair": (
        {"device": "nothing0"},
        {
            "device": TEXT,
            "service": Whole(31),
            "port": Whole(8),
            "gid_index": Whole(31),
            "pkey_index": Whole(16),
            "shared_receive": An,
            **OPTIONS,
        },
    ),
    "resolve": (
        {"host": ADDRESS, "service": 1},
        {"port_space": Whole(31), "family": Whole(31, none=True), "device": TEXT},
    ),
    "new_event_loop": ({}, {"spin": SECONDS}),
}


@pytest.mark.promise("Invalid arguments raise before any C call")
@one_loop
@pytest.mark.parametrize("name", OPENERS)
async def test_an_opener_refuses_before_anything_is_opened(name: str) -> None:
    arguments, kinds = OPENERS[name]
    call = Call(lambda w, **k: getattr(aiordma, name)(**k), lambda w: arguments, kinds)
    for parameter in kinds:
        await refuses(call, name, parameter, None)  # type: ignore[arg-type]
    assert not reactor_in_use()


STREAM_OPTIONS: dict[str, object] = {
    "buffer_size": Whole(31, none=True),
    "queue_depth": Whole(16),
    "close_timeout": SECONDS,
    "tos": Whole(31, none=True),
    "ack_timeout": Whole(31),
    "retry_count": Whole(31),
    "peer_timeout": SECONDS,
    "keepalive": SECONDS,
}
STREAM_OPENERS: dict[str, tuple[dict[str, Any], dict[str, object]]] = {
    "connect_stream": (
        {"host": ADDRESS, "port": 1},
        {
            "host": TEXT,
            "port": Whole(16),
            "source": An,
            "timeout": SECONDS,
            "device": TEXT,
            **STREAM_OPTIONS,
        },
    ),
    "listen_stream": (
        {"host": ADDRESS, "port": 0},
        {
            "host": TEXT,
            "port": Whole(16),
            "backlog": Whole(31),
            "device": TEXT,
            "accept_timeout": SECONDS,
            **STREAM_OPTIONS,
        },
    ),
    "create_connection": (
        {"protocol_factory": asyncio.Protocol, "host": ADDRESS, "port": 1},
        {
            "host": HOST,
            "port": SERVICE,
            "local_addr": An,
            "timeout": SECONDS,
            "device": TEXT,
            **STREAM_OPTIONS,
        },
    ),
    "create_server": (
        {"protocol_factory": asyncio.Protocol, "host": ADDRESS, "port": 0},
        {
            "host": HOST,
            "port": SERVICE,
            "backlog": Whole(31),
            "device": TEXT,
            **STREAM_OPTIONS,
        },
    ),
    "new_event_loop": ({}, {"spin": SECONDS, **STREAM_OPTIONS}),
}
NO_STREAM_OPTIONS = sorted({*OPTIONS} - {*STREAM_OPTIONS})
"""Options of connections whose values the protocol of streams decides, or does not use."""


def _opener_of_streams(name: str) -> tuple[Call, dict[str, object]]:
    arguments, kinds = STREAM_OPENERS[name]
    return Call(lambda w, **k: getattr(streams, name)(**k), lambda w: arguments, kinds), kinds


@pytest.mark.promise("Invalid arguments raise before any C call")
@one_loop
@pytest.mark.parametrize("name", STREAM_OPENERS)
async def test_an_opener_of_streams_refuses_before_anything_is_opened(name: str) -> None:
    call, kinds = _opener_of_streams(name)
    for parameter in kinds:
        await refuses(call, name, parameter, None)  # type: ignore[arg-type]
    assert not reactor_in_use()


@one_loop
@pytest.mark.parametrize("name", STREAM_OPENERS)
async def test_an_opener_of_streams_has_only_the_options_of_streams(name: str) -> None:
    call, _ = _opener_of_streams(name)
    for option in (*NO_STREAM_OPTIONS, "buffer_sise"):
        given: Any = {**call.arguments(None), option: 16}  # type: ignore[arg-type]
        with pytest.raises(TypeError) as caught:
            await _used(call, None, given)  # type: ignore[arg-type]
        assert str(caught.value).startswith(f"{name}() has no parameter {option!r}: ")
        for other in NO_STREAM_OPTIONS:
            assert f"mean {other!r}" not in str(caught.value)
        if option == "buffer_sise":
            assert str(caught.value).endswith("did you mean 'buffer_size'?")
    assert not reactor_in_use()


@one_loop
async def test_more_of_what_openers_refuse() -> None:
    for source in ("127.0.0.1", ("127.0.0.1",), ("127.0.0.1", "0"), (None, 0), (b"x", 0)):
        with pytest.raises(TypeError, match=r"^connect\(\): source"):
            await aiordma.connect(ADDRESS, 1, source=source)  # type: ignore[arg-type]
    for shared in ("4", 4.0, True, object()):
        with pytest.raises(TypeError, match=r"^listen\(\): shared_receive="):
            await aiordma.listen(ADDRESS, 0, shared_receive=shared)  # type: ignore[arg-type]
    for name in ("listen", "listen_stream"):
        module = aiordma if name == "listen" else streams
        with pytest.raises(ValueError, match=rf"^{name}\(\): ipv6_only="):
            await getattr(module, name)(ADDRESS, ipv6_only=True)
    for service in (1.0, True, b"80", ["80"]):
        with pytest.raises(TypeError, match=r"^resolve\(\): service="):
            await aiordma.resolve(ADDRESS, service)  # type: ignore[arg-type]
    assert not reactor_in_use()


TYPOS = {
    "timout": "timeout",
    "recv_buffers": "receive_buffers",
}


@one_loop
@pytest.mark.parametrize("typo", TYPOS)
async def test_unknown_option_error_suggests_nearest_name(typo: str) -> None:
    given: Any = {typo: 1}
    meant = rf"^connect\(\) has no parameter '{typo}': did you mean '{TYPOS[typo]}'\?$"
    with pytest.raises(TypeError, match=meant):
        await aiordma.connect(ADDRESS, 1, **given)
    if typo != "timout":
        for name in ("listen", "open_queue_pair"):
            with pytest.raises(TypeError, match=rf"^{name}\(\) has no .* mean '{TYPOS[typo]}'"):
                await getattr(aiordma, name)(ADDRESS, **given)


@one_loop
async def test_unknown_option_error_lists_all_names() -> None:
    given: Any = {"xyzzy": 1}
    with pytest.raises(TypeError, match=r"there are ack_timeout, .*private_data.*tos"):
        await aiordma.connect(ADDRESS, 1, **given)


@one_loop
async def test_what_counts_as_a_number_or_bytes_is_taken() -> None:
    class Whole8:
        def __index__(self) -> int:
            return 8

    eight: Any = Whole8()
    data: Any = bytearray(b"who I am")
    async with aiordma.listen(ADDRESS, 0, receive_buffers=eight, backlog=eight) as listener:
        assert listener.options.receive_buffers == 8
        async with anyio.create_task_group() as group:
            group.start_soon(_talk_with, listener.port, data)
            request = await listener.request()
            assert request.private_data.rstrip(b"\0") == b"who I am"
            async with request.accept(private_data=memoryview(b"welcome")) as connection:  # type: ignore[arg-type]
                assert await connection.receive() == b"hello"


async def _talk_with(port: int, data: bytes) -> None:
    async with aiordma.connect(ADDRESS, port, private_data=data, timeout=10**400) as connection:
        assert connection.private_data.rstrip(b"\0") == b"welcome"
        await connection.sendv(part for part in (b"he", array("B", b"llo")))
