"""Completions and messages that find no memory when they are delivered: each request ends, and no
message and no receive is lost.

One allocation fails at a time, each in turn, until there is none left to fail."""

import pytest

from tests.unit.child import run_child

pytest.importorskip("_testcapi")

COMMON = """
import asyncio, faulthandler, logging, time
import _testcapi
import aiordma
from aiordma import Access
from aiordma.testing import connected_pair
from tests.internals import free_sends, hub_of
from tests.unit.failing_allocation import is_still_to_come

faulthandler.dump_traceback_later(120, exit=True)  # what hangs fails, and says where
logging.disable(logging.CRITICAL)  # what is logged here is that there was no memory

BOUND = 10  # seconds
LAST = 400

"""


@pytest.mark.natively
@pytest.mark.parametrize("engine", ["c", "python"])
@pytest.mark.parametrize("kind", ["write", "send"])
def test_completion_without_memory_is_not_lost(kind: str, engine: str) -> None:
    printed = run_child(
        COMMON,
        f"""
        async def attempt(number):
            async with connected_pair(max_send_wr=8, receive_buffers=4) as (client, server):
                remote = server.register(bytearray(64), Access.REMOTE_WRITE).remote()
                local = client.register(bytearray(64))
                slots, called = free_sends(client), [False]

                def call(_request):
                    called[0] = True

                if {kind!r} == "write":
                    request = client.post_write(local[:], remote)
                else:
                    request = client.post_send(b"x" * 20)
                request.add_done_callback(call)
                waiter = asyncio.ensure_future(request)
                await asyncio.sleep(0)
                time.sleep(0.005)  # the device completes it, and the loop does not run
                is_over = False
                _testcapi.set_nomemory(number, number + 1)
                try:
                    hub_of(client).drain()
                    is_over = is_still_to_come()
                except (MemoryError, SystemError):
                    pass
                finally:
                    _testcapi.remove_mem_hooks()
                async with asyncio.timeout(BOUND):
                    await waiter
                    while free_sends(client) != slots or not called[0]:
                        await asyncio.sleep(0.001)
                assert not local._users, number
                return is_over

        async def sweep():
            for number in range(LAST):
                if await attempt(number):
                    return "over"

        print(asyncio.run(sweep()))
        """,
        AIORDMA_BACKEND=engine,
    )
    assert printed == "over\n"


@pytest.mark.natively
@pytest.mark.parametrize("engine", ["c", "python"])
@pytest.mark.parametrize("call", ["take_data", "take_message"])
def test_message_without_memory_is_kept(call: str, engine: str) -> None:
    printed = run_child(
        COMMON,
        f"""
        from aiordma import Message

        ARGUMENTS = {{"take_data": (), "take_message": (Message,)}}[{call!r}]

        async def attempt(number):
            async with connected_pair(receive_buffers=2) as (client, server):
                for text in (b"one", b"two"):
                    await client.send(text * 300)
                queue = server._messages.queue
                async with asyncio.timeout(BOUND):
                    while queue.arrived < 2:
                        await asyncio.sleep(0.001)
                is_over, is_taken, taken = False, False, None
                _testcapi.set_nomemory(number, number + 1)
                try:
                    taken = queue.{call}(*ARGUMENTS)
                    is_taken = True
                    is_over = is_still_to_come()
                except (MemoryError, SystemError):
                    pass
                finally:
                    _testcapi.remove_mem_hooks()
                receives = server._messages.receives
                if server.cause is not None:  # the receive could not be posted: this is an error
                    return is_over
                assert queue.arrived == 2 - is_taken, (number, taken)
                assert receives.posted + receives.unposted + queue.arrived == 2, number
                got = [bytes(await server.receive()) for _ in range(queue.arrived)]
                if is_taken:
                    got.insert(0, bytes(getattr(taken, "data", taken)))
                assert got == [b"one" * 300, b"two" * 300], number
                return is_over

        async def sweep():
            for number in range(LAST):
                if await attempt(number):
                    return "over"

        print(asyncio.run(sweep()))
        """,
        AIORDMA_BACKEND=engine,
    )
    assert printed == "over\n"


@pytest.mark.natively
@pytest.mark.parametrize("engine", ["c", "python"])
def test_datagram_without_memory_is_kept(engine: str) -> None:
    printed = run_child(
        COMMON,
        """
        async def attempt(number):
            options = {"device": "software", "receive_buffers": 2}
            async with (
                aiordma.open_datagram("127.0.0.1", 0, **options) as client,
                aiordma.open_datagram("127.0.0.1", 0, **options) as server,
            ):
                peer = await client.resolve("127.0.0.1", server.port)
                for text in (b"one", b"two"):
                    await client.send(text * 300, peer)
                queue, receives = server._queue, server._received.receives
                async with asyncio.timeout(BOUND):
                    while queue.arrived < 2:
                        await asyncio.sleep(0.001)
                is_over, is_taken, taken = False, False, None
                _testcapi.set_nomemory(number, number + 1)
                try:
                    taken = queue.take_datagram(server._endpoint.senders)
                    is_taken = True
                    is_over = is_still_to_come()
                except (MemoryError, SystemError):
                    pass
                finally:
                    _testcapi.remove_mem_hooks()
                if server._endpoint.cause is not None:  # the receive could not be posted
                    return is_over
                assert queue.arrived == 2 - is_taken, (number, taken)
                assert receives.posted + receives.unposted + queue.arrived == 2, number
                got = [(await server.receive()).data for _ in range(queue.arrived)]
                if is_taken:
                    got.insert(0, taken.data)
                assert got == [b"one" * 300, b"two" * 300], number
                return is_over

        async def sweep():
            for number in range(LAST):
                if await attempt(number):
                    return "over"

        print(asyncio.run(sweep()))
        """,
        AIORDMA_BACKEND=engine,
    )
    assert printed == "over\n"


@pytest.mark.natively
def test_connection_event_without_memory_is_not_lost() -> None:
    printed = run_child(
        COMMON,
        """
        import select
        from aiordma import CmEventType, EventChannel, Identifier
        from aiordma._base.provider import software

        def attempt(number):
            with EventChannel(software()) as channel, Identifier(channel) as identifier:
                identifier.resolve_address("127.0.0.1", 7471, None, 2000)
                assert select.select([channel.fd], [], [], BOUND)[0]
                events, first, is_over = channel.events(), None, False
                _testcapi.set_nomemory(number, number + 1)
                try:
                    first = next(events)
                    is_over = is_still_to_come()
                except (MemoryError, SystemError):
                    pass
                finally:
                    _testcapi.remove_mem_hooks()
                taken = [event.type for event in (first, *channel.events()) if event]
                assert taken == [CmEventType.ADDR_RESOLVED], number
                return is_over

        print(next("over" for number in range(LAST) if attempt(number)))
        """,
    )
    assert printed == "over\n"
