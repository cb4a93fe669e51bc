"""SIGINT directly behind each call to the C library, before Python has taken its result: nothing
that the call made is lost, and the program ends without another error."""

import pytest

from tests.unit.child import RUN, run_child

PREPARED = """
import faulthandler, gc, select, signal, sys, time, warnings
import anyio
import aiordma
from aiordma import Access, _native, verbs
from aiordma._base.provider import Provider
from aiordma.testing import software_objects

warnings.simplefilter("ignore")
sys.unraisablehook = lambda _: None
calls, target = [], None
INTERRUPTED = {"KeyboardInterrupt", "CancelledError"}

def counted(slot, pointer):
    def call(*arguments):
        result = pointer(*arguments)
        calls.append(slot)
        if len(calls) - 1 == target:
            signal.raise_signal(signal.SIGINT)
        return result
    return call

def find(provider, slot):
    return counted(slot, getattr(provider.table, slot))

Provider.__getattr__ = find  # for each call, because nothing is kept

# The functions of the compiled library, too.
class Counting:
    def __getattr__(self, name):
        found = getattr(_native.lib, name)
        return counted(name, found) if callable(found) else found

for module in list(sys.modules.values()):
    if module.__name__.startswith("aiordma.") and getattr(module, "lib", None) is _native.lib:
        if module is not _native:
            module.lib = Counting()

def kinds(error):
    if error is None:
        return set()
    if isinstance(error, ConnectionError | anyio.EndOfStream):
        return {"connection"}  # one end is the first, and the other one hears of it
    parts = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    found = [kinds(each) for each in (error.__cause__, error.__context__, *parts)]
    return {type(error).__name__}.union(*found)

def attempt(program):
    calls.clear()
    try:
        program()
    except BaseException as error:
        return kinds(error)
    return set()

def all_given_back(before):
    for _ in range(200):
        if software_objects() == before:
            return True
        gc.collect()
        time.sleep(0.05)
    return False

def walk(program, allowed):
    global target
    for _ in range(2):  # the first time, further calls are made
        calls.clear()
        program()
    before, wanted = software_objects(), list(calls)
    for number in range(len(wanted)):
        faulthandler.dump_traceback_later(60, exit=True)
        target = number
        raised = attempt(program)
        target, made = None, calls[number:][:1]
        assert not made or INTERRUPTED & raised, (number, made, raised)
        assert raised <= INTERRUPTED | allowed, (number, made, raised)
        assert all_given_back(before), (number, made, software_objects())
    print(*sorted(set(wanted)))
"""

SESSION = """
OPTIONS = {"device": "software", "receive_buffers": 2, "max_send_wr": 4}
REMOTE = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ | Access.MW_BIND

ENDED = {"connection", "ExceptionGroup", "BaseExceptionGroup"}

async def serve(listener):
    async with listener.accept() as server:
        region = server.register(bytearray(1 << 16), REMOTE)
        async with server.grant(region, Access.REMOTE_READ | Access.REMOTE_WRITE) as grant:
            await server.send(grant.remote.pack())
            await server.receive()

async def ask(port, domain):
    async with aiordma.connect("127.0.0.1", port, domain=domain, **OPTIONS) as client:
        theirs = aiordma.RemoteMemory.unpack(await client.receive())
        await client.post_write(bytes(1 << 16), theirs)
        own = client.register(bytearray(1 << 16), REMOTE)
        await client.read(theirs, own)
        await client.revoke(await client.bind(own[:64], Access.REMOTE_READ))
        await client.send(b"end")

async def send_datagrams():
    async with (
        aiordma.open_datagram("127.0.0.1", device="software") as one,
        aiordma.open_datagram("127.0.0.1", device="software") as other,
    ):
        await one.send(b"hello", await one.resolve("127.0.0.1", other.port))
        await other.receive()
        group = await one.join("239.77.1.2")
        await group.leave()

async def session():
    await aiordma.devices()
    async with (
        aiordma.open_domain("127.0.0.1", device="software") as domain,
        aiordma.listen("127.0.0.1", 0, **OPTIONS) as listener,
        aiordma.open_shared_receive("127.0.0.1", device="software", buffers=4),
        anyio.create_task_group() as group,
    ):
        group.start_soon(serve, listener)
        await ask(listener.port, domain)
        await send_datagrams()
"""

VERBS = """
def objects():
    assert "software" in verbs.Device.names() and verbs.Device("software").guid
    with verbs.Device("software").open() as context:
        domain = context.alloc_pd()
        channel = verbs.CompletionChannel(context)
        queue = verbs.CompletionQueue(context, 8, channel)
        timed = verbs.CompletionQueue(context, 8, timestamps=True)
        shared = verbs.RawSharedReceiveQueue(domain, 4)
        pair = verbs.QueuePair.create(
            domain, queue, queue, capacity=verbs.Capacity(4, 4), shared_receive=shared,
            service=aiordma.QueuePairType.UD)
        pair.attach_multicast(bytes.fromhex("ff1e") + bytes(14))
        pair.detach_multicast(bytes.fromhex("ff1e") + bytes(14))
        pair.attach_multicast(bytes.fromhex("ff1e") + bytes(14))
        broken = verbs.QueuePair.create(domain, queue, queue)
        broken.modify(
            aiordma.QueuePairState.INIT, pkey_index=0, port=1, access=Access(0))
        broken.post_recv(1, [])
        queue.request_notification()
        broken.modify(aiordma.QueuePairState.ERR)
        assert select.select([channel.fd], [], [], 10)[0] and channel.events() == [queue]
        region = verbs.MemoryRegion(domain, bytearray(64))
        verbs.MemoryRegion(domain, bytearray(64)).close()
        handle = verbs.AddressHandle(domain, verbs.AddressVector(port=1, gid=context.query_gid()))
        window = verbs.MemoryWindow(domain)
        events = aiordma.EventChannel("software")
        with events:
            identifier = aiordma.Identifier(events)
            identifier.resolve_address("127.0.0.1", 1, None, 1000)
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop", "trio"])
def test_interrupt_behind_any_call_loses_nothing(loop: str) -> None:
    printed = run_child(
        RUN,
        PREPARED,
        SESSION,
        f"walk(lambda: run({loop!r}, session), ENDED)",
    )
    assert {"reg_mr", "cm_create_qp", "create_srq", "create_ah", "destroy_id"} <= set(
        printed.split()
    )


def test_interrupt_behind_any_call_of_the_verbs_loses_nothing() -> None:
    printed = run_child(RUN, PREPARED, VERBS, "walk(objects, set())")
    assert {"create_qp", "create_comp_channel", "attach_mcast", "open_device"} <= set(
        printed.split()
    )
