"""A region of another domain is refused before the driver's post functions are called: by each
method that takes memory to post."""

import inspect
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

import aiordma
from aiordma import Access
from tests.connections import connect_to
from tests.device.players import OWN_RECEIVES, REMOTE, one_loop
from tests.internals import SOFTWARE, ffi

pytestmark = pytest.mark.anyio

HOST = "127.0.0.1"
LONGEST_DATAGRAM = 4096
HERE: Any = {"device": SOFTWARE}
TAKERS = (aiordma.Connection, aiordma.types.Chain, aiordma.Datagram, aiordma.SharedReceiveQueue)
MEMORY = {"data", "item", "local", "buffer", "memory"}
VECTORS = {"parts", "buffers"}
POSTS = {
    "post_send": "int(struct ibv_qp *, struct ibv_send_wr *, struct ibv_send_wr **)",
    "post_recv": "int(struct ibv_qp *, struct ibv_recv_wr *, struct ibv_recv_wr **)",
    "post_srq_recv": "int(struct ibv_srq *, struct ibv_recv_wr *, struct ibv_recv_wr **)",
    "bind_mw": "int(struct ibv_qp *, struct ibv_mw *, struct ibv_mw_bind *)",
}
"""The driver's functions that post."""


def _methods() -> Iterator[tuple[type, str, str]]:
    """Yield each public method that posts memory of the program's, and its parameter for it."""
    for taker in TAKERS:
        for name, function in inspect.getmembers(taker, inspect.isroutine):
            if name.startswith(("_", "register")):
                continue
            parameters = inspect.signature(function).parameters
            for parameter in parameters.keys() & (MEMORY | VECTORS):
                yield taker, name, parameter


METHODS = sorted(_methods(), key=lambda each: (TAKERS.index(each[0]), each[1]))


@contextmanager
def spied(context: aiordma.verbs.Context) -> Iterator[list[str]]:
    """Record the calls of the driver's functions that post."""
    ops, calls = context.pointer.ops, []
    originals = {name: getattr(ops, name) for name in POSTS}
    callbacks = []

    def replace(name: str, kind: str) -> None:
        def post(*arguments: Any) -> int:
            calls.append(name)
            return int(originals[name](*arguments))

        callbacks.append(ffi.callback(kind, post))
        setattr(ops, name, callbacks[-1])

    for name, kind in POSTS.items():
        replace(name, kind)
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(ops, name, original)


@asynccontextmanager
async def objects(domain: Any) -> AsyncIterator[dict[str, Any]]:
    """Yield one of each kind of object that posts, and what else the methods take."""
    async with (
        aiordma.listen(HOST, 0, domain=domain, **HERE) as listener,
        aiordma.open_datagram(HOST, domain=domain, **OWN_RECEIVES, **HERE) as socket,
        aiordma.open_shared_receive(HOST, depth=4, domain=domain, **HERE) as shared,
    ):
        client, server = await connect_to(listener, HOST, domain=domain, **OWN_RECEIVES, **HERE)
        async with client, server:
            remote = server.register(bytearray(64), REMOTE).remote()
            address = socket.local_address
            assert address is not None
            yield {
                "Connection": client,
                "Datagram": socket,
                "SharedReceiveQueue": shared,
                "server": server,
                "remote": remote[:8],
                "peer": await socket.resolve(address[0], address[1]),
                "window": await client.open_window(),
                "access": Access.REMOTE_READ,
                **dict.fromkeys(("compare", "swap", "add"), 1),
            }


def test_every_posting_method_is_found() -> None:
    found = {f"{taker.__name__}.{name}" for taker, name, _ in METHODS}
    posts = {
        f"{taker.__name__}.{name}"
        for taker in TAKERS
        for name in dir(taker)
        if name.startswith("post_")
    }
    # An invalidation takes a window, which is its connection's own.
    assert posts - found == {"Connection.post_invalidate", "Chain.post_invalidate"}
    assert {"Connection.readv", "Connection.grant", "Datagram.post_recvv"} < found


@pytest.mark.promise("A peer reaches the memory of its own domain only")
@one_loop
@pytest.mark.parametrize("own", [False, True], ids=["default", "own"])
async def test_no_method_posts_memory_of_another_domain(own: bool) -> None:
    async with (
        aiordma.open_domain(HOST, **HERE) as mine,
        aiordma.open_domain(HOST, **HERE) as other,
        objects(mine if own else None) as things,
    ):
        connection = things["Connection"]
        foreign = other.register(bytearray(8), REMOTE | Access.MW_BIND)
        long = other.register(bytearray(2 * LONGEST_DATAGRAM), REMOTE)
        ours = connection.register(bytearray(8))
        refused = 0
        with spied(connection.context) as calls:
            for taker, name, parameter in METHODS:
                received = taker is aiordma.Datagram and "recv" in name
                for memory in _variants(parameter, long if received else foreign, ours):
                    chain = connection.chain()
                    taking = chain if taker is aiordma.types.Chain else things[taker.__name__]
                    method = getattr(taking, name)
                    given = {
                        each.name: things[each.name]
                        for each in inspect.signature(method).parameters.values()
                        if each.default is each.empty and each.name != parameter
                    }
                    with pytest.raises(ValueError, match="another protection domain"):
                        await _called(method, given | {parameter: memory})
                    refused += 1
            assert calls == []
            # The spy sees what is posted.
            receive = connection.post_recv(bytearray(8))
            await connection.send(b"a message")
            assert calls == ["post_recv", "post_send"]
            await things["server"].receive()
            await things["server"].send(b"8 bytes.")
            await receive
        assert refused > len(METHODS)
        assert foreign._users == 0


async def _called(method: Any, arguments: dict[str, Any]) -> None:
    made = method(**arguments)
    if inspect.isawaitable(made):
        await made


def _variants(
    parameter: str, foreign: aiordma.MemoryRegion, ours: aiordma.MemoryRegion
) -> list[Any]:
    """Return forms in which the memory can be given."""
    length = len(foreign)
    if parameter == "memory":  # of a window or a grant
        return [foreign[:]]
    if parameter in MEMORY:
        return [foreign, foreign[:]]
    if parameter == "buffers":
        return [[foreign], [ours, foreign[:]], [[ours, foreign[:]]]]
    half = length // 2
    return [[foreign], [ours[:4], foreign[:half]], [bytearray(half), foreign[half:]]]
