"""What a program can do to the engine's objects must not crash it: objects that were made without
their constructor, made twice, and code of the program's that runs in the middle of a post."""

import sys

import pytest

import aiordma._native._engine as _engine
from tests.unit.child import run_child

pytestmark = pytest.mark.slow

CLASSES = """
import gc, inspect
import aiordma
import aiordma._native._engine as _engine

TYPES = [kind for kind in vars(_engine).values() if isinstance(kind, type)]
assert len(TYPES) >= 14
ODD = (None, 0, -1, 1 << 70, "x", b"", (), [], {}, object())

def use(thing):
    # Everything that Python can do with an object; whatever it raises is fine.
    for name in dir(type(thing)):
        if name in ("__class__", "__init_subclass__", "__subclasshook__", "__reduce_ex__"):
            continue
        for arguments in [(), *((odd,) for odd in ODD), (None, None), (0, 0), (0, 0, 0, 0)]:
            try:
                getattr(thing, name)(*arguments)
            except BaseException:
                pass
        for odd in ODD:
            try:
                setattr(thing, name, odd)
            except BaseException:
                pass
        try:
            delattr(thing, name)
        except BaseException:
            pass
    for call in (repr, str, hash, len, list, iter, next, bool):
        try:
            call(thing)
        except BaseException:
            pass
    try:
        waiting = thing.__await__()
        waiting.send(None)
    except BaseException:
        pass
    gc.collect()
"""


def test_bare_objects_do_not_crash() -> None:
    run_child(
        CLASSES,
        """
        for kind in TYPES:
            for make in (kind.__new__, object.__new__):
                try:
                    bare = make(kind)
                except TypeError:
                    continue  # refused
                use(bare)
                del bare
                gc.collect()
        """,
    )


@pytest.mark.parametrize("awaitable", ["ArrivalView", "StreamTransfer"])
def test_awaitables_of_coroutines_pass_on_values(awaitable: str) -> None:
    """From Python 3.12 on, a coroutine calls `send` of what it awaits. trio sends values."""
    assert callable(getattr(_engine, awaitable).send)


@pytest.mark.parametrize("kind", ["WorkRequest", "Port", "SharedPort", "Drain", "ChainPort"])
def test_objects_need_their_constructor(kind: str) -> None:
    run_child(
        f"""
        import aiordma
        import aiordma._native._engine as _engine
        try:
            _engine.{kind}.__new__(_engine.{kind})
        except TypeError as error:
            assert "required argument" in str(error) or "missing" in str(error), error
        else:
            raise SystemExit("it was made")
        """,
    )


WHOLE = """
from types import SimpleNamespace

class Owner(SimpleNamespace):
    def request_ended(self, request): pass
    def request_failed(self, request, raw): return None  # what must be an exception
    def run_ended(self, earlier, last): pass

def whole():
    # One of each that works with others.
    table, owner = _engine.InFlightTable(), Owner(loop=None)
    drain = _engine.Drain(Owner(), 0, 0, table)
    sends, receives, opened = _engine.Slots(), _engine.Slots(), _engine.OpenRequests()
    port = _engine.Port(owner, drain, sends, receives, opened, None, None)
    request = _engine.WorkRequest(owner, "SEND", 1, ())
    region = _engine.RegionBase()
    return [
        table, sends, opened, port, request, region,
        _engine.ChainPort(port), _engine.Part(region, 0, 8, 1),
    ]
"""


def test_constructing_twice_changes_nothing() -> None:
    run_child(
        CLASSES,
        WHOLE,
        """
        for thing, again in zip(whole(), whole()):
            for arguments in ((), (None,), (again,)):
                try:
                    thing.__init__(*arguments)
                except TypeError:
                    pass
        region = _engine.RegionBase()
        part = _engine.Part(region, 0, 8, 1)
        try:
            part.__init__(_engine.RegionBase(), 0, 8, 1)
        except TypeError:
            pass
        assert part.region is region
        """,
    )


def test_odd_use_of_whole_objects_does_not_crash() -> None:
    run_child(
        CLASSES,
        WHOLE,
        """
        for thing in whole():
            use(thing)
            gc.collect()
        request = whole()[4]
        request._complete((0, 5, *[0] * 11))
        try:
            request.result()
        except TypeError as error:
            assert "request_failed" in str(error)
        last = whole()[4]
        last._set_run([1, None, "x"])
        last._complete((0, 0, *[0] * 11))
        assert last.done()
        """,
    )


def test_a_callback_whose_comparison_ends_the_request() -> None:
    run_child(
        CLASSES,
        WHOLE,
        """
        request = whole()[4]
        class Callback:
            def __call__(self, request): pass
            def __eq__(self, other):
                request._complete((0, 0, *[0] * 11))
                gc.collect()
                return True
        for _ in range(8):
            request.add_done_callback(Callback())
        request.remove_done_callback(print)
        assert request.done()
        """,
    )


def test_only_completions_are_given_as_the_class() -> None:
    run_child(
        """
        import aiordma
        import aiordma._native._engine as _engine
        for wrong in (int, object, 3):
            try:
                _engine.give(completion=wrong)
            except TypeError:
                continue
            raise SystemExit("it was taken")
        """,
    )


CONNECTED = """
import asyncio, gc, weakref
import anyio
import aiordma
from aiordma import Access, RemoteMemory
from tests import connections
from tests.internals import endpoint_of

async def connected(main, **options):
    options["device"] = "software"
    async with connections.connected("127.0.0.1", server=options, client=options) as ends:
        client, server = ends
        theirs = server.register(bytearray(64), Access.REMOTE_READ | Access.REMOTE_WRITE)
        await client.write(b"x" * 64, theirs.remote())
        await main(client, server, theirs.remote())

def forced(remote, **numbers):
    # A RemoteMemory whose numbers run the program's code when they are read.
    made = RemoteMemory(remote.address, remote.length, remote.rkey)
    for name, number in numbers.items():
        object.__setattr__(made, name, number)
    return made

class Number:
    def __init__(self, value, action):
        self.value, self.action = value, action
    def __index__(self):
        self.action()
        return self.value
"""


@pytest.mark.promise("A buffer is held until its request completes")
@pytest.mark.parametrize("what", ["address", "rkey"])
def test_a_number_that_closes_the_endpoint_posts_nothing(what: str) -> None:
    run_child(
        CONNECTED,
        f"""
        import time
        async def main(client, server, remote):
            mine = client.register(bytearray(64))
            endpoint = endpoint_of(client)
            crossings = 0
            def close():
                endpoint.teardown.close()
                time.sleep(0.2)  # whatever a thread does about it, it does now
                nonlocal crossings
                crossings = endpoint.hub.poller.crossings
            number = Number(getattr(remote, {what!r}), close)
            try:
                client.post_write(mine[:], forced(remote, {what}=number))
            except aiordma.ClosedError:
                pass
            else:
                raise SystemExit("it was posted")
            assert endpoint.hub.poller.crossings == crossings
            assert mine._users == 0
        asyncio.run(connected(main))
        """,
    )


@pytest.mark.promise("A buffer is held until its request completes")
@pytest.mark.parametrize("what", ["address", "length", "rkey"])
def test_a_number_that_closes_the_region_posts_nothing(what: str) -> None:
    run_child(
        CONNECTED,
        f"""
        async def main(client, server, remote):
            mine = client.register(bytearray(64))
            part = mine[:]
            number = Number(getattr(remote, {what!r}), mine.close)
            try:
                await client.post_write(part, forced(remote, {what}=number))
            except aiordma.ClosedError:
                pass
            else:
                raise SystemExit("it was posted")
            await client.write(b"y" * 64, remote)  # nothing broke
        asyncio.run(connected(main))
        """,
    )


@pytest.mark.parametrize("what", ["parts", "region", "bytes"])
def test_a_number_that_takes_the_parts_away_posts_nothing_freed(what: str) -> None:
    """The list that the program gave is emptied, or its memory closed, while the post is read."""
    run_child(
        CONNECTED,
        f"""
        async def main(client, server, remote):
            mine, other = client.register(bytearray(32)), client.register(bytearray(b"o" * 32))
            plain = bytearray(b"p" * 8)
            parts = [mine[:24], plain] if {what!r} == "bytes" else [mine[:16], other[:16]]
            def act():
                if {what!r} == "parts":
                    parts.clear()
                elif {what!r} == "region":
                    mine.close()
                else:
                    try:
                        plain.extend(bytes(1 << 20))  # would move it
                    except BufferError:
                        return
                    raise SystemExit("the buffer was not exported")
                gc.collect()
            number = Number(remote.rkey, act)
            try:
                await client.post_writev(parts, forced(remote[:32], rkey=number))
            except aiordma.ClosedError:
                assert {what!r} == "region"
            else:
                assert {what!r} != "region", "it was posted"
            assert mine._users == other._users == 0
            await client.write(b"y" * 64, remote)  # nothing broke
        asyncio.run(connected(main))
        """,
    )


FINALIZER = """
crossings = []

def prepare(endpoint, action):
    # A cycle that the next collection finds: while the next request is made.
    class Finalized:
        def __del__(self):
            action()
            crossings.append(endpoint.hub.poller.crossings)
    gc.collect()
    gc.disable()
    garbage = Finalized()
    garbage.itself = garbage
    del garbage
    gc.set_threshold(1)
    gc.enable()

def over():
    gc.set_threshold(700)
    gc.collect()
    assert crossings, "the collector did not run"

async def many(client, part, remote):
    # Requests that are kept: the engine has none to use again, and has to allocate.
    requests = []
    for _ in range(300):
        requests.append(client.post_write(part, remote))
        await requests[-1]
    return requests
"""


def _need_the_collector_in_calls() -> None:
    if sys.version_info >= (3, 12):
        pytest.skip("this Python's collector runs between bytecodes: not in a C call")


@pytest.mark.promise("A buffer is held until its request completes")
@pytest.mark.parametrize("way", ["write", "send", "receive"])
def test_a_finalizer_that_closes_the_region_in_a_post(way: str) -> None:
    """The collector runs as the request is made."""
    _need_the_collector_in_calls()
    run_child(
        CONNECTED,
        FINALIZER,
        f"""
        async def main(client, server, remote):
            mine = client.register(bytearray(64))
            part = mine[:]
            kept = await many(client, part, remote)
            post = {{
                "write": lambda: client.post_write(part, remote),
                "send": lambda: client.post_send(part),
                "receive": lambda: client.post_recv(part),
            }}[{way!r}]
            prepare(endpoint_of(client), mine.close)
            try:
                request = post()
            except aiordma.ClosedError:
                request = None
            over()
            assert request is None, "a dead lkey was posted"
            assert client.cause is None
            await client.write(b"y" * 64, remote)
        asyncio.run(connected(main, receive_buffers=0 if {way!r} == "receive" else 16))
        """,
    )


@pytest.mark.parametrize("what", ["region", "window", "bind"])
def test_finalizer_in_a_bind_takes_its_memory_or_window(what: str) -> None:
    _need_the_collector_in_calls()
    run_child(
        CONNECTED,
        FINALIZER,
        f"""
        async def main(client, server, remote):
            from aiordma import Access
            mine = client.register(bytearray(64), Access.MW_BIND | Access.LOCAL_WRITE)
            part, window = mine[:], await client.open_window()
            kept = await many(client, client.register(bytearray(64))[:], remote)
            bind = lambda: client.post_bind_window(window, part, Access.REMOTE_READ)
            action = {{"region": mine.close, "window": window.close, "bind": bind}}[{what!r}]
            prepare(endpoint_of(client), action)
            request = None
            try:
                request = bind()
            except (aiordma.ClosedError, ValueError):
                pass
            over()
            assert client.cause is None
            if {what!r} == "bind":
                assert request is None and window.is_bound and mine._users
                await client.revoke(window)
            else:
                assert request is None, "it was posted"
            assert not window.is_bound or request is not None
            await client.write(b"y" * 64, remote)
        asyncio.run(connected(main))
        """,
    )


def test_finalizer_that_closes_the_region_in_a_datagram_receive() -> None:
    _need_the_collector_in_calls()
    run_child(
        FINALIZER,
        """
        import asyncio, gc
        import aiordma

        async def main():
            options = {"device": "software", "receive_buffers": 0}
            async with await aiordma.open_datagram("127.0.0.1", **options) as socket:
                regions = [socket.register(bytearray(socket.mtu)) for _ in range(2)]
                peer = await socket.resolve("127.0.0.1", socket.port)
                receive = socket.post_recv(regions[0])
                await socket.send(b"x", peer)
                await receive
                pool = socket._endpoint.memory.pool
                leased, free = pool.leased, socket._endpoint.work.receives.slots.free
                part = regions[1][:]
                prepare(socket._endpoint, regions[1].close)
                try:
                    socket.post_recv(part)
                except aiordma.ClosedError:
                    pass
                else:
                    raise SystemExit("a dead lkey was posted")
                over()
                assert (pool.leased, socket._endpoint.work.receives.slots.free) == (leased, free)
        asyncio.run(main())
        """,
    )


@pytest.mark.promise("A buffer is held until its request completes")
@pytest.mark.parametrize("way", ["write", "chain"])
def test_a_finalizer_that_closes_the_endpoint_in_a_post(way: str) -> None:
    run_child(
        CONNECTED,
        FINALIZER,
        f"""
        async def main(client, server, remote):
            mine = client.register(bytearray(64))
            part = mine[:]
            endpoint = endpoint_of(client)
            kept = await many(client, part, remote)
            request = None
            try:
                if {way!r} == "chain":
                    with client.chain(signal_last_only=True) as chain:
                        request = chain.post_write(part, remote)
                        prepare(endpoint, endpoint.teardown.close)
                else:
                    prepare(endpoint, endpoint.teardown.close)
                    request = client.post_write(part, remote)
            except aiordma.RdmaError:
                pass
            over()
            assert endpoint.hub.poller.crossings == crossings[0], "it was posted"
            if request is not None:
                with anyio.fail_after(30):
                    try:
                        await request
                    except aiordma.RdmaError:
                        pass
            with anyio.fail_after(30):
                await client.aclose()
            assert mine._users == 0
        asyncio.run(connected(main))
        """,
    )


def test_a_post_inside_a_post_keeps_each_address() -> None:
    run_child(
        CONNECTED,
        """
        async def main(client, server, remote):
            mine = client.register(bytearray(b"a" * 32 + b"b" * 32))
            halves = remote[:32], remote[32:]
            inner = []
            class Old:
                # A number of the remote memory that the port knows from the request before.
                def __index__(self): return remote.rkey
                def __del__(self): inner.append(client.post_write(mine[32:], halves[1]))
            await client.post_write(mine[:32], forced(halves[0], rkey=Old()))
            outer = client.post_write(mine[:32], RemoteMemory(*[
                getattr(halves[0], name) for name in ("address", "length", "rkey")
            ]))
            await outer
            for request in inner:
                await request
            assert await client.read_bytes(remote) == b"a" * 32 + b"b" * 32
        asyncio.run(connected(main))
        """,
    )


def test_a_chain_that_ends_while_it_collects() -> None:
    run_child(
        CONNECTED,
        """
        async def main(client, server, remote):
            mine = client.register(bytearray(64))
            chain = client.chain()
            chain.__enter__()
            chain.post_write(mine[:], remote)
            number = Number(remote.rkey, lambda: chain.__exit__(None, None, None))
            try:
                request = chain.post_write(mine[:], forced(remote, rkey=number))
            except ValueError as error:
                assert "over" in str(error)
                request = None
            with anyio.fail_after(30):
                for each in chain.requests:
                    await each
            assert mine._users == 0
        asyncio.run(connected(main))
        """,
    )
