"""What a program sees, and what becomes of everything else, when the device misbehaves."""

import errno
import inspect
import os
import re
from collections.abc import Callable
from contextlib import suppress

import anyio
import pytest

import aiordma
from aiordma.streams import connect_stream, listen_stream
from aiordma.testing import Fault, Faults
from tests.device.players import OWN_RECEIVES, REMOTE, Outcome, both_ways, connected, until
from tests.devices import ADDRESS
from tests.internals import SOFTWARE, ffi, software

pytestmark = [pytest.mark.anyio, pytest.mark.natively]

ROUNDS = 50

# The calls that a loop's first use of the device makes, in their order.
HUB = ("alloc_pd", "create_comp_channel", "create_cq")
LISTENING = ("create_event_channel", "create_id", "bind_addr", "listen")
SHARING = ("create_event_channel", "create_id", "bind_addr", *HUB)
CONNECTING = (
    *("create_event_channel", "create_id", "resolve_addr", *HUB, "resolve_route"),
    *("cm_create_qp", "reg_mr", "connect"),
)


async def echo(one: aiordma.Connection, other: aiordma.Connection, rounds: int = ROUNDS) -> None:
    for number in range(rounds):
        await one.send(b"%d" % number)
        assert await other.receive() == b"%d" % number


async def test_a_refused_connect_is_rejected_and_the_next_one_works(faults: Faults) -> None:
    fault = faults.refuse_connection()
    async with await aiordma.listen(ADDRESS, 0) as listener:
        with pytest.raises(aiordma.RejectedError):
            await aiordma.connect(ADDRESS, listener.port)
    assert fault.struck == 1
    async with connected() as (client, server):
        await both_ways(client, server)


async def test_a_connect_that_takes_too_long_times_out(faults: Faults) -> None:
    faults.delay_connection(5)
    async with await aiordma.listen(ADDRESS, 0) as listener:
        with pytest.raises(aiordma.ConnectTimeoutError, match="accept"):
            await aiordma.connect(ADDRESS, listener.port, timeout=1)


async def test_a_late_connection_is_a_connection(faults: Faults) -> None:
    fault = faults.delay_connection(0.2)
    async with connected() as (client, server):
        assert fault.struck == 1
        await both_ways(client, server)


@pytest.mark.parametrize("size", [1000, 100_000, 3_000_000])
async def test_a_connection_that_breaks_ends_everything_on_it(faults: Faults, size: int) -> None:
    async with connected(client={"receive_buffers": 4}) as (client, server):
        local = server.register(bytearray(1 << 20), REMOTE)
        await server.send(local.remote().pack())
        remote = aiordma.RemoteMemory.unpack(await client.receive())
        fault = faults.drop_connection(after_bytes=size)
        buffer = client.register(bytearray(1 << 20))
        requests = [client.post_write(buffer, remote) for _ in range(8)]
        with pytest.raises((aiordma.FlushedError, aiordma.DisconnectedError)):
            await requests[-1]
        assert fault.struck == 1
        carried = sum(request.exception() is None for request in requests)
        assert carried <= size // (1 << 20) + 1
        await until(lambda: not server.is_connected)


async def test_a_connection_that_breaks_at_a_request_ends_those_in_flight(faults: Faults) -> None:
    async with connected() as (client, _):
        faults.drop_connection(after_requests=3)
        for number in range(3):
            await client.post_send(b"%d" % number)
        with pytest.raises(aiordma.FlushedError):
            await client.post_send(b"one too many")


async def test_a_dead_peer_ends_a_read_as_exhausted_retries(faults: Faults) -> None:
    async with connected() as (client, server):
        local = server.register(bytearray(64), REMOTE)
        await server.send(local.remote().pack())
        remote = aiordma.RemoteMemory.unpack(await client.receive())
        faults.silence_peer(0.1)
        with pytest.raises(aiordma.RetryExceededError):
            await client.read(client.register(bytearray(64)), remote)


async def test_completions_that_come_late_and_out_of_order_all_come(faults: Faults) -> None:
    async with connected() as (client, server), connected() as (other_client, other_server):
        fault = faults.delay_completions(0.001, spread=0.004, chance=0.5)
        async with anyio.create_task_group() as group:
            group.start_soon(echo, client, server)
            group.start_soon(echo, other_client, other_server)
        assert fault.struck > ROUNDS // 2


async def test_completions_of_one_queue_pair_keep_their_order(faults: Faults) -> None:
    async with connected() as (client, server):
        faults.delay_completions(0.001, spread=0.004, chance=0.3)
        for _ in range(5):
            requests = [client.post_send(b"%d" % number) for number in range(16)]
            for number in range(16):
                assert await server.receive() == b"%d" % number
            await requests[-1]
            assert all(request.done() for request in requests)


async def test_keepalive_takes_no_slot_of_a_stream(faults: Faults) -> None:
    """A stream counts on each of its slots while a probe is in flight, too."""
    accepted = Outcome()
    async with (
        listen_stream(ADDRESS, queue_depth=64) as listener,
        anyio.create_task_group() as group,
    ):
        group.start_soon(accepted.of, listener.accept)
        client = await connect_stream(ADDRESS, listener.port, queue_depth=16, keepalive=0.05)
    async with client, accepted.value as server:
        await client.send(b"x")
        fault = faults.delay_completions(0.3)
        await until(lambda: fault.struck > 0)  # the probe's
        for _ in range(40):
            await client.send(b"x")
        fault.end()
        received = b""
        while len(received) < 41:
            received += await server.receive()
        assert received == b"x" * 41


async def test_spurious_events_do_no_harm(faults: Faults) -> None:
    async with connected() as (client, server):
        faults.delay_completions(0.001)  # or they are found before there is an event of them
        fault = faults.spurious_events(chance=0.5)
        await echo(client, server)
        assert fault.struck > 0


async def test_merged_events_lose_no_completion(faults: Faults) -> None:
    async with connected() as (client, server):
        fault = faults.merge_events(0.003)
        await echo(client, server, 20)
        assert fault.struck > 0


async def test_a_refused_post_names_the_limit_and_loses_nothing(faults: Faults) -> None:
    async with connected(server=OWN_RECEIVES) as (client, server):
        receive = server.post_recv(bytearray(16))
        faults.refuse_post()
        with pytest.raises(aiordma.VerbsCallError) as refused:
            client.post_send(b"lost?")
        assert refused.value.errno == errno.ENOMEM
        await client.send(b"not lost")
        assert (await receive).byte_len == len(b"not lost")


@pytest.mark.parametrize("slot", ["cm_create_qp", "resolve_route"])
async def test_a_refused_call_ends_the_connect_and_leaves_nothing(
    faults: Faults, slot: str
) -> None:
    async with await aiordma.listen(ADDRESS, 0) as listener:
        fault = faults.refuse_call(slot)
        with pytest.raises((aiordma.VerbsCallError, aiordma.RdmaConnectionError)):
            await aiordma.connect(ADDRESS, listener.port)
        assert fault.struck == 1


@pytest.mark.parametrize("error", [errno.ENOMEM, errno.EMFILE])
@pytest.mark.parametrize("slot", CONNECTING)
async def test_refused_first_connect_is_a_connection_error(
    faults: Faults, slot: str, error: int
) -> None:
    fault = faults.refuse_call(slot, error)
    with pytest.raises(ConnectionError, match=os.strerror(error)):
        await aiordma.connect(ADDRESS, 1)
    assert fault.struck == 1
    with pytest.raises(aiordma.RejectedError):
        await aiordma.connect(ADDRESS, 1)


@pytest.mark.parametrize("slot", LISTENING)
async def test_refused_first_listen_leaves_nothing(faults: Faults, slot: str) -> None:
    fault = faults.refuse_call(slot)
    with pytest.raises(aiordma.VerbsCallError, match=os.strerror(errno.ENOMEM)):
        await aiordma.listen(ADDRESS, 0)
    assert fault.struck == 1
    async with await aiordma.listen(ADDRESS, 0) as listener:
        assert listener.port


@pytest.mark.parametrize("slot", [*SHARING, "create_srq", "reg_mr"])
async def test_refused_shared_receive_leaves_nothing(faults: Faults, slot: str) -> None:
    fault = faults.refuse_call(slot)
    with pytest.raises(aiordma.VerbsCallError, match=os.strerror(errno.ENOMEM)):
        await aiordma.open_shared_receive(ADDRESS, buffers=4)
    assert fault.struck == 1
    async with await aiordma.open_shared_receive(ADDRESS, buffers=4):
        pass


@pytest.mark.parametrize("slot", [*SHARING, "cm_create_qp", "reg_mr", "listen"])
async def test_refused_datagram_socket_leaves_nothing(faults: Faults, slot: str) -> None:
    fault = faults.refuse_call(slot)
    with pytest.raises(aiordma.VerbsCallError, match=os.strerror(errno.ENOMEM)):
        await aiordma.open_datagram(ADDRESS)
    assert fault.struck == 1
    async with await aiordma.open_datagram(ADDRESS):
        pass


@pytest.mark.parametrize(
    ("slot", "text"),
    [
        ("ibv_reg_mr", "no call of that name.*'reg_mr'"),
        ("rdma_connect", "no call of that name.*'connect'"),
        ("table", "no call of that name"),
        ("name", "no call of that name"),
        ("post_send", "refuse_post"),
        ("ibv_post_recv", "refuse_post"),
        ("query_port", "from C"),
        ("get_cm_event", "from C"),
        ("free_devices", "cannot report an error"),
        ("get_device_guid", "cannot report an error"),
    ],
)
async def test_call_that_cannot_be_refused_is_named(faults: Faults, slot: str, text: str) -> None:
    with pytest.raises(aiordma.NotSupportedError, match=text):
        faults.refuse_call(slot)
    async with connected() as (one, other):
        await echo(one, other, 1)


async def test_every_slot_is_refused_or_an_error(faults: Faults) -> None:
    refused = []
    for slot, _ in ffi.typeof("struct aiordma_provider").fields:
        with suppress(aiordma.NotSupportedError):
            faults.refuse_call(slot, times=0).end()
            refused.append(slot)
    assert {"reg_mr", "create_cq", "connect", "query_gid_table"} < set(refused)
    faults.refuse_call("query_gid_table")
    with aiordma.verbs.Device("software").open() as context:
        with pytest.raises(aiordma.VerbsCallError) as caught:
            context.gid_table()
        assert caught.value.errno == errno.ENOMEM


async def test_a_receiver_that_is_not_ready_holds_the_message_back(faults: Faults) -> None:
    async with connected() as (client, server):
        fault = faults.receiver_not_ready(0.1)
        await client.send(b"patience")
        assert await server.receive() == b"patience"
        assert fault.struck == 1


@pytest.mark.parametrize("size", [0, 1, 3, 64, 5000, 70_000, 1_000_000])
async def test_crc_connection_carries_every_size(faults: Faults, size: int) -> None:
    faults.want_crc()
    data = bytes(range(256)) * (size // 256 + 1)
    async with connected(server={"receive_size": max(size, 64)}) as (client, server):
        await client.send(data[:size])
        assert await server.receive() == data[:size]
        theirs = server.register(bytearray(max(size, 1)), REMOTE)
        await client.write(data[:size], theirs.remote()[:size])
        assert bytes(theirs.view[:size]) == data[:size]
        assert await client.read_bytes(theirs.remote()[:size]) == data[:size]


async def test_a_broken_frame_ends_the_connection_and_reaches_no_memory(faults: Faults) -> None:
    faults.want_crc()
    async with connected() as (client, server):
        theirs = server.register(bytearray(64), REMOTE)
        await both_ways(client, server)
        fault = faults.corrupt_frame()
        with pytest.raises(aiordma.WorkCompletionError):
            await client.write(b"x" * 64, theirs.remote())
        assert fault.struck == 1
        assert bytes(theirs.view) == bytes(64)
        await until(lambda: not server.is_connected)


async def test_a_fatal_event_of_the_device_ends_its_connections(faults: Faults) -> None:
    async with connected() as (client, _):
        faults.raise_event(aiordma.verbs.AsyncEventType.DEVICE_FATAL)
        with pytest.raises(aiordma.DeviceEventError):
            await client.receive()
    # It comes to the other built-in device, too, and would wait there for the next test.
    with anyio.move_on_after(0.5), suppress(aiordma.RdmaError):
        async with await aiordma.open_queue_pair(f"{SOFTWARE}_roce", gid_index=0) as other:
            await other.ended()


async def test_the_same_seed_strikes_the_same(faults: Faults) -> None:
    async def struck(seed: int) -> list[bool]:
        found = []
        async with connected(server={"receive_buffers": 64}) as (client, _):
            with Faults(seed) as seeded:
                seeded.refuse_post(chance=0.3, times=0)
                for _ in range(30):
                    try:
                        request = client.post_send(b"x")
                    except aiordma.VerbsCallError:
                        found.append(True)
                    else:
                        found.append(False)
                        await request
        return found

    first = await struck(5)
    assert first == await struck(5)
    assert True in first
    assert False in first
    assert first != await struck(6)


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_a_call_can_be_refused_by_two_faults(first_to_end: int) -> None:
    provider = software()
    device = provider.create_comp_channel
    with Faults() as faults:
        made = [
            faults.refuse_call("create_comp_channel", errno.ENOMEM, times=0),
            faults.refuse_call("create_comp_channel", errno.EMFILE, times=0),
        ]
        assert provider.create_comp_channel(ffi.NULL) == ffi.NULL
        assert ffi.errno == errno.EMFILE  # of the one that was made last
        made[first_to_end].end()
        assert provider.create_comp_channel(ffi.NULL) == ffi.NULL
        assert ffi.errno == [errno.EMFILE, errno.ENOMEM][first_to_end]
        made[1 - first_to_end].end()
        assert provider.create_comp_channel == device


WRONG: dict[str, tuple[Callable[[Faults], object], type[Exception], str]] = {
    "type": (lambda f: f.refuse_connection(times="a"), TypeError, "times='a' (str)"),  # type: ignore[arg-type]
    "after": (lambda f: f.refuse_connection(after=-1), ValueError, "after=-1 is not in 0.."),
    "times": (lambda f: f.corrupt_frame(times=1 << 32), ValueError, "times=4294967296 is not in"),
    "seconds": (lambda f: f.silence_peer(-1), ValueError, "seconds=-1 is not in 0.."),
    "nan": (lambda f: f.delay_connection(float("nan")), ValueError, "seconds=nan"),
    "long": (lambda f: f.receiver_not_ready(1e30), ValueError, "seconds=1e+30 is not in"),
    "spread": (lambda f: f.delay_completions(0, spread=-1), ValueError, "spread=-1 is not in"),
    "chance": (lambda f: f.merge_events(1, chance=0), ValueError, "chance=0 is not in (0, 1]"),
    "no chance": (lambda f: f.spurious_events(chance="1"), TypeError, "chance='1' (str)"),  # type: ignore[arg-type]
    "bytes": (lambda f: f.drop_connection(after_bytes=-1), ValueError, "after_bytes=-1 is not"),
    "requests": (lambda f: f.drop_connection(after_requests=-1), ValueError, "after_requests=-1"),
    "error": (lambda f: f.refuse_post(0), ValueError, "error=0 is not in 1.."),
    "slot": (lambda f: f.refuse_call(5), TypeError, "slot=5 (int)"),  # type: ignore[arg-type]
    "call after": (lambda f: f.refuse_call("connect", after=-1), ValueError, "after=-1 is not in"),
    "call times": (lambda f: f.refuse_call("connect", times=-1), ValueError, "times=-1 is not in"),
    "call error": (lambda f: f.refuse_call("connect", -12), ValueError, "error=-12 is not in 1.."),
    "event": (lambda f: f.raise_event(99), ValueError, "event=99"),  # type: ignore[arg-type]
    "seed": (lambda _: Faults("x"), TypeError, "seed='x' (str)"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("make", "error", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named_and_makes_no_fault(
    make: Callable[[Faults], object], error: type[Exception], said: str
) -> None:
    connect = software().connect
    with Faults() as faults:
        with pytest.raises(error, match=re.escape(said)):
            make(faults)
        assert faults._faults == []
        assert software().connect == connect


def test_more_faults_than_the_device_has_places_for_are_refused() -> None:
    with Faults() as faults:
        for _ in range(64):
            faults.refuse_connection()
        with pytest.raises(aiordma.VerbsCallError):
            faults.refuse_connection()
    with Faults() as faults:
        assert faults.refuse_connection().struck == 0


ARMING: dict[str, Callable[[Faults], object]] = {
    "refuse_connection": lambda f: f.refuse_connection(),
    "delay_connection": lambda f: f.delay_connection(1),
    "drop_connection": lambda f: f.drop_connection(after_bytes=1),
    "silence_peer": lambda f: f.silence_peer(1),
    "delay_completions": lambda f: f.delay_completions(1),
    "spurious_events": lambda f: f.spurious_events(),
    "merge_events": lambda f: f.merge_events(1),
    "refuse_post": lambda f: f.refuse_post(),
    "refuse_call": lambda f: f.refuse_call("connect"),
    "receiver_not_ready": lambda f: f.receiver_not_ready(1),
    "want_crc": lambda f: f.want_crc(),
    "corrupt_frame": lambda f: f.corrupt_frame(),
}


def test_every_method_that_makes_a_fault_is_tested_outside_of_the_block() -> None:
    made = {
        name
        for name, member in vars(Faults).items()
        if not name.startswith("_") and inspect.signature(member).return_annotation is Fault
    }
    assert made == set(ARMING)


@pytest.mark.parametrize("name", ARMING)
def test_fault_outside_of_the_block_is_refused(name: str) -> None:
    connect = software().connect
    faults = Faults()
    text = re.escape(f"{name}(): outside of the `with` block of these Faults")
    with pytest.raises(RuntimeError, match=text):
        ARMING[name](faults)
    with faults:
        ARMING[name](faults)
    with pytest.raises(RuntimeError, match=text):
        ARMING[name](faults)
    assert faults._faults == []
    assert software().connect == connect


def test_dropped_faults_end_with_a_warning() -> None:
    connect = software().connect
    faults = Faults()
    faults.__enter__()
    faults.refuse_call("connect")
    line = inspect.currentframe()
    assert line is not None
    place = f"{__file__}:{line.f_lineno - 4}"
    with pytest.warns(ResourceWarning, match=re.escape(f"opened at {place}")):
        del faults
    assert software().connect == connect
