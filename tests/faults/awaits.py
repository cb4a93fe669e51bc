"""A scenario for each await of the public API: what was cancelled, and what its docstring promises
for that. test_every_await.py compares the table with the package."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import aiordma
from aiordma import Access
from aiordma.testing import serving_listener
from tests.cells import Arena
from tests.device.players import connected, reactor_in_use, until
from tests.devices import ADDRESS, own_group
from tests.faults.suspensions import CANCELLED, Cut
from tests.internals import close_unused_reactors, current_reactors, is_closed

__all__ = (
    "ASYNCIO",
    "PARAMETERS",
    "SCENARIOS",
    "Scenario",
    "at_rest",
    "close",
    "of",
    "send_to_waiting",
    "until_the_peer_ends",
)

Scenario = Callable[[Cut], Awaitable[None]]

SCENARIOS: dict[str, Scenario] = {}
"""The scenarios by the qualified names of the functions."""
PARAMETERS: list[Any] = []
"""Each scenario once, as the parameter of a test."""
ASYNCIO: list[Any] = []
"""Those that need asyncio's loops."""

_REMOTE = Access.REMOTE_READ | Access.REMOTE_WRITE


def of(
    *names: str, ways: Sequence[Any] = (), needs: str = "", on: list[Any] = PARAMETERS
) -> Callable[[Callable[..., Awaitable[None]]], Scenario]:
    """Decorate the scenario of these functions.

    Args:
        ways: it runs once for each of them, which is its second argument.
        needs: the capability of the device that it needs.
        on: PARAMETERS, or ASYNCIO.
    """

    def decorate(function: Callable[..., Awaitable[None]]) -> Scenario:
        async def in_each_way(cut: Cut) -> None:
            for way in ways:
                own = Cut(cut.at, cut.mode)
                await function(own, way)
                cut.reached |= own.reached

        scenario: Scenario = in_each_way if ways else function
        marks = [pytest.mark.capability(needs)] if needs else []
        SCENARIOS.update(dict.fromkeys(names, scenario))
        on.append(pytest.param(scenario, id=names[0], marks=marks))
        return scenario

    return decorate


# -- what scenarios share -------------------------------------------------------------------------


async def works(
    one: aiordma.Connection, other: aiordma.Connection, *permitted: bytes
) -> list[bytes]:
    """Prove that a connection works: only these messages may arrive before ours. Return them."""
    await one.send(b"last")
    found: list[bytes] = []
    while (message := await other.receive()) != b"last":
        found.append(message)
    assert found in ([], list(permitted))
    await other.send(b"back")
    assert await one.receive() == b"back"
    return found


@asynccontextmanager
async def memories() -> AsyncIterator[tuple[aiordma.Connection, aiordma.Connection, Arena, Arena]]:
    """Yield connected ends and the memory of both; check both when all is closed."""
    async with connected() as (client, server):
        ours = Arena(client, "client", [64, 64, 4096])
        theirs = Arena(server, "server", [64, 64, 4096])
        yield client, server, ours, theirs
        await works(client, server)
        ours.check()
        theirs.check()
    ours.check()
    theirs.check()


async def until_the_peer_ends(connection: aiordma.Connection) -> None:
    """Serve a peer until it disconnects."""
    async for _ in connection:
        pass


async def send_to_waiting(end: Any, data: bytes) -> None:
    """Send when the task that receives waits: a kernel's device delivers at once here."""
    await anyio.wait_all_tasks_blocked()
    await end.send(data)


async def close(opened: Any) -> None:
    """Close what an opening has returned, if it was not cancelled."""
    if opened is not CANCELLED:
        await opened.aclose()


async def notify_waiting(end: aiordma.Connection, counter: aiordma.types.Counter) -> None:
    """Notify the peer when its task waits."""
    await anyio.wait_all_tasks_blocked()
    await end.send(b"", immediate=counter.number)


# -- messages -------------------------------------------------------------------------------------


@of("Connection.send")
async def send(cut: Cut) -> None:
    async with connected() as (client, server):
        sent = await cut.run(client.send(b"cut"))
        found = await works(client, server, b"cut")
        assert found or sent is CANCELLED


@of("Connection.sendv")
async def sendv(cut: Cut) -> None:
    async with connected() as (client, server):
        sent = await cut.run(client.sendv([b"c", b"ut"]))
        found = await works(client, server, b"cut")
        assert found or sent is CANCELLED


AHEAD: dict[str, Any] = {"options": aiordma.ConnectionOptions(send_ahead=4)}


@of("Connection.__aexit__")
async def leave_block(cut: Cut) -> None:
    async with connected(client=AHEAD) as (client, server):
        await client.send(b"cut")
        left = await cut.run(client.__aexit__(None, None, None))
        assert not client.is_connected
        if left is not CANCELLED:
            assert await server.receive() == b"cut"


@of("Connection.drain")
async def drain(cut: Cut) -> None:
    async with connected(client=AHEAD) as (client, server):
        await client.send(b"cut")
        await cut.run(client.drain())
        await client.drain()  # nothing is left of the first one
        assert await works(client, server, b"cut") == [b"cut"]


@of("WorkRequest.__await__")
async def request(cut: Cut) -> None:
    async with connected() as (client, server):
        posted = client.post_send(b"cut")
        await cut.run(posted)
        assert (await posted).wc_flags == 0  # a request can be awaited again
        assert await works(client, server, b"cut") == [b"cut"]


async def received(connection: aiordma.Connection, way: str) -> bytes:
    """Receive a message in one of three ways."""
    if way == "view":
        async with connection.receive_view() as view:
            return bytes(view)
    if way == "message":
        return (await connection.receive_message()).data
    return await connection.receive()


@of(
    "Connection.receive",
    "Connection.receive_message",
    "Connection.receive_view",
    ways=("plain", "message", "view"),
)
async def receive(cut: Cut, way: str) -> None:
    async with connected() as (client, server):
        async with anyio.create_task_group() as group:
            group.start_soon(send_to_waiting, client, b"cut")
            found = await cut.run(received(server, way))
        permitted = [b"cut"] if found is CANCELLED else []
        assert await works(client, server, *permitted) == permitted  # no message is lost
        assert found in (b"cut", CANCELLED)


@of("Connection.send_eof")
async def send_eof(cut: Cut) -> None:
    async with connected() as (client, server):
        with pytest.raises(aiordma.NotSupportedError):
            await cut.run(client.send_eof())
        await works(client, server)


# -- one-sided operations -------------------------------------------------------------------------


@of("Connection.write")
async def write(cut: Cut) -> None:
    async with memories() as (client, server, _, theirs):
        cell = theirs.cells[0]
        cell.begin(b"w" * 64)
        await cut.run(client.write(b"w" * 64, cell.remote))
        await works(client, server)  # which comes after the WRITE
        cell.settle()


@of("Connection.writev")
async def writev(cut: Cut) -> None:
    async with memories() as (client, server, _, theirs):
        cell = theirs.cells[0]
        cell.begin(b"v" * 64)
        await cut.run(client.writev([b"v" * 32, b"v" * 32], cell.remote))
        await works(client, server)
        cell.settle()


@of("BlockTransfer.__await__")
async def blocks(cut: Cut) -> None:
    async with memories() as (client, server, ours, theirs):
        source, cell = ours.cells[0], theirs.cells[0]
        cell.begin(bytes(source.contents))
        pairs = [(source.memory[i : i + 4], cell.remote[i : i + 4]) for i in range(60, -4, -4)]
        await cut.run(client.write_blocks(pairs))
        await works(client, server)
        cell.freeze()  # some of them may have arrived


@of("Counter.wait", "Grant.until", needs="immediate")
async def counter_wait(cut: Cut) -> None:
    async with memories() as (client, server, ours, _):
        counter = client.counter()
        async with client.grant(ours.cells[0].memory, Access.REMOTE_READ) as grant:
            async with anyio.create_task_group() as group:
                group.start_soon(notify_waiting, server, counter)
                waited = await cut.run(grant.until(counter, 1))
            assert grant.is_active or waited is CANCELLED
        await counter.wait(1)  # a cancelled wait has taken nothing
        await works(client, server)


@of("Connection.read")
async def read(cut: Cut) -> None:
    async with memories() as (client, server, ours, theirs):
        target = ours.cells[1]
        target.begin(bytes(theirs.cells[0].contents))
        await cut.run(client.read(target.memory, theirs.cells[0].remote))
        await client.read(ours.cells[2].memory, theirs.cells[2].remote)  # which comes after it
        target.settle()
        ours.cells[2].contents = theirs.cells[2].contents
        await works(client, server)


@of("Connection.readv")
async def readv(cut: Cut) -> None:
    async with memories() as (client, _, ours, theirs):
        target = ours.cells[1]
        target.begin(bytes(theirs.cells[0].contents))
        await cut.run(client.readv([target.memory], theirs.cells[0].remote))
        await client.read(ours.cells[2].memory, theirs.cells[2].remote)
        target.settle()
        ours.cells[2].contents = theirs.cells[2].contents


@of("Connection.read_bytes")
async def read_bytes(cut: Cut) -> None:
    async with memories() as (client, _, _ours, theirs):
        found = await cut.run(client.read_bytes(theirs.cells[2].remote))
        assert found in (theirs.cells[2].contents, CANCELLED)


@of(
    "Connection.fetch_add",
    "Connection.compare_swap",
    needs="atomics",
    ways=(("fetch_add", 1), ("compare_swap", 0, 1)),
)
async def atomics(cut: Cut, call: tuple[Any, ...]) -> None:
    name, *arguments = call
    async with connected() as (client, server):
        region = server.register(bytearray(8), _REMOTE | Access.REMOTE_ATOMIC)
        found = await cut.run(getattr(client, name)(region.remote(), *arguments))
        after = await client.fetch_add(region.remote(), 0)
        assert found in (0, CANCELLED)
        assert after == 1 if found == 0 else after in (0, 1)
        await works(client, server)


@of("Connection.register_in_thread")
async def register_in_thread(cut: Cut) -> None:
    async with connected() as (client, server):
        buffer = bytearray(4096)
        region = await cut.run(client.register_in_thread(buffer))
        if region is CANCELLED:
            buffer.append(1)  # no longer registered
        await works(client, server)


# -- windows and grants ---------------------------------------------------------------------------


@of(
    "Connection.open_window",
    "Connection.bind",
    needs="memory_windows",
    ways=("open_window", "bind"),
)
async def bind(cut: Cut, name: str) -> None:
    async with connected() as (client, server):
        region = client.register(bytearray(64), _REMOTE | Access.MW_BIND | Access.LOCAL_WRITE)
        call: Any = getattr(client, name)
        arguments = [] if name == "open_window" else [region[:], _REMOTE]
        window = await cut.run(call(*arguments))
        await works(client, server)
        if window is not CANCELLED:
            window.close()
        region.close()  # in use by nothing


@of("Connection.revoke", needs="memory_windows")
async def revoke(cut: Cut) -> None:
    async with connected() as (client, server):
        region = client.register(bytearray(64), _REMOTE | Access.MW_BIND | Access.LOCAL_WRITE)
        window = await client.bind(region[:], _REMOTE)
        revoked = await cut.run(client.revoke(window))
        await works(client, server)
        assert not window.is_bound or revoked is CANCELLED
        window.close()
        region.close()


@of(
    "Connection.grant",
    "Grant.aclose",
    "Grant.ended",
    ways=("grant", "__aexit__", "aclose", "ended"),
)
async def grant(cut: Cut, name: str) -> None:
    async with connected() as (client, server):
        buffer = bytearray(64)
        opening = client.grant(buffer, _REMOTE)
        if name == "grant":
            granted = await cut.run(opening)
            await works(client, server)
            await close(granted)
        else:
            granted = await opening
            if name == "ended":
                async with anyio.create_task_group() as group:
                    group.start_soon(cut.run, granted.ended())
                    await anyio.wait_all_tasks_blocked()
                    assert granted.is_active
                    group.start_soon(granted.aclose)
            elif name == "aclose":
                await cut.run(granted.aclose())
            else:
                await cut.run(granted.__aexit__(None, None, None))
            assert not granted.is_active
            await granted.ended()
        buffer.append(1)  # held by nothing
        await works(client, server)


# -- opening --------------------------------------------------------------------------------------


@of(
    "connect",
    "Opening.__aenter__",
    "Opening.__aexit__",
    ways=("__await__", "__aenter__", "__aexit__"),
)
async def connect(cut: Cut, way: str) -> None:
    async with serving_listener(until_the_peer_ends, ADDRESS, "auto") as listener:
        opening = aiordma.connect(ADDRESS, listener.port)
        if way == "__await__":
            await close(await cut.run(opening))
        elif way == "__aenter__":
            await close(await cut.run(opening.__aenter__()))
        else:
            connection = await opening.__aenter__()
            await cut.run(opening.__aexit__(None, None, None))
            await until(lambda: is_closed(connection))


@of(
    "open_rails",
    "Rails.write_blocks",
    "Rails.read_blocks",
    "Rails.aclose",
    ways=("open", "write_blocks", "read_blocks", "aclose"),
)
async def rails(cut: Cut, way: str) -> None:
    async with serving_listener(offer_memory, ADDRESS, "auto") as listener:
        opening = aiordma.open_rails([(ADDRESS, listener.port)] * 2)
        if way == "open":
            await close(await cut.run(opening))
        else:
            opened = await opening
            blocks = [await blocks_of(each) for each in opened.connections]
            if way == "aclose":
                await cut.run(opened.aclose())
                await until(lambda: all(map(is_closed, opened.connections)))
            else:
                await cut.run(getattr(opened, way)(blocks))
                await opened.write_blocks(blocks)
                assert opened.broken == {}
                await opened.aclose()


async def offer_memory(connection: aiordma.Connection) -> None:
    """Serve a peer memory of 64 bytes."""
    region = connection.register(bytearray(64), _REMOTE)
    async for _ in connection:
        await connection.send(region.remote().pack())


async def blocks_of(connection: aiordma.Connection) -> aiordma.Blocks:
    """Return blocks of that memory."""
    await connection.send(b"where?")
    remote = aiordma.RemoteMemory.unpack(await connection.receive())
    local = connection.register(bytearray(64))
    return aiordma.Blocks(local, remote, range(0, 64, 8), range(56, -8, -8), 8)


@of("prepare_connection", "Connection.establish", ways=("prepare", "establish"))
async def prepare(cut: Cut, way: str) -> None:
    async with serving_listener(until_the_peer_ends, ADDRESS, "auto") as listener:
        opening = aiordma.prepare_connection(ADDRESS, listener.port)
        if way == "prepare":
            await close(await cut.run(opening))
        else:
            connection = await opening
            done = await cut.run(connection.establish())
            if done is CANCELLED:
                with pytest.raises(aiordma.ClosedError):
                    connection.post_send(b"x")
            await connection.aclose()


@of(
    "listen",
    "open_domain",
    "open_shared_receive",
    ways=(aiordma.listen, aiordma.open_domain, aiordma.open_shared_receive),
)
async def opening(cut: Cut, call: Any) -> None:
    function: Any = call
    await close(await cut.run(function(ADDRESS)))


@of("resolve", "devices")
async def looking_up(cut: Cut) -> None:
    own = Cut(cut.at, cut.mode)
    await own.run(aiordma.resolve(ADDRESS))
    await cut.run(aiordma.devices())
    cut.reached |= own.reached


# -- closing --------------------------------------------------------------------------------------


@of("Connection.aclose", "Connection.ended")
async def aclose(cut: Cut) -> None:
    async with connected() as (client, server):
        ended = Cut(cut.at, cut.mode)
        async with anyio.create_task_group() as group:
            group.start_soon(ended.run, server.ended())
            await anyio.wait_all_tasks_blocked()
            await cut.run(client.aclose())
            await until(lambda: is_closed(client))
        with pytest.raises(aiordma.ClosedError):
            client.post_send(b"x")
        with pytest.raises(anyio.EndOfStream):
            await server.receive()
        assert isinstance(await server.ended(), aiordma.DisconnectedError)
        cut.reached |= ended.reached


@of(
    "Domain.aclose", "Domain.register_in_thread", ways=("aclose", "__aexit__", "register_in_thread")
)
async def domain(cut: Cut, name: str) -> None:
    opened = await aiordma.open_domain(ADDRESS)
    buffer = bytearray(4096)
    if name == "aclose":
        await cut.run(opened.aclose())
    elif name == "__aexit__":
        await cut.run(opened.__aexit__(None, None, None))
    else:
        region = await cut.run(opened.register_in_thread(buffer))
        if region is CANCELLED:
            buffer.append(1)
    await opened.aclose()


@of("SharedReceiveQueue.aclose", "SharedReceiveQueue.limit", ways=("aclose", "__aexit__", "limit"))
async def shared_receive(cut: Cut, name: str) -> None:
    opened = await aiordma.open_shared_receive(ADDRESS, depth=8, buffers=4)
    if name == "aclose":
        await cut.run(opened.aclose())
    elif name == "__aexit__":
        await cut.run(opened.__aexit__(None, None, None))
    else:
        with anyio.move_on_after(0.02):
            await cut.run(opened.limit(2))
        with anyio.move_on_after(0.001):  # armed again: nothing is left of the first one
            await opened.limit(3)
    await opened.aclose()


@of("SharedReceiveQueue.resize", needs="srq_resize")
async def resize(cut: Cut) -> None:
    async with aiordma.open_shared_receive(ADDRESS, depth=8, buffers=4) as opened:
        await cut.run(opened.resize(32))
        assert opened.depth >= 8


# -- listeners ------------------------------------------------------------------------------------


@of(
    "Listener.accept",
    "Listener.__anext__",
    "Listener.request",
    ways=("accept", "__anext__", "request"),
)
async def accept(cut: Cut, way: str) -> None:
    async with (
        await aiordma.listen(ADDRESS, 0) as listener,
        anyio.create_task_group() as group,
    ):
        clients: list[aiordma.Connection] = []

        async def connect() -> None:
            clients.append(await aiordma.connect(ADDRESS, listener.port))

        group.start_soon(connect)
        if way == "accept":
            server = await cut.run(listener.accept())
        else:
            waiting = listener.__anext__() if way == "__anext__" else listener.request()
            request = await cut.run(waiting)
            if request is CANCELLED:
                request = await listener.request()  # no peer is lost
            server = await request.accept()
        if server is CANCELLED:
            server = await listener.accept()  # no peer is lost
        await until(lambda: bool(clients))
        await works(clients[0], server)
        await clients[0].aclose()
        await server.aclose()


@of("Listener.serve", "Listener.aclose")
async def serve(cut: Cut) -> None:
    listener = await aiordma.listen(ADDRESS, 0)

    async def echo(connection: aiordma.Connection) -> None:
        async for message in connection:
            await connection.send(message)

    closing = Cut(cut.at, cut.mode)
    async with anyio.create_task_group() as group:

        async def use() -> None:
            try:
                async with aiordma.connect(ADDRESS, listener.port) as client:
                    await client.send(b"x")
                    await client.receive()
            except (aiordma.RdmaError, anyio.EndOfStream):
                pass
            await closing.run(listener.aclose())

        group.start_soon(use)
        await cut.run(listener.serve(echo))
        await listener.aclose()
    cut.reached |= closing.reached


@of(
    "ConnectionRequest.accept",
    "ConnectionRequest.prepare",
    "ConnectionRequest.reject",
    "ConnectionRequest.aclose",
    ways=("accept", "prepare", "reject", "aclose"),
)
async def requested(cut: Cut, way: str) -> None:
    async with (
        await aiordma.listen(ADDRESS, 0) as listener,
        anyio.create_task_group() as group,
    ):
        ended = anyio.Event()

        async def connect() -> None:
            try:
                async with aiordma.connect(ADDRESS, listener.port) as client:
                    await client.receive()
            except (aiordma.RdmaError, anyio.EndOfStream):
                pass
            ended.set()

        group.start_soon(connect)
        request: Any = await listener.request()
        done = await cut.run(getattr(request, way)())
        if way in ("accept", "prepare"):
            await close(done)
        await request.aclose()
        await ended.wait()  # the peer does not wait for what was cancelled


@of(
    "Reconnecting.__anext__",
    "Session.aclose",
    "Session.__aexit__",
    ways=("__anext__", "aclose", "__aexit__"),
)
async def reconnecting(cut: Cut, way: str) -> None:
    async with serving_listener(until_the_peer_ends, ADDRESS, "auto") as listener:
        sessions = aiordma.reconnecting(ADDRESS, listener.port)
        if way == "__anext__":
            session = await cut.run(sessions.__anext__())
        else:
            session = await sessions.__anext__()
            connection = await session.__aenter__()
            if way == "aclose":
                await cut.run(session.aclose())
            else:
                await cut.run(session.__aexit__(None, None, None))
            await until(lambda: is_closed(connection))
        await close(session)


# -- datagrams ------------------------------------------------------------------------------------


@of("open_datagram", "Datagram.aclose", needs="datagrams")
async def datagram_opening(cut: Cut) -> None:
    closing = Cut(cut.at, cut.mode)
    await close(await cut.run(aiordma.open_datagram(ADDRESS)))
    socket = await aiordma.open_datagram(ADDRESS)
    await closing.run(socket.aclose())
    await until(lambda: is_closed(socket))
    cut.reached |= closing.reached


@of(
    "Datagram.resolve",
    "Datagram.send",
    "Datagram.sendv",
    "Datagram.receive",
    "Datagram.register_in_thread",
    needs="datagrams",
    ways=("resolve", "send", "sendv", "receive", "register_in_thread"),
)
async def datagram(cut: Cut, way: str) -> None:
    async with (
        aiordma.open_datagram(ADDRESS) as one,
        aiordma.open_datagram(ADDRESS) as other,
    ):
        call = one.resolve(ADDRESS, other.port)
        peer = await (cut.run(call) if way == "resolve" else call)
        if peer is CANCELLED:
            peer = await one.resolve(ADDRESS, other.port)
        found: list[bytes] = []
        if way == "send":
            await cut.run(one.send(b"cut", peer))
        elif way == "sendv":
            await cut.run(one.sendv([b"c", b"ut"], peer))
        elif way == "receive":
            await one.send(b"cut", peer)
            message = await cut.run(other.receive())
            found += [] if message is CANCELLED else [message.data]
        elif way == "register_in_thread":
            buffer = bytearray(4096)
            if await cut.run(one.register_in_thread(buffer)) is CANCELLED:
                buffer.append(1)
        await one.send(b"last", peer)
        while not found or found[-1] != b"last":
            found.append((await other.receive()).data)
        assert found in ([b"last"], [b"cut", b"last"])
        assert way != "receive" or len(found) == 2


@of("DatagramReceive.__await__", needs="datagrams")
async def datagram_receive(cut: Cut) -> None:
    async with (
        aiordma.open_datagram(ADDRESS) as one,
        aiordma.open_datagram(
            ADDRESS, receive_buffers=0, options=aiordma.ConnectionOptions(max_recv_wr=4)
        ) as other,
    ):
        peer = await one.resolve(ADDRESS, other.port)
        posted = other.post_recv(bytearray(aiordma.verbs.GRH_BYTES + other.mtu))
        async with anyio.create_task_group() as group:
            group.start_soon(one.send, b"cut", peer)
            await cut.run(posted)
        assert (await posted).length == 3  # it can be awaited again


@of("Datagram.join", "MulticastGroup.leave", needs="datagrams")
async def multicast(cut: Cut) -> None:
    async with aiordma.open_datagram(ADDRESS) as socket:
        leaving = Cut(cut.at, cut.mode)
        await cut.run(socket.join(own_group(77)))
        group = await socket.join(own_group(78))
        await leaving.run(group.leave())
        await group.leave()
        cut.reached |= leaving.reached


# -- events and queue pairs -----------------------------------------------------------------------


@of("AsyncEvents.__anext__")
async def async_events(cut: Cut) -> None:
    async with connected() as (client, server):
        await works(client, server)
    with aiordma.verbs.Device(aiordma.verbs.Device.names()[0]).open() as context:
        with anyio.move_on_after(0.01):
            await cut.run(context.async_events().__anext__())


@of("open_queue_pair", "UnmanagedConnection.connect_to", needs="queue pairs by hand")
async def queue_pair(cut: Cut) -> None:
    device = aiordma.verbs.Device.names()[-1]  # of the software device, the one for this
    connecting = Cut(cut.at, cut.mode)
    await close(await cut.run(aiordma.open_queue_pair(device)))
    async with aiordma.open_queue_pair(device) as one, aiordma.open_queue_pair(device) as other:
        done = await connecting.run(one.connect_to(other.address))
        if done is CANCELLED:
            await until(lambda: is_closed(one))
    cut.reached |= connecting.reached


async def at_rest() -> None:
    """Wait until nothing of the loop keeps the device open, and close it: the next scenario opens
    it anew."""
    await until(lambda: not reactor_in_use())
    while current_reactors():
        await close_unused_reactors()
        await anyio.lowlevel.checkpoint()
