"""Domains: regions that outlive connections, and peers that are kept from each other's memory."""

import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import pytest

import aiordma
from aiordma import Access, MemoryRegion
from aiordma.verbs import AddressHandle
from tests.connections import connect_to
from tests.device.players import REMOTE, Outcome, both_ways, one_loop, until
from tests.devices import ADDRESS, BUILT_IN, DEVICE, NOT_OURS, kernel_objects
from tests.internals import endpoint_of, kept_queues
from tests.waiting import HeldCalls

pytestmark = pytest.mark.anyio

REACHED = NOT_OURS if BUILT_IN else "10.1.1.77"
"""An address that the device reaches."""
LARGE = 2 << 20
"""Bytes that a thread deregisters on any device."""
SECRET = b"of one peer only"


@asynccontextmanager
async def two_clients(
    domains: tuple[Any, Any], **options: Any
) -> AsyncIterator[tuple[list[aiordma.Connection], list[aiordma.Connection]]]:
    """Yield (clients, servers): two connections, whose server sides have these domains."""
    clients, servers = [], []
    for domain in domains:
        async with aiordma.listen(ADDRESS, 0, domain=domain, **options) as listener:
            client, server = await connect_to(listener, ADDRESS)
        clients.append(client)
        servers.append(server)
    try:
        for client, server in zip(clients, servers, strict=True):
            await client.send(b"first")  # the connecting side sends first
            assert await server.receive() == b"first"
        yield clients, servers
    finally:
        for connection in clients + servers:
            await connection.aclose()


# -- regions that outlive connections -------------------------------------------------------------


@pytest.mark.promise("A peer reaches the memory of its own domain only")
async def test_a_region_of_a_domain_outlives_connections() -> None:
    async with aiordma.open_domain(ADDRESS) as domain:
        region = domain.register(bytearray(SECRET), Access.REMOTE_READ)
        remote = region.remote()
        async with aiordma.listen(ADDRESS, 0, domain=domain) as listener:
            for _ in range(3):
                client, server = await connect_to(listener, ADDRESS)
                async with client, server:
                    assert server.protection_domain is domain.protection_domain
                    assert await client.read_bytes(remote) == SECRET
        assert not region.closed
    assert region.closed


async def test_one_region_serves_sends_and_reads_of_all_connections() -> None:
    async with aiordma.open_domain(ADDRESS) as domain:
        region = domain.register(bytearray(SECRET), REMOTE)
        async with two_clients((domain, domain)) as (clients, servers):
            for client, server in zip(clients, servers, strict=True):
                await server.send(region[:2])
                assert await client.receive() == SECRET[:2]
                await server.sendv([region[:2], region[3:6]])
                assert await client.receive() == SECRET[:2] + SECRET[3:6]
                assert await client.read_bytes(region.remote()) == SECRET


async def test_connections_regions_close_with_them_in_a_domain_too() -> None:
    async with aiordma.open_domain(ADDRESS) as domain, two_clients((domain, domain)) as ends:
        own = ends[1][0].register(bytearray(8))
        await ends[1][0].aclose()
        assert own.closed
        await both_ways(ends[0][1], ends[1][1])


@one_loop
async def test_domain_outlives_what_threads_deregister(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A grant ends with its connection. While a thread deregisters it, the domain is closed."""
    with monkeypatch.context() as patch:
        original = MemoryRegion._destroy

        def slowly(region: MemoryRegion) -> None:
            if region.length == LARGE:
                time.sleep(0.2)
            original(region)

        patch.setattr(MemoryRegion, "_destroy", slowly)
        async with aiordma.open_domain(ADDRESS) as domain:
            async with two_clients((domain, domain)) as (_, (server, _)):
                grant = await server.grant(server.register(bytearray(LARGE), REMOTE), REMOTE)
            assert not grant.is_active
    assert domain.protection_domain.closed
    assert [record.getMessage() for record in caplog.records if record.levelno >= 40] == []


def can_grow(memory: bytearray) -> bool:
    """Return whether the memory is not registered any more."""
    try:
        memory.append(0)
    except BufferError:
        return False
    return True


@asynccontextmanager
async def registering(monkeypatch: pytest.MonkeyPatch, pd: Any) -> AsyncIterator[threading.Event]:
    """Let registrations wait for the end of the block. Yield an event that the first one sets."""
    with monkeypatch.context() as patch:
        held = HeldCalls(patch, pd.provider, "reg_mr")
        try:
            yield held.entered
        finally:
            held.proceed.set()


@pytest.mark.promise("A peer reaches the memory of its own domain only")
@one_loop
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("call", ["register_in_thread", "send", "grant", "grant_region"])
async def test_domain_outlives_registration_of_closed_connection(
    call: str,
    each: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with AsyncExitStack() as stack:
        domain = None if each else await stack.enter_async_context(aiordma.open_domain(ADDRESS))
        _, (server, _) = await stack.enter_async_context(two_clients((domain or "each", None)))
        pd, memory = server.protection_domain, bytearray(LARGE)
        granted = server.register(memory, REMOTE) if call == "grant_region" else memory
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "register_in_thread": lambda: server.register_in_thread(memory),
            "send": lambda: server.send(memory),
            "grant": lambda: server.grant(granted, REMOTE),
            "grant_region": lambda: server.grant(granted, REMOTE),
        }
        outcome = Outcome()
        async with anyio.create_task_group() as group, registering(monkeypatch, pd) as started:
            group.start_soon(outcome.of, calls[call])
            await until(started.is_set)
            await server.aclose()
            if domain is not None:
                group.start_soon(domain.aclose)
            await anyio.sleep(0.1)
            assert not pd.closed
        assert isinstance(outcome.error, aiordma.ClosedError)
        await until(lambda: pd.closed and can_grow(memory))  # a domain's close begins with `closed`
    assert [record.getMessage() for record in caplog.records if record.levelno >= 40] == []


async def test_connect_takes_a_domain() -> None:
    async with (
        aiordma.open_domain(ADDRESS) as domain,
        aiordma.listen(ADDRESS, 0) as listener,
    ):
        region = domain.register(bytearray(SECRET), Access.REMOTE_READ)
        client, server = await connect_to(listener, ADDRESS, domain=domain)
        async with client, server:
            await both_ways(client, server)
            assert await server.read_bytes(region.remote()) == SECRET
            assert server.protection_domain is not client.protection_domain


@one_loop
async def test_a_prepared_connection_takes_a_domain() -> None:
    async with (
        aiordma.open_domain(ADDRESS) as domain,
        aiordma.listen(ADDRESS, 0, domain="each") as listener,
        aiordma.prepare_connection(ADDRESS, listener.port, domain=domain) as client,
    ):
        assert client.protection_domain is domain.protection_domain
        async with anyio.create_task_group() as group:
            group.start_soon(client.establish)
            request = await listener.request()
            async with request.prepare(domain=domain) as server:
                assert server.protection_domain is domain.protection_domain
                await server.establish()


@one_loop
async def test_accept_takes_a_domain_of_its_own_for_a_peer() -> None:
    async with (
        aiordma.open_domain(ADDRESS) as domain,
        aiordma.listen(ADDRESS, 0) as listener,
        anyio.create_task_group() as group,
    ):

        async def connect() -> None:
            async with aiordma.connect(ADDRESS, listener.port) as client:
                await client.send(b"first")
                await client.receive()

        group.start_soon(connect)
        request = await listener.request()
        async with request.accept(domain=domain) as server:
            assert server.protection_domain is domain.protection_domain
            await server.receive()
            await server.send(b"that is all")
            await server.ended()


@one_loop
async def test_open_domain_finds_the_device_that_reaches_an_address() -> None:
    async with aiordma.open_domain(REACHED) as domain:
        assert domain.device_name == DEVICE
        assert domain.register(bytearray(8)).length == 8


# -- refused by the device ------------------------------------------------------------------------


async def test_peers_of_one_domain_reach_its_memory() -> None:
    """The control of the next tests: the same access succeeds within one domain."""
    async with two_clients((None, None)) as (clients, servers):
        memory = bytearray(SECRET)
        remote = servers[0].register(memory, REMOTE).remote()
        assert await clients[1].read_bytes(remote) == SECRET
        await clients[1].write(b"!", remote[:1])
        await until(lambda: memory[:1] == b"!")


async def _refused(
    domains: tuple[Any, Any], operation: str, region: aiordma.MemoryRegion | None = None
) -> None:
    """Let the second client access memory of the first server's domain, with its rkey."""
    async with two_clients(domains) as (clients, servers):
        memory = region or servers[0].register(bytearray(SECRET), REMOTE)
        remote = memory.remote()
        landing = bytearray(len(SECRET))
        if operation == "read":
            request = clients[1].post_read(landing, remote)
        else:
            request = clients[1].post_write(b"x" * len(SECRET), remote)
        request.add_done_callback(aiordma.WorkRequest.exception)
        await clients[1].ended()
        assert request.done()
        if operation == "read":
            assert request.exception() is not None
        assert landing == bytes(len(SECRET))
        assert bytes(memory.view) == SECRET
        await both_ways(clients[0], servers[0])


@pytest.mark.promise("A peer reaches the memory of its own domain only")
@pytest.mark.parametrize("operation", ["read", "write"])
async def test_each_keeps_peers_from_each_others_memory(operation: str) -> None:
    await _refused(("each", "each"), operation)


@pytest.mark.promise("A peer reaches the memory of its own domain only")
@one_loop
@pytest.mark.parametrize("operation", ["read", "write"])
async def test_a_domain_keeps_other_peers_from_its_memory(operation: str) -> None:
    async with aiordma.open_domain(ADDRESS) as domain:
        region = domain.register(bytearray(SECRET), REMOTE)
        for other in (None, "each"):
            await _refused((domain, other), operation, region)


@pytest.mark.promise("A peer reaches the memory of its own domain only")
@one_loop
@pytest.mark.parametrize("operation", ["read", "write"])
async def test_the_shared_domain_is_kept_from_peers_of_a_domain(operation: str) -> None:
    async with aiordma.open_domain(ADDRESS) as domain:
        await _refused((None, domain), operation)


@pytest.mark.promise("A peer reaches the memory of its own domain only")
@one_loop
@pytest.mark.capability("named_refusals")
async def test_the_refusal_of_another_domains_rkey_is_named() -> None:
    async with two_clients(("each", "each")) as (clients, servers):
        remote = servers[0].register(bytearray(SECRET), REMOTE).remote()
        with pytest.raises(aiordma.RemoteAccessError):
            await clients[1].read_bytes(remote)


@pytest.mark.promise("A peer reaches the memory of its own domain only")
@one_loop
@pytest.mark.capability("atomics")
async def test_an_atomic_on_memory_of_another_domain_is_refused() -> None:
    async with two_clients(("each", "each")) as (clients, servers):
        access = Access.REMOTE_ATOMIC | Access.LOCAL_WRITE
        region = servers[0].register(bytearray(16), access)
        start = -region.address % 8
        with pytest.raises(aiordma.RemoteAccessError):
            await clients[1].fetch_add(region.remote()[start : start + 8], 1)
        assert bytes(region.view) == bytes(16)


# -- each -----------------------------------------------------------------------------------------


async def test_each_gives_every_connection_its_own_domain() -> None:
    before = kernel_objects(DEVICE)["pd"]
    async with aiordma.listen(ADDRESS, 0, domain="each") as listener:
        one = await connect_to(listener, ADDRESS, domain="each")
        two = await connect_to(listener, ADDRESS, domain="each")
        domains = {connection.protection_domain for connection in (*one, *two)}
        assert len(domains) == 4
        assert kernel_objects(DEVICE)["pd"] >= before + 4
        for client, server in (one, two):
            await both_ways(client, server)
            await client.aclose()
            await server.aclose()
        await until(lambda: all(domain.closed for domain in domains))


async def test_messages_that_arrived_outlive_the_private_domain() -> None:
    async with aiordma.listen(ADDRESS, 0, domain="each") as listener:
        client, server = await connect_to(listener, ADDRESS)
        async with client, server:
            await client.send(b"kept")
            async with server.receive_view() as view:
                part = view[:2]
            await server.aclose()
            assert bytes(part) == b"ke"


@one_loop
async def test_each_works_with_every_kind_of_request() -> None:
    async with two_clients(("each", "each"), receive_size=4096) as (clients, servers):
        client, server = clients[0], servers[0]
        region = server.register(bytearray(8192), REMOTE)
        await client.write(bytes(range(256)) * 16, region.remote()[:4096])
        assert bytes(region.view[:256]) == bytes(range(256))
        assert await client.read_bytes(region.remote()) == bytes(region.view)
        with server.chain() as chain:
            sent = [chain.post_send(b"%d" % i) for i in range(8)]
        for i, request in enumerate(sent):
            assert await client.receive() == b"%d" % i
            await request
        for _ in range(20):
            await both_ways(client, server)


@one_loop
async def test_each_with_a_shared_receive_queue_is_refused() -> None:
    with pytest.raises(ValueError, match='domain="each"'):
        await aiordma.listen(ADDRESS, 0, domain="each", shared_receive=4)
    with pytest.raises(ValueError, match='domain="each"'):
        await aiordma.open_shared_receive(ADDRESS, domain="each")  # type: ignore[arg-type]


# -- shared receive queues and datagrams ----------------------------------------------------------


async def test_connections_take_the_domain_of_their_shared_receive_queue() -> None:
    async with (
        aiordma.open_domain(ADDRESS) as domain,
        aiordma.open_shared_receive(ADDRESS, buffers=4, domain=domain) as shared,
        aiordma.listen(ADDRESS, 0, shared_receive=shared) as listener,
    ):
        client, server = await connect_to(listener, ADDRESS)
        async with client, server:
            assert server.protection_domain is domain.protection_domain
            await both_ways(client, server)


@one_loop
async def test_a_listeners_own_shared_receive_queue_is_in_its_domain() -> None:
    async with (
        aiordma.open_domain(ADDRESS) as domain,
        two_clients((domain, domain), shared_receive=4) as (clients, servers),
    ):
        region = domain.register(bytearray(SECRET))
        for client, server in zip(clients, servers, strict=True):
            await both_ways(client, server)
            await server.send(region)
            assert await client.receive() == SECRET


@pytest.mark.promise("A connection's end flushes no shared receive")
@one_loop
async def test_queue_for_an_accepted_domain_closes_with_its_connections() -> None:
    """The listener stays open. As long as a connection is in the domain, others share its queue."""
    async with (
        aiordma.listen(ADDRESS, 0, shared_receive=4) as listener,
        anyio.create_task_group() as group,
    ):

        async def connect(clients: list[aiordma.Connection]) -> None:
            clients.append(await aiordma.connect(ADDRESS, listener.port))

        async def accept(domain: aiordma.Domain) -> tuple[aiordma.Connection, aiordma.Connection]:
            clients: list[aiordma.Connection] = []
            group.start_soon(connect, clients)
            server = await (await listener.request()).accept(domain=domain)
            await until(lambda: bool(clients))
            return clients[0], server

        for _ in range(2):
            async with aiordma.open_domain(ADDRESS) as domain:
                for _ in range(2):
                    one, other = await accept(domain), await accept(domain)
                    queues = [endpoint_of(server).shared_receive for _, server in (one, other)]
                    assert queues[0] is queues[1]
                    for client, server in (one, other):
                        await both_ways(client, server)
                        await server.aclose()
                        await client.aclose()
            assert domain.protection_domain.closed
        assert not kept_queues(listener)


@one_loop
async def test_a_shared_receive_queue_of_another_domain_is_refused() -> None:
    async with (
        aiordma.open_domain(ADDRESS) as domain,
        aiordma.open_shared_receive(ADDRESS, buffers=4) as shared,
    ):
        with pytest.raises(ValueError, match="not the domain of shared_receive"):
            await aiordma.listen(ADDRESS, 0, shared_receive=shared, domain=domain)
        with pytest.raises(ValueError, match="not the domain of shared_receive"):
            await aiordma.connect(ADDRESS, 1, shared_receive=shared, domain=domain)


@pytest.mark.capability("datagrams")
@pytest.mark.parametrize("each", [False, True])
async def test_a_datagram_socket_takes_a_domain(each: bool) -> None:
    async with aiordma.open_domain(ADDRESS) as domain:
        region = domain.register(bytearray(SECRET))
        chosen: Any = "each" if each else domain
        async with (
            aiordma.open_datagram(ADDRESS, domain=chosen) as socket,
            aiordma.open_datagram(ADDRESS) as other,
        ):
            peer = await socket.resolve(ADDRESS, other.port)
            if each:
                with pytest.raises(ValueError, match="another protection domain"):
                    await socket.send(region, peer)
            await socket.send(SECRET if each else region, peer)
            message = await other.receive()
            assert message.data == SECRET
            await other.send(b"back", message.source)
            assert (await socket.receive()).data == b"back"


@pytest.mark.promise("A peer reaches the memory of its own domain only")
@one_loop
@pytest.mark.capability("datagrams")
@pytest.mark.parametrize("each", [False, True])
async def test_domain_outlives_address_handles(
    each: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    destroying, proceed = threading.Event(), threading.Event()
    original = AddressHandle._destroy

    def slow(handle: AddressHandle) -> None:
        destroying.set()
        proceed.wait()
        original(handle)

    async with AsyncExitStack() as stack:
        domain = None if each else await stack.enter_async_context(aiordma.open_domain(ADDRESS))
        socket = await aiordma.open_datagram(ADDRESS, domain=domain or "each")
        pd = endpoint_of(socket).memory.domain
        await socket.send(b"to itself", await socket.resolve(ADDRESS, socket.port))
        async with anyio.create_task_group() as group:
            with monkeypatch.context() as patch:
                patch.setattr(AddressHandle, "_destroy", slow)
                patch.setattr(endpoint_of(socket).reactor, "blocks", True)  # also natively
                group.start_soon(socket.aclose)
                await until(destroying.is_set)
                if domain is not None:
                    group.start_soon(domain.aclose)
                await anyio.sleep(0.1)
                proceed.set()
        await until(lambda: pd.closed)
    assert [record.getMessage() for record in caplog.records if record.levelno >= 40] == []


# -- closing, and wrong arguments -----------------------------------------------------------------


@pytest.mark.promise("A peer reaches the memory of its own domain only")
async def test_closing_a_domain_in_use_is_refused() -> None:
    async with aiordma.open_domain(ADDRESS) as domain:
        region = domain.register(bytearray(SECRET), Access.REMOTE_READ)
        async with aiordma.listen(ADDRESS, 0, domain=domain) as listener:
            client, server = await connect_to(listener, ADDRESS)
            async with client, server:
                assert domain.members == 2
                with pytest.raises(aiordma.BusyError, match="1 listener, 1 connection"):
                    await domain.aclose()
                # Nothing has changed.
                assert await client.read_bytes(region.remote()) == SECRET
                await both_ways(client, server)
        assert domain.members == 0
        await domain.aclose()
        assert region.closed
        await domain.aclose()


@one_loop
async def test_a_closed_domain_is_refused() -> None:
    async with aiordma.open_domain(ADDRESS) as domain:
        pass
    with pytest.raises(aiordma.ClosedError, match="this domain is closed"):
        domain.register(bytearray(1))
    with pytest.raises(aiordma.ClosedError, match="this domain is closed"):
        await aiordma.listen(ADDRESS, 0, domain=domain)
    with pytest.raises(aiordma.ClosedError, match="this domain is closed"):
        await aiordma.connect(ADDRESS, 1, domain=domain)


@pytest.mark.promise("Cancellation loses no message and leaves nothing open")
async def test_a_cancelled_registration_leaves_nothing_in_the_domain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with aiordma.open_domain(ADDRESS) as domain:
        provider = domain.protection_domain.provider
        held = HeldCalls(monkeypatch, provider, "reg_mr")
        buffer = bytearray(64)
        async with anyio.create_task_group() as group:
            group.start_soon(domain.register_in_thread, buffer)
            await until(held.entered.is_set)
            with pytest.raises(aiordma.BusyError, match="1 registration"):
                await domain.aclose()
            group.cancel_scope.cancel()
            held.proceed.set()
        monkeypatch.undo()
        assert domain.members == 0
        buffer.append(1)
        assert "0 regions" in repr(domain)


@one_loop
async def test_a_domain_of_another_event_loop_is_refused() -> None:
    errors: list[BaseException] = []

    async def elsewhere(domain: aiordma.Domain) -> None:
        try:
            await aiordma.listen(ADDRESS, 0, domain=domain)
        except aiordma.EventLoopError as error:
            errors.append(error)

    async with aiordma.open_domain(ADDRESS) as domain:
        thread = threading.Thread(target=anyio.run, args=(elsewhere, domain))
        thread.start()
        await until(lambda: not thread.is_alive())
        thread.join()
    assert len(errors) == 1


@one_loop
@pytest.mark.parametrize(
    ("domain", "error"), [("all", ValueError), (1, TypeError), (True, TypeError)]
)
async def test_wrong_domains_name_what_is_expected(domain: Any, error: type[Exception]) -> None:
    expected = 'a Domain of open_domain\\(\\), "each", or None'
    with pytest.raises(error, match=expected):
        await aiordma.listen(ADDRESS, 0, domain=domain)
    with pytest.raises(error, match=expected):
        await aiordma.connect(ADDRESS, 1, domain=domain)


@one_loop
async def test_a_domain_requires_its_own_device() -> None:
    async with aiordma.open_domain(ADDRESS) as domain:
        with pytest.raises(ValueError, match="the domain is on"):
            await aiordma.listen(ADDRESS, 0, domain=domain, device="mlx5_0")
        with pytest.raises(ValueError, match="expected the address of one device"):
            await aiordma.open_domain("0.0.0.0")
