"""What the driver refuses to destroy leaks: the object breaks, and stays for the life of the
process with its memory and all that it was created on (docs/fault-model.md)."""

import pytest

from tests.unit.child import RUN, run_child

pytestmark = [pytest.mark.natively, pytest.mark.slow]

SETUP = """
import asyncio, errno, gc, logging
from contextlib import suppress
import aiordma, anyio
from aiordma.testing import Faults, connected_pair, software_objects

lines = []
logging.getLogger("aiordma").addHandler(handler := logging.Handler(logging.ERROR))
handler.emit = lambda record: lines.append(record.getMessage())

async def open_connection():
    async with await aiordma.listen("127.0.0.1", 0, device="software") as listener:
        async def accept():
            servers.append(await listener.accept())

        async with anyio.create_task_group() as group:
            group.start_soon(accept)
            return await aiordma.connect("127.0.0.1", listener.port, device="software")

async def open_domain():
    return await aiordma.open_domain("127.0.0.1", device="software")

async def open_datagram():
    return await aiordma.open_datagram("127.0.0.1", device="software")

async def open_shared_receive():
    return await aiordma.open_shared_receive("127.0.0.1", device="software", buffers=4)

async def open_listener():
    return await aiordma.listen("127.0.0.1", 0, device="software")

servers = []

async def close_servers():
    for server in servers:
        with suppress(aiordma.VerbsCallError):  # it ended meanwhile, and its end was refused, too
            await server.aclose()
    servers.clear()
"""

REFUSED = """
async def refuse(open_one, slot, kind):
    opened = await open_one()
    for attempt in range(2):
        with Faults() as faults:
            if not attempt:
                faults.refuse_call(slot, errno.EIO, times=0)
            try:
                await opened.aclose()
            except aiordma.VerbsCallError as error:
                assert error.errno == errno.EIO, error
            else:
                raise AssertionError("it was closed")
    del opened
    gc.collect()
    # The peer of a connection can end meanwhile, and leak, too.
    assert 1 <= len(lines) == len(set(lines)) <= 1 + len(servers), lines
    assert all("stays allocated for the life of the process" in line for line in lines), lines

async def main():
    await refuse({open_one}, {slot!r}, {kind!r})
    for server in servers:
        await server.ended()  # the peer of the connection that leaks
    await close_servers()

run({loop!r}, main)
gc.collect()
left = software_objects()
assert left[{kind!r}] >= 1, left  # also after the loop's end
assert left["contexts"] and left["event_channels"], left  # what it was created on
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop", "trio"])
@pytest.mark.parametrize(
    ("open_one", "slot", "kind"),
    [
        ("open_connection", "destroy_qp", "queue_pairs"),
        ("open_connection", "destroy_id", "identifiers"),
        ("open_datagram", "destroy_qp", "queue_pairs"),
        ("open_shared_receive", "destroy_srq", "shared_receives"),
        ("open_domain", "dealloc_pd", "domains"),
        ("open_listener", "destroy_id", "identifiers"),
    ],
)
def test_refused_close_leaks_raises_twice_and_says_so_once(
    open_one: str, slot: str, kind: str, loop: str
) -> None:
    source = REFUSED.format(open_one=open_one, slot=slot, kind=kind, loop=loop)
    run_child(RUN, SETUP, source)


WAITERS = """
async def main():
    client = await open_connection()
    waiting = asyncio.ensure_future(client.receive())
    await asyncio.sleep(0.01)
    with Faults() as faults:
        faults.refuse_call("destroy_qp", errno.EIO, times=0)
        try:
            await client.aclose()
        except aiordma.VerbsCallError:
            pass
    for each in (waiting, client.send(b"x")):
        try:
            await each
        except aiordma.ClosedError:
            pass
        else:
            raise AssertionError(each)
    assert isinstance(await client.ended(), aiordma.ClosedError)
    async with connected_pair() as (one, other):  # the device goes on
        await one.send(b"hello")
        assert await other.receive() == b"hello"
    await close_servers()

run("asyncio", main)
"""


def test_waiters_of_an_object_that_leaks_get_an_error_and_others_go_on() -> None:
    run_child(RUN, SETUP, WAITERS)


LATE_WRITE = """
from aiordma import Access
from aiordma._native import ffi
from tests.waiting import wait_until

async def leak():
    client = await open_connection()
    region = client.register(bytearray(64), Access.REMOTE_WRITE)
    remote = region.remote()
    with Faults() as faults:
        faults.refuse_call("destroy_qp", errno.EIO, times=0)
        try:
            await client.aclose()
        except aiordma.VerbsCallError:
            return remote
    raise AssertionError("it was closed")

async def main():
    remote = await leak()
    await close_servers()
    for _ in range(3):
        gc.collect()
    others = [bytearray(64) for _ in range(1000)]  # where freed memory was
    async with connected_pair() as (one, other):
        await one.write(b"too late", remote[:8])
    memory = ffi.buffer(ffi.cast("char *", remote.address), 64)
    assert memory[:8] == b"too late"
    assert memory[8:] == bytes(56)
    assert not any(map(any, others))

run("asyncio", main)
"""


@pytest.mark.promise("A buffer is held until its request completes")
def test_late_write_reaches_memory_of_a_connection_that_leaks() -> None:
    """Everything is dropped and collected, and a peer of the domain still writes to it."""
    run_child(RUN, SETUP, LATE_WRITE)


UNFORESEEN = """
import array, weakref

kept = []

async def main():
    client = await open_connection()
    memory = array.array("B", bytes(64))
    client.register(memory)
    kept.append(weakref.ref(memory))
    client._endpoint.{step} = lambda: 1 / 0  # of this one: its peer ends meanwhile
    for _ in range(2):
        try:
            await client.aclose()
        except ZeroDivisionError:
            vars(client._endpoint).pop({step!r}, None)
        else:
            raise AssertionError("it was closed")
    del client, memory
    for server in servers:
        await server.aclose()
    servers.clear()
    gc.collect()
    assert len(lines) == 1 and "division by zero" in lines[0], lines

run("asyncio", main)
gc.collect()
assert software_objects()["queue_pairs"] == {left}, software_objects()
assert kept[0]() is not None  # the memory, also after the loop's end
"""


@pytest.mark.parametrize(("step", "left"), [("_flush", 1), ("_destroy", 1), ("_destroyed", 0)])
def test_error_that_nobody_foresaw_leaks_the_object(step: str, left: int) -> None:
    run_child(RUN, SETUP, UNFORESEEN.format(step=step, left=left))


USERS = """
async def main():
    {open_shared}
    async def accept():
        servers.append(await listener.accept())

    async with await aiordma.listen("127.0.0.1", 0, device="software", {listens}) as listener:
        async with anyio.create_task_group() as group:
            group.start_soon(accept)
            port = listener.port
            client = await aiordma.connect("127.0.0.1", port, device="software", {connects})
        with Faults() as faults:
            faults.refuse_call("destroy_qp", errno.EIO, times=0)
            try:
                await {leaks}.aclose()
            except aiordma.VerbsCallError:
                pass
            else:
                raise AssertionError("it was closed")
        for each in (client, *servers):  # with a shared queue, the other may have leaked first
            with suppress(aiordma.VerbsCallError):
                await each.aclose()
    if shared is not None:
        try:
            await shared.aclose()
        except aiordma.VerbsCallError as error:
            assert error.errno == errno.EIO, error
        else:
            raise AssertionError("it was closed")
    assert "the connection" in lines[0], lines
    assert shared is None or "the connection" not in lines[-1], lines

run("asyncio", main)
left = software_objects()
assert left["queue_pairs"] and left["domains"], left
"""

DOMAIN = 'shared = await aiordma.open_domain("127.0.0.1", device="software")'
QUEUE = 'shared = await aiordma.open_shared_receive("127.0.0.1", device="software", buffers=4)'


@pytest.mark.parametrize(
    ("open_shared", "listens", "connects", "leaks"),
    [
        (DOMAIN, "", "domain=shared", "client"),
        (QUEUE, "", "shared_receive=shared", "client"),
        ("shared = None", "shared_receive=8", "", "servers[0]"),
        ("shared = None", "", 'domain="each"', "client"),
    ],
)
def test_what_a_leaked_connection_was_created_on_leaks_at_its_end(
    open_shared: str, listens: str, connects: str, leaks: str
) -> None:
    """Nothing waits for the connection, which never leaves, also not the end of the event loop."""
    users = USERS.format(open_shared=open_shared, listens=listens, connects=connects, leaks=leaks)
    run_child(RUN, SETUP, users)


BROKEN = """
import socket
from aiordma._endpoint.endpoint import Endpoint
from aiordma._runtime.reactor import current_reactors

async def broken_listener():
    listener = await open_listener()
    waiting = [asyncio.ensure_future(each) for each in (listener.request(), listener.accept())]
    await asyncio.sleep(0.01)
    listener._endpoint.receives.close = lambda: 1 / 0
    with anyio.fail_after(10):
        try:
            await listener.aclose()
        except ZeroDivisionError:
            pass
        await asyncio.wait(waiting)
    assert all(isinstance(each.exception(), aiordma.ClosedError) for each in waiting)

async def broken_connect():
    with socket.create_server(("127.0.0.1", 0)) as server:  # which answers nothing
        connecting = asyncio.ensure_future(
            aiordma.connect("127.0.0.1", server.getsockname()[1], device="software", timeout=None)
        )
        await asyncio.sleep(0.1)
        (reactor,) = current_reactors()
        (handler,) = reactor._handlers.values()
        handler(None)  # no event: the handler raises
        await asyncio.wait([connecting], timeout=10)
        assert isinstance(connecting.exception(), AttributeError), connecting

run("asyncio", {main})
"""


@pytest.mark.parametrize("main", ["broken_listener", "broken_connect"])
def test_waiters_of_what_breaks_at_an_unforeseen_error_get_an_error(main: str) -> None:
    run_child(RUN, SETUP, BROKEN.format(main=main))


FAILED_DEVICE = """
async def main():
    client = await open_connection()
    hub, region = client._endpoint.hub, client.register(bytearray(64))
    hub._fail(aiordma.VerbsCallError(errno.EIO, "ibv_poll_cq"))
    client._endpoint.calls.begin()  # a call of the driver that uses the queue pair
    await asyncio.sleep(0.05)
    pair = client._endpoint.pair.raw
    assert not pair.closed and not region.closed and not hub.domain.closed
    client._endpoint.calls.end()
    await client.aclose()
    for server in servers:
        await server.aclose()
    await asyncio.sleep(0.05)
    assert hub.domain.closed  # once nothing uses it
    assert all("it was not destroyed" not in line for line in lines), lines

run("asyncio", main)
"""


def test_a_failed_device_stays_open_for_what_uses_it() -> None:
    run_child(RUN, SETUP, FAILED_DEVICE)


REFUSED_WATCH = """
async def main():
    loop = asyncio.get_running_loop()
    watch = loop.add_reader
    for at in range(4):
        count = 0

        def refuse_one(*arguments):
            nonlocal count
            count += 1
            if count == at + 1:
                raise OSError(errno.ENOSPC, "epoll_ctl")
            watch(*arguments)

        loop.add_reader = refuse_one
        try:
            async with connected_pair() as (one, other):
                await one.send(b"hello")
        except* OSError as group:
            assert "epoll_ctl" in repr(group.exceptions), group
        loop.add_reader = watch
        async with connected_pair() as (one, other):
            await one.send(b"hello")
            assert await other.receive() == b"hello"
        for reactor in current_reactors():
            await close_if_unused(reactor)
        left = software_objects()
        del left["sockets"]
        assert not any(each for kind, each in left.items() if kind != "contexts"), left
        assert left["contexts"] <= 1, left  # the connection manager's

from aiordma._runtime.reactor import current_reactors
from tests.internals import close_if_unused
run("asyncio", main)
"""


def test_an_event_loop_that_refuses_to_watch_leaves_nothing_open() -> None:
    run_child(RUN, SETUP, REFUSED_WATCH)


FORKED = """
import os
from aiordma import streams
from aiordma._runtime.reactor import current_reactors

async def open_all():
    listener = await open_listener()
    connecting = asyncio.ensure_future(
        aiordma.connect("127.0.0.1", listener.port, device="software")
    )
    server = await streams.start_server(lambda *_: None, "127.0.0.1", 0, device="software")
    port = server.sockets[0].getsockname()[1]
    stream = await streams.open_connection("127.0.0.1", port, device="software")
    request = await listener.request()
    return listener, connecting, request, server, stream, current_reactors()[0]

async def go_on(listener, connecting, request, server, stream, _reactor):
    async with request.accept() as accepted, await connecting as client:
        await client.send(b"the parent's")
        assert await accepted.receive() == b"the parent's"
    stream[1].close()
    server.close()
    await listener.aclose()

loop = asyncio.new_event_loop()
opened = loop.run_until_complete(open_all())
child = os.fork()
if not child:
    reactor = opened[-1]
    left = [each.left_open() for each in reactor.closables]
    for each in list(reactor.closables):
        each.end_with_loop()
    closed = all(each.closed.is_set() for each in reactor.closables)
    os._exit(0 if closed and not any(left) and not lines else 1)
assert os.waitpid(child, 0)[1] == 0
loop.run_until_complete(go_on(*opened))
"""


@pytest.mark.promise("Fork safety")
def test_a_forked_child_that_ends_the_loop_closes_nothing_of_its_parents() -> None:
    run_child(SETUP, FORKED)


STREAM = """
import contextlib
from aiordma import streams

reported, lost = [], []

class Client(asyncio.Protocol):
    def connection_lost(self, error):
        lost.append(error)

async def main():
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reported.append(context))
    closed = []
    async with await streams.listen_stream("127.0.0.1", 0) as listener:
        accepting = asyncio.ensure_future(listener.accept())
        transport, _ = await streams.create_connection(Client, "127.0.0.1", listener.port)
        async with await accepting as peer:
            transport._channel.read_error = lambda: 1 / 0
            await peer.send(b"x")
            with contextlib.suppress(aiordma.PeerGoneError, anyio.EndOfStream):
                await peer.receive()
        for _ in range(2):
            try:
                await transport.get_extra_info("connection").aclose()
            except ZeroDivisionError as error:
                closed.append(error)
    assert len(closed) == 2, closed
    assert isinstance(lost[0], ZeroDivisionError), lost
    assert not reported, reported  # none of the protocol's code
    assert len(lines) == 1 and "division by zero" in lines[0], lines

run({loop!r}, main)
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop", "polling"])
def test_unforeseen_error_of_a_transport_is_not_its_protocols(loop: str) -> None:
    run_child(RUN, SETUP, STREAM.format(loop=loop))
