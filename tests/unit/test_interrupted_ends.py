"""An interrupt while completions are delivered, and then a failure in the same batch: the
connection ends nevertheless, with all its requests and waits. No callback gets the interrupt of
another one."""

import pytest

from tests.unit.child import run_child

ENGINES = pytest.mark.parametrize("engine", ["c", "python"])
LOOPS = pytest.mark.parametrize("loop", ["asyncio", "polling"])

PREPARED = """
import asyncio, faulthandler, signal, sys, time
import aiordma
from aiordma import RemoteMemory
from aiordma.testing import connected_pair

faulthandler.dump_traceback_later(60, exit=True)  # what hangs fails, and says where
loop = {"asyncio": asyncio.new_event_loop, "polling": aiordma.new_event_loop}[LOOP]()
asyncio.set_event_loop(loop)
run = loop.run_until_complete
NOWHERE = RemoteMemory(4096, 64, 0x1234)

async def outcome(awaitable):
    try:
        await awaitable
    except aiordma.RdmaError as error:
        return type(error).__name__
    return "done"

def interrupted(coroutine):
    try:
        run(coroutine)
    except (KeyboardInterrupt, SystemExit) as error:
        return type(error).__name__
    return "no interrupt"

async def rest(tasks):
    async with asyncio.timeout(10):
        return {await task for task in tasks}

def delivered():
    # The device has completed what was posted, and the event loop has not looked.
    time.sleep(0.3)
"""

RAISED = """
async def post():
    global waiting, failed
    waiting = [loop.create_task(outcome(client.send(b"waits"))) for _ in range(4)]
    def callback(_):
        raise INTERRUPT("of a callback")
    client.post_send(b"first").add_done_callback(callback)
    failed = client.post_write(bytes(64), NOWHERE)
    delivered()
    await asyncio.sleep(10)
"""

SIGNALLED = """
async def post():
    global waiting, failed
    await client.send(b"takes the only receive")
    client.post_send(b"first")
    failed = client.post_write(bytes(64), NOWHERE)
    waiting = [loop.create_task(outcome(client.send(b"waits"))) for _ in range(4)]
    await asyncio.sleep(0.05)  # they wait for slots, and the first message for the receive
    await server.receive()
    sent = []
    def trace(frame, event, argument):
        if frame.f_code.co_name == "grant" and not sent:
            sent.append(1)
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
    sys.settrace(trace)
    delivered()
    await asyncio.sleep(10)
"""

ENDS = """
pair = connected_pair(max_send_wr=2, receive_buffers=1)
client, server = run(pair.__aenter__())
assert interrupted(post()) == KIND
print(run(rest(waiting)), run(outcome(failed)))
run(asyncio.wait_for(client.aclose(), 10))
run(asyncio.wait_for(pair.__aexit__(None, None, None), 10))
print("closed")
"""


def ends(post: str, engine: str, loop: str, kind: str) -> None:
    lines = run_child(
        f"LOOP, KIND, INTERRUPT = {loop!r}, {kind!r}, {kind}\n",
        PREPARED,
        post,
        ENDS,
        AIORDMA_BACKEND=engine,
    ).splitlines()
    assert lines == ["{'RemoteAccessError'} RemoteAccessError", "closed"]


@ENGINES
@LOOPS
@pytest.mark.parametrize("kind", ["KeyboardInterrupt", "SystemExit"])
def test_failure_behind_an_interrupted_callback_ends_the_connection(
    engine: str, loop: str, kind: str
) -> None:
    ends(RAISED, engine, loop, kind)


@ENGINES
@LOOPS
def test_failure_behind_a_signal_ends_the_connection(engine: str, loop: str) -> None:
    ends(SIGNALLED, engine, loop, "KeyboardInterrupt")


@ENGINES
@LOOPS
def test_callback_behind_an_interrupted_one_can_post(engine: str, loop: str) -> None:
    printed = run_child(
        f"LOOP = {loop!r}\n",
        PREPARED,
        """
        pair = connected_pair()
        client, server = run(pair.__aenter__())

        async def post():
            def interrupt(_):
                raise KeyboardInterrupt("of the first callback")
            def posts(_):
                global posted
                posted = client.post_send(b"posted by the second")
            client.post_send(b"first").add_done_callback(interrupt)
            client.post_send(b"second").add_done_callback(posts)
            delivered()
            await asyncio.sleep(10)

        async def receive():
            async with asyncio.timeout(30):
                await posted
                return [await server.receive() for _ in range(3)]

        print(interrupted(post()), run(receive()))
        run(pair.__aexit__(None, None, None))
        """,
        AIORDMA_BACKEND=engine,
    )
    assert printed == "KeyboardInterrupt [b'first', b'second', b'posted by the second']\n"


@ENGINES
@pytest.mark.parametrize("end", ["DISCONNECTED", "DEVICE_REMOVAL", "QP_FATAL"])
def test_end_behind_an_interrupted_callback_ends_the_connection(engine: str, end: str) -> None:
    """The event that ends the connection delivers the completions first."""
    printed = run_child(
        f"LOOP, END = 'asyncio', {end!r}\n",
        PREPARED,
        """
        from aiordma._base.enums import AsyncEventType, CmEventType
        from aiordma.verbs import AsyncEvent
        from aiordma.verbs.event_channel import Event
        from tests.internals import endpoint_of, hub_of, queue_pair_of

        pair = connected_pair()
        client, server = run(pair.__aenter__())

        def interrupt(_):
            raise KeyboardInterrupt("of a callback")

        async def ends():
            client.post_send(b"first").add_done_callback(interrupt)
            delivered()
            if END == "QP_FATAL":
                hub, key = hub_of(client), queue_pair_of(client).key
                report = hub.on_queue_pair_error[key]
                hub._report_queue_pair_error(
                    key, report, aiordma.DeviceEventError(AsyncEventType[END], "a queue pair")
                )
            else:
                event = Event(CmEventType[END], 0, 1, 0, b"", 0, 0, 0, 0, 0)
                endpoint_of(client).handle_event(event)

        print(interrupted(ends()), type(run(asyncio.wait_for(client.ended(), 10))).__name__)
        run(pair.__aexit__(None, None, None))
        """,
        AIORDMA_BACKEND=engine,
    )
    cause = {"DISCONNECTED": "Disconnected", "DEVICE_REMOVAL": "DeviceRemoved"}
    assert printed == f"KeyboardInterrupt {cause.get(end, 'DeviceEvent')}Error\n"


@ENGINES
def test_watchdog_behind_an_interrupted_callback_goes_on(engine: str) -> None:
    printed = run_child(
        "LOOP = 'asyncio'\n",
        PREPARED,
        """
        from tests.internals import drain_of, hub_of

        pair = connected_pair()
        client, server = run(pair.__aenter__())

        def interrupt(_):
            raise KeyboardInterrupt("of a callback")

        async def watches():
            client.post_send(b"first").add_done_callback(interrupt)
            delivered()
            hub_of(client)._watch()

        print(interrupted(watches()), drain_of(client).watched)
        run(pair.__aexit__(None, None, None))
        """,
        AIORDMA_BACKEND=engine,
    )
    assert printed == "KeyboardInterrupt True\n"
