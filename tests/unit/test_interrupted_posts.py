"""SIGINT at any moment of a post or a receive: the task ends, and nothing else does. No slot,
memory or request is lost, and the connection works on the same event loop."""

import pytest

from tests.unit.child import run_child

PREPARED = """
import asyncio, dataclasses, faulthandler, os, signal, sys, time, warnings
import anyio
import aiordma
from aiordma.testing import connected_pair, software_objects
from tests.internals import endpoint_of

warnings.simplefilter("ignore")
PACKAGE = os.path.dirname(aiordma.__file__) + os.sep
REMOTE = aiordma.Access.LOCAL_WRITE | aiordma.Access.REMOTE_WRITE | aiordma.Access.REMOTE_READ
REMOTE |= aiordma.Access.REMOTE_ATOMIC | aiordma.Access.MW_BIND
LONG = 1 << 17
KINDS = {"regions", "queues", "queue_pairs"}  # a bound window ends with its connection

def begin(name):
    global loop, run
    loop = {"asyncio": asyncio.new_event_loop, "polling": aiordma.new_event_loop}[name]()
    asyncio.set_event_loop(loop)
    run = loop.run_until_complete

def run_in_spite_of_interrupts(coroutine):
    task = loop.create_task(coroutine)
    while not task.done():
        try:
            run(task)
        except KeyboardInterrupt:
            pass
        except RuntimeError:  # the interrupt came as the task of another run had just ended
            if task.done():
                raise
    return task.result()

def attempt(operation, on_point):
    # Python handles signals at the begin of a function, and behind a call of one in C.
    def profile(frame, event, called):
        name, line, begin = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_firstlineno
        if name.startswith(PACKAGE):
            if event == "c_return" or (event == "call" and line == begin):
                on_point((name, line, event, getattr(called, "__name__", "")))
    task = loop.create_task(operation())
    sys.setprofile(profile)
    try:
        run(task)
    except (KeyboardInterrupt, asyncio.CancelledError):
        pass
    finally:
        sys.setprofile(None)
    task.cancel()
    run_in_spite_of_interrupts(asyncio.wait([task]))

def kernel_objects():
    return {kind: count for kind, count in software_objects().items() if kind in KINDS}

async def holds(condition, *where):
    with anyio.move_on_after(5):
        while not condition():
            await asyncio.sleep(0.001)
    assert condition(), (*where, kernel_objects())

async def nothing():
    pass

def walk(operation, all_given_back, settle=nothing):
    points = {}
    for _ in range(3):
        attempt(operation, points.setdefault)
        run(settle())
        run(holds(all_given_back, operation.__name__, "without interrupts"))
    before = kernel_objects()
    reached = 0
    for target in list(points):
        sent = []
        def on_point(point):
            if point == target and not sent:
                sent.append(point)
                signal.raise_signal(signal.SIGINT)
        for _ in range(4):  # which points a run passes depends on the machine's load
            faulthandler.dump_traceback_later(60, exit=True)
            attempt(operation, on_point)
            run_in_spite_of_interrupts(settle())
            run_in_spite_of_interrupts(holds(all_given_back, operation.__name__, target))
            if sent:
                break
        reached += bool(sent)
        closed = lambda: kernel_objects() == before
        run_in_spite_of_interrupts(holds(closed, operation.__name__, target))
    print(operation.__name__, reached, "of", len(points))
    assert reached > len(points) / 4
"""

CONNECTION = """
async def use():
    await client.send(b"works")
    assert await server.receive() == b"works"

begin(LOOP)
pair = connected_pair(max_send_wr=2)
client, server = run(pair.__aenter__())
slots = endpoint_of(client).sends.slots
region = server.register(bytearray(LONG), REMOTE)
own = client.register(bytearray(LONG), REMOTE)
remote, data, kept = region.remote(), bytes(LONG), []

def all_given_back():
    for request in kept:
        if request.done():
            request.exception()
    return slots.free == slots.total and all(request.done() for request in kept)

def keep(request):
    kept[:] = [request]
    return request

async def write():
    await client.write(data, remote)

async def post_write():
    await keep(client.post_write(data, remote))

async def wait_for_slots():
    await asyncio.gather(*(client.write(own[:8], remote[:8]) for _ in range(5)))

async def fetch_add():
    await asyncio.gather(*(client.fetch_add(remote[:8], 1) for _ in range(4)))

async def bind_and_revoke():
    await client.revoke(await client.bind(own[:64], aiordma.Access.REMOTE_READ))

async def revoke_with_full_queue():
    window = await client.bind(own[:64], aiordma.Access.REMOTE_READ)
    writes = [client.write(own[:8], remote[:8]) for _ in range(2)]
    await asyncio.gather(*writes, client.revoke(window))

async def chain():
    with client.chain() as chain:
        kept[:] = [chain.post_write(own[:8], remote[:8])]
        keep_both = [*kept, chain.post_write(data, remote)]
        kept[:] = keep_both
    await kept[-1]

async def plain_chain():
    with client.chain(signal_last_only=True) as chain:
        kept[:] = [chain.post_write(own[:8], remote[:8])]
    await kept[-1]

for operation in (
    write, post_write, wait_for_slots, fetch_add, bind_and_revoke, revoke_with_full_queue, chain,
    plain_chain,
):
    walk(operation, all_given_back)
    run(use())
run(pair.__aexit__(None, None, None))
"""

RECEIVES = """
async def use():
    await client.send(b"works")
    assert await server.receive() == b"works"

begin(LOOP)
pair = connected_pair()
client, server = run(pair.__aenter__())

async def receive():
    with anyio.move_on_after(0.001):
        await server.receive()

async def receive_view():
    with anyio.move_on_after(0.001):
        async with server.receive_view():
            pass

async def receive_message():
    with anyio.move_on_after(0.001):
        await server.receive_message()

for operation in (receive, receive_view, receive_message):
    walk(operation, lambda: not server._messages.queue.busy)
    run(use())
run(pair.__aexit__(None, None, None))

pair = connected_pair(receive_buffers=0, max_recv_wr=2)
client, server = run(pair.__aenter__())
slots = endpoint_of(server).receives.slots

async def post_recv():
    server.post_recv(bytearray(LONG))

async def fill():
    with anyio.move_on_after(5):
        for _ in range(slots.total - slots.free):
            await client.send(b"message")

walk(post_recv, lambda: slots.free == slots.total, fill)
run(pair.__aexit__(None, None, None))
"""

DATAGRAMS = """
begin(LOOP)
async def open_both():
    options = {"device": "software", "max_send_wr": 1}
    one = await aiordma.open_datagram("127.0.0.1", **options)
    other = await aiordma.open_datagram("127.0.0.1", **options)
    return one, other, await one.resolve("127.0.0.1", other.port)

one, other, peer = run(open_both())
slots = one._endpoint.sends.slots

async def send():
    unknown = [dataclasses.replace(peer) for _ in range(3)]  # to the port, which posts to others
    await asyncio.gather(*(one.send(b"hello", each) for each in unknown))

walk(send, lambda: slots.free == slots.total)

async def use():
    while True:
        await one.send(b"works", peer)
        if (await other.receive()).data == b"works":
            return

run(use())
run(one.aclose())
run(other.aclose())
"""

POOLED = """
async def accepted(client, listener):
    async with asyncio.TaskGroup() as group:
        connecting = group.create_task(client(listener))
        accepting = group.create_task(listener.accept())
    return connecting.result(), accepting.result()

begin(LOOP)
COUNT = 4
async def open_pair():
    listener = await aiordma.listen("127.0.0.1", 0, device="software", **OPTIONS)
    pair = await accepted(lambda it: aiordma.connect("127.0.0.1", it.port), listener)
    return *pair, listener

client, server, listener = run(open_pair())
receives, queue = server._messages.receives, server._messages.queue
slots = endpoint_of(client).sends.slots

async def fill():
    # As many as there are blocks, so that all of them come around.
    for _ in range(COUNT):
        await client.send(b"message")

async def settle():
    # Of a send that was interrupted, the message comes later.
    while queue.arrived or slots.free < slots.total:
        with anyio.move_on_after(0.001):
            await server.receive()

def all_given_back():
    return receives.posted + receives.unposted + queue.arrived == COUNT and not queue.busy

async def receive_all():
    await fill()
    for _ in range(COUNT):
        await server.receive()

async def receive_views():
    await fill()
    for _ in range(COUNT):
        async with server.receive_view():
            pass

async def receive_messages():
    await fill()
    for _ in range(COUNT):
        await server.receive_message()

for operation in (receive_all, receive_views, receive_messages):
    walk(operation, all_given_back, settle)
for each in (client, server, listener):
    run(each.aclose())
"""

ENGINES = pytest.mark.parametrize("engine", ["c", "python"])
LOOPS = pytest.mark.parametrize("loop", ["asyncio", "polling"])


@ENGINES
@LOOPS
def test_interrupt_at_any_moment_of_a_post_loses_nothing(engine: str, loop: str) -> None:
    run_child(PREPARED, f"LOOP = {loop!r}\n", CONNECTION, AIORDMA_BACKEND=engine)


@ENGINES
@LOOPS
def test_interrupt_at_any_moment_of_a_receive_loses_nothing(engine: str, loop: str) -> None:
    run_child(PREPARED, f"LOOP = {loop!r}\n", RECEIVES, AIORDMA_BACKEND=engine)


@ENGINES
def test_interrupt_at_any_moment_of_a_datagram_loses_nothing(engine: str) -> None:
    run_child(PREPARED, "LOOP = 'asyncio'\n", DATAGRAMS, AIORDMA_BACKEND=engine)


@ENGINES
@pytest.mark.parametrize("options", ["receive_buffers=4", "shared_receive=4"])
def test_interrupt_at_any_moment_of_a_receive_loses_no_block(engine: str, options: str) -> None:
    text = f"LOOP, OPTIONS = 'asyncio', dict({options})\n"
    run_child(PREPARED, text, POOLED, AIORDMA_BACKEND=engine)
