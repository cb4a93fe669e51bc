"""A close of what the driver has refused to destroy: it repeats all that is left, and nothing else
is kept or waits because of it."""

import asyncio
import threading
from typing import Any

import anyio
import pytest

import aiordma
from aiordma import EventLoopError, FlushedError, VerbsCallError
from aiordma._base.provider import software
from aiordma._endpoint.outliving import Outliving
from aiordma._loop.event_loop import current_event_loop
from aiordma.testing import Faults, software_objects
from tests.internals import endpoint_of
from tests.unit.child import run_child
from tests.unit.test_refused_destroy import (
    OPTIONS,
    PATIENCE,
    connected,
    never_flush,
    objects,
    refusing,
    reserved,
)

pytestmark = [pytest.mark.anyio, pytest.mark.natively]


async def refused(*users: Any) -> None:
    """Close these, of which the driver refuses to destroy something."""
    for user in users:
        with pytest.raises((VerbsCallError, aiordma.BusyError)):
            await user.aclose()


# -- the domain and the device ------------------------------------------------------------------


async def test_domain_of_a_refused_socket_can_be_closed_again() -> None:
    async with refusing("destroy_qp") as (fault,):
        home = await aiordma.open_domain("127.0.0.1", device="software")
        other = await aiordma.open_datagram("127.0.0.1", 0, device="software")
        socket = await aiordma.open_datagram("127.0.0.1", 0, device="software", domain=home)
        peer = await socket.resolve("127.0.0.1", other.port)
        with Faults() as faults:
            faults.delay_completions(30.0)
            never_flush(socket)
            send = socket.post_ud_send(b"x", peer)
            await refused(socket)
        with pytest.raises(FlushedError, match="refused to destroy"):
            await send
        for _ in range(2):
            await refused(home)
            assert software_objects()["address_handles"] == 1  # the send may still use it
        fault.end()
        await home.aclose()
        assert software_objects()["address_handles"] == 0
        await socket.aclose()
        await other.aclose()


async def test_device_of_a_refused_socket_is_closed_by_the_last_user() -> None:
    async with refusing("destroy_qp") as (fault,):
        other = await aiordma.open_datagram("127.0.0.1", 0, device="software")
        socket = await aiordma.open_datagram("127.0.0.1", 0, device="software")
        peer = await socket.resolve("127.0.0.1", other.port)
        with Faults() as faults:
            faults.delay_completions(30.0)
            never_flush(socket)
            send = socket.post_ud_send(b"x", peer)
            await refused(socket)
        assert isinstance(send.exception(), FlushedError)
        fault.end()
        await other.aclose()
        assert endpoint_of(socket).reactor.ended
        assert software_objects()["queue_pairs"] == 0


def refuse_first_region(patch: pytest.MonkeyPatch) -> None:
    """The device refuses to deregister the region that it is asked for first, also later."""
    provider: Any = software()
    deregister, refused = provider.dereg_mr, set[Any]()

    def deregister_others(pointer: Any) -> int:
        refused.update([] if refused else [pointer])
        return 16 if pointer in refused else int(deregister(pointer))

    patch.setattr(provider, "dereg_mr", deregister_others)


async def test_refused_memory_keeps_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        refusing("destroy_qp") as (fault,),
        aiordma.listen("127.0.0.1", 0, receive_buffers=0, **OPTIONS) as listener,
    ):
        client, server = await connected(listener)
        memory = [bytearray(100_000) for _ in range(4)]
        requests = [client.post_send(each) for each in memory]
        entries = reserved(client)
        await refused(client)
        for request in requests:
            assert isinstance(request.exception(), FlushedError)
        fault.end()
        with monkeypatch.context() as patch:
            refuse_first_region(patch)
            with pytest.raises(VerbsCallError, match=r"ibv_dereg_mr: .*call aclose\(\) again"):
                await client.aclose()
        locked = 0
        for each in memory:
            try:
                each.append(0)
            except BufferError:
                locked += 1
        assert locked == 1
        assert reserved(client) < entries
        assert not endpoint_of(client).outliving.is_left
        await server.aclose()
        await client.aclose()
        for each in memory:
            each.append(0)


async def test_close_repeats_what_the_end_of_the_device_could_not_destroy() -> None:
    async with refusing("destroy_qp") as (fault,):
        listener = await aiordma.listen("127.0.0.1", 0, receive_buffers=0, **OPTIONS)
        client, server = await connected(listener)
        requests = [client.post_send(bytes(size)) for size in (1000, 5000, 60_000)]
        await listener.aclose()
        await refused(client, server)
        for request in requests:
            assert isinstance(request.exception(), FlushedError)
        fault.end()
        with Faults() as faults:
            struck = faults.refuse_call("dereg_mr", 16, times=1)
            await client.aclose()
            assert struck.struck == 1
        await server.aclose()


# -- what a later close repeats ------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["own", "each", "shared"])
async def test_close_destroys_all_that_is_left(kind: str) -> None:
    async with (
        refusing("destroy_qp") as (fault,),
        aiordma.listen("127.0.0.1", 0, receive_buffers=0, **OPTIONS) as listener,
    ):
        home: Any = None
        kept = await connected(listener)  # which keep the device open
        before = objects()
        if kind == "own":
            home = await aiordma.open_domain("127.0.0.1", device="software")
            client, server = await connected(listener, domain=home)
        elif kind == "shared":
            home = await aiordma.open_shared_receive("127.0.0.1", device="software", depth=8)
            client, server = await connected(listener, shared_receive=home)
        else:
            client, server = await connected(listener, domain="each")
        await refused(client)
        if home is not None:
            await refused(home)
        private = endpoint_of(client).domain_state if kind == "each" else None
        if private is not None:
            await private.life.closed.wait()  # refused as well, in the background
        fault.end()
        if home is not None:
            await home.aclose()  # which destroys the client's queue pair, or does not
        await client.aclose()
        assert endpoint_of(client).identifier.closed
        await server.aclose()
        with anyio.fail_after(PATIENCE):
            while objects() != before:  # the domain of "each" closes in the background
                await anyio.sleep(0.001)
        for each in kept:
            await each.aclose()


async def test_each_of_two_closes_raises_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    provider: Any = software()
    destroy, slow = provider.destroy_qp, threading.Event()
    async with aiordma.listen("127.0.0.1", 0, receive_buffers=0, **OPTIONS) as listener:
        client, server = await connected(listener)
        region = client.register(bytearray(9))
        request = client.post_send(region[:])
        answers = 0

        def refuse(_pointer: Any) -> int:
            nonlocal answers
            answers += 1
            if slow.is_set() and answers > 1:
                begun.set()
                assert going.wait(PATIENCE)
            return 16

        begun, going = threading.Event(), threading.Event()
        monkeypatch.setattr(provider, "destroy_qp", refuse)
        await refused(client)
        answers = 0
        slow.set()
        async with anyio.create_task_group() as group:
            group.start_soon(refused, client)
            group.start_soon(refused, client)
            await anyio.to_thread.run_sync(begun.wait, PATIENCE)  # one was refused, one is asking
            going.set()
        assert isinstance(request.exception(), FlushedError)
        assert not region.closed
        monkeypatch.setattr(provider, "destroy_qp", destroy)
        await client.aclose()
        await server.aclose()


@pytest.mark.parametrize("kind", ["connection", "shared receive queue", "domain", "datagram"])
async def test_repeated_close_elsewhere_is_refused_before_it_begins(kind: str) -> None:
    async with refusing("destroy_qp", "destroy_srq", "dealloc_pd") as faults:
        listener = await aiordma.listen("127.0.0.1", 0, receive_buffers=0, **OPTIONS)
        client, server = await connected(listener)
        user: Any = client
        if kind == "shared receive queue":
            user = await aiordma.open_shared_receive("127.0.0.1", device="software", depth=8)
        elif kind == "domain":
            user = await aiordma.open_domain("127.0.0.1", device="software")
        elif kind == "datagram":
            user = await aiordma.open_datagram("127.0.0.1", 0, device="software")
        await refused(user)
        for fault in faults:
            fault.end()
        before = objects()
        reactor = endpoint_of(client).reactor
        users = reactor.users

        def elsewhere() -> None:
            with pytest.raises(EventLoopError, match="it is as it was"):
                asyncio.run(user.aclose())

        await anyio.to_thread.run_sync(elsewhere)
        assert (objects(), reactor.users, len(reactor._unwanted)) == (before, users, 0)
        await user.aclose()
        if user is not client:
            await client.aclose()
        await server.aclose()
        await listener.aclose()


@pytest.mark.parametrize("kind", ["connection", "datagram"])
def test_close_can_be_repeated_after_the_loop(kind: str) -> None:
    printed = run_child(
        f"""
        import asyncio, errno, logging
        import aiordma
        from aiordma.testing import Faults
        from tests.connections import connect_to
        from tests.unit.test_refused_destroy import OPTIONS, never_flush, objects

        async def main():
            listener = await aiordma.listen("127.0.0.1", 0, receive_buffers=0, **OPTIONS)
            client, server = await connect_to(listener, "127.0.0.1", **OPTIONS)
            if "{kind}" == "datagram":
                user = await aiordma.open_datagram("127.0.0.1", 0, device="software")
            else:
                user = client
            faults.refuse_call("destroy_qp", errno.EBUSY, times=0)
            never_flush(user)
            for each in {{listener, client, server, user}}:
                try:
                    await each.aclose()
                except aiordma.VerbsCallError:
                    users.append(each)
            assert user in users

        logging.disable(logging.CRITICAL)
        before, users = objects(), []
        with Faults() as faults:
            asyncio.run(main())
            for each in users:
                try:
                    asyncio.run(each.aclose())
                except aiordma.VerbsCallError:
                    print("refused")
        for each in users:
            asyncio.run(each.aclose())
        print(objects() == before)
        """
    )
    assert printed == "refused\nrefused\n" + "refused\n" * (kind == "datagram") + "True\n"


# -- no memory -----------------------------------------------------------------------------------


class Raw:
    """An object of the device, for which there is no memory to note who waits for its end."""

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1

    @property
    def _on_destroyed(self) -> Any:
        return None

    @_on_destroyed.setter
    def _on_destroyed(self, value: Any) -> None:
        raise MemoryError


async def test_object_that_could_not_be_watched_is_destroyed_at_once() -> None:
    nothing: Any = None
    outliving, raw = Outliving(current_event_loop(), nothing, None, nothing), Raw()
    watched: Any = raw
    with pytest.raises(MemoryError):
        outliving.watch(watched)
    outliving.attempt()
    assert (raw.closed, outliving.exists) == (1, False)
    outliving.check()


SWEEP = """
import asyncio, faulthandler, errno, logging
import _testcapi
import aiordma
import aiordma._loop.ending
from aiordma.testing import Faults, software_objects
from aiordma.verbs.memory import OUTLIVING
from tests.connections import connect_to
from tests.internals import endpoint_of, hub_of
from tests.unit.failing_allocation import is_still_to_come
from tests.unit.test_refused_destroy import OPTIONS, never_flush

faulthandler.dump_traceback_later(100, exit=True)  # what hangs fails, and says where
logging.disable(logging.CRITICAL)
aiordma._loop.ending.RETRY_SECONDS = 0.001

async def attempt(listener, step, number):
    client, server = await connect_to(listener, "127.0.0.1", receive_buffers=0, **OPTIONS)
    never_flush(client)
    big = bytearray(100_000)
    region = client.register(bytearray(9))
    requests = [client.post_send(each) for each in (region[:], bytes(1000), big)]
    for request in requests:
        request.add_done_callback(aiordma.WorkRequest.exception)
    outliving = endpoint_of(client).outliving
    function, calls = getattr(outliving, step), []

    def without(*arguments):
        calls.append(False)
        if len(calls) > 1:
            return function(*arguments)
        _testcapi.set_nomemory(number, number + 1)
        try:
            function(*arguments)
            calls[0] = is_still_to_come()
        finally:
            _testcapi.remove_mem_hooks()

    with Faults() as faults:
        fault = faults.refuse_call("destroy_qp", errno.EBUSY, times=0)
        if step == "fail":
            outliving.fail = without
        try:
            await client.aclose()
        except aiordma.VerbsCallError:
            pass
        fault.end()
    if step != "fail":
        setattr(outliving, step, without)
    await client.aclose()
    await client.aclose()
    assert calls and all(request.done() for request in requests), number
    assert not outliving.is_left and outliving not in OUTLIVING, number
    request = None
    requests.clear()
    big.append(0)
    await server.aclose()
    return calls[0]

async def main(step):
    listener = await aiordma.listen("127.0.0.1", 0, receive_buffers=0, **OPTIONS)
    keep = await connect_to(listener, "127.0.0.1", **OPTIONS)
    slabs = lambda: [slab.region._users for slab in hub_of(keep[0]).pool._slabs][:1]
    before = slabs()
    for number in range(400):
        is_over = await attempt(listener, step, number)
        assert slabs() == before, number
        if is_over:
            break
    for each in (*keep, listener):
        await each.aclose()
    print("over" if is_over else "not over", software_objects()["regions"], number > 3)
"""


@pytest.mark.parametrize("engine", ["c", "python"])
@pytest.mark.parametrize("step", ["fail", "_release"])
def test_kept_memory_is_released_once_without_memory(step: str, engine: str) -> None:
    pytest.importorskip("_testcapi")
    printed = run_child(SWEEP, f'asyncio.run(main("{step}"))', AIORDMA_BACKEND=engine)
    assert printed == "over 0 True\n"
