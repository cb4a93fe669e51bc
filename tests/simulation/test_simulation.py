"""Hosts, time, the network and its faults, as a scenario's author meets them."""

import asyncio
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import trustme

import aiordma
import aiordma.testing
from aiordma import streams
from aiordma.testing import Host, OwnershipError, Simulation, SimulationError, simulate, simulated
from tests.unit.sources import ROOT

pytestmark = pytest.mark.natively

PORT = 7471


def line_of(*texts: str) -> int:
    """Return the number of this file's first line that has all texts."""
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if all(each in line for each in texts))


async def lend(connection: aiordma.Connection) -> None:
    region = connection.register(bytearray(200), aiordma.Access.REMOTE_READ)
    await connection.send(region.remote().pack())
    async for _ in connection:
        pass


async def echo(connection: aiordma.Connection) -> None:
    async for message in connection:
        await connection.send(message)


async def serve(host: Host, handle: Callable[[aiordma.Connection], Any] = echo) -> None:
    async with aiordma.listen(host.address, PORT, device="software") as listener:
        await listener.serve(handle)


async def two_hosts(
    simulation: Simulation, handle: Callable[[aiordma.Connection], Any] = echo
) -> tuple[Host, Host]:
    """A server's host, whose server listens, and a client's."""
    server, client = simulation.host("server"), simulation.host("client")
    simulation.link(latency=0.001)
    server.run(serve, server, handle)
    await asyncio.sleep(0.1)
    return server, client


async def ask(host: Host, times: int = 1, pause: float = 0.0) -> float:
    """Exchange messages; returns how long the last one took."""
    took = 0.0
    async with aiordma.connect(host.address, PORT, device="software") as connection:
        for number in range(times):
            began = asyncio.get_running_loop().time()
            await connection.send(bytes([number]))
            assert await connection.receive() == bytes([number])
            took = asyncio.get_running_loop().time() - began
            await asyncio.sleep(pause)
    return took


# -- time ------------------------------------------------------------------------------------


def test_an_hour_of_sleep_takes_no_time() -> None:
    async def scenario(simulation: Simulation) -> float:
        await asyncio.sleep(3600)
        with anyio.move_on_after(3600):
            await anyio.sleep_forever()
        return simulation.now

    began = time.monotonic()
    assert simulate(scenario) == pytest.approx(7200)
    assert time.monotonic() - began < 60


def test_a_message_takes_the_latency_and_its_size_of_the_bandwidth() -> None:
    async def scenario(simulation: Simulation) -> tuple[float, float]:
        server, client = await two_hosts(simulation)
        simulation.link(server, client, latency=0.25)
        simulation.link(client, server, latency=0.5)
        slow = await client.run(ask, server)
        simulation.link(server, client, latency=0.0, bandwidth=100)
        simulation.link(client, server, latency=0.0)
        return slow, await client.run(ask, server)

    latency, bandwidth = simulate(scenario)
    assert 0.749 < latency < 0.76
    assert bandwidth > 0.2  # a message of 1 byte is more than 20 on the wire


def test_a_host_has_a_clock_of_its_own() -> None:
    async def scenario(simulation: Simulation) -> tuple[float, float]:
        async def sleep() -> float:
            began = asyncio.get_running_loop().time()
            await asyncio.sleep(10)
            return asyncio.get_running_loop().time() - began

        fast = simulation.host("fast")
        fast.set_clock_rate(2)
        began = simulation.now
        shown = await fast.run(sleep)
        return shown, simulation.now - began

    shown, passed = simulate(scenario)
    assert (round(shown, 3), round(passed, 3)) == (10, 5)


# -- one seed, one run -----------------------------------------------------------------------

SCRIPT = """
import asyncio
from aiordma.testing import simulate
from tests.simulation.test_simulation import ask, two_hosts

async def scenario(simulation):
    server, client = await two_hosts(simulation)
    simulation.link(latency=0.001, jitter=0.01, loss=0.05)
    others = [simulation.host() for _ in range(3)]
    await asyncio.gather(*(each.run(ask, server, 10) for each in (client, *others)))
    print("\\n".join(simulation.trace))

simulate(scenario, seed=7)
simulate(scenario, seed=8)
"""


def test_two_processes_with_other_hashes_have_the_same_trace() -> None:
    traces = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": str(number)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for number in (1, 2)
    ]
    assert traces[0] == traces[1]
    one, other = traces[0].split("0.000000001 server: runs serve\n")[1:]
    assert one != other


# -- faults ----------------------------------------------------------------------------------


def test_a_crashed_host_answers_again_when_it_has_booted() -> None:
    async def scenario(simulation: Simulation) -> None:
        server, client = await two_hosts(simulation)
        asking = client.run(ask, server, 1000, 0.01)
        await asyncio.sleep(1)
        server.crash()
        assert not server.is_up
        with pytest.raises(aiordma.RetryExceededError):
            await asking
        with pytest.raises(aiordma.ConnectTimeoutError):
            await client.run(ask, server)
        server.boot()
        with pytest.raises(aiordma.RejectedError):  # its program does not run
            await client.run(ask, server)
        server.run(serve, server)
        await asyncio.sleep(0.1)
        await client.run(ask, server)

    simulate(scenario)


def test_a_crashed_hosts_tasks_do_nothing_more() -> None:
    ended: list[str] = []

    async def scenario(simulation: Simulation) -> None:
        async def work() -> None:
            try:
                await asyncio.sleep(1)
            finally:
                ended.append("work")

        host = simulation.host()
        host.run(work)
        await asyncio.sleep(0.5)
        host.crash()
        await asyncio.sleep(10)

    simulate(scenario)
    assert ended == []


def test_a_short_cut_of_the_network_is_a_delay() -> None:
    async def scenario(simulation: Simulation) -> float:
        server, client = await two_hosts(simulation)
        asking = client.run(ask, server, 2, 1.0)
        await asyncio.sleep(0.5)
        simulation.link(client, server, cut=True)  # this way only
        await asyncio.sleep(0.8)
        simulation.heal()
        return await asking

    assert simulate(scenario) > 0.1


def test_a_long_cut_of_the_network_ends_a_connection() -> None:
    async def scenario(simulation: Simulation) -> None:
        server, client = await two_hosts(simulation)
        asking = client.run(ask, server, 100, 0.1)
        await asyncio.sleep(1)
        simulation.partition(server, (client,))
        with pytest.raises(aiordma.RetryExceededError):
            await asking

    simulate(scenario)


def test_a_frozen_host_goes_on_where_it_was() -> None:
    async def scenario(simulation: Simulation) -> float:
        server, client = await two_hosts(simulation)
        asking = client.run(ask, server, 1)
        server.freeze()
        await asyncio.sleep(5)
        server.thaw()
        await asking
        return simulation.now

    assert simulate(scenario) > 5


def test_lost_datagrams_stay_lost() -> None:
    async def scenario(simulation: Simulation) -> int:
        receiver, sender = simulation.host(), simulation.host()

        async def receive() -> int:
            count = 0
            async with await aiordma.open_datagram(
                receiver.address, PORT, device="software"
            ) as datagram:
                with anyio.move_on_after(60):
                    while True:
                        await datagram.receive()
                        count += 1
            return count

        async def send() -> None:
            async with await aiordma.open_datagram(
                sender.address, 0, device="software"
            ) as datagram:
                peer = await datagram.resolve(receiver.address, PORT)
                simulation.link(loss=0.5)
                for _ in range(100):
                    await datagram.send(b"datagram", peer)
                    await asyncio.sleep(0.01)

        received = receiver.run(receive)
        await asyncio.sleep(0.1)
        await sender.run(send)
        return await received

    assert 20 < simulate(scenario) < 80


# -- what programs do --------------------------------------------------------------------------


def test_streams_run_unchanged() -> None:
    async def scenario(simulation: Simulation) -> bytes:
        server, client = simulation.host(), simulation.host()
        simulation.link(latency=0.001, jitter=0.001)

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write((await reader.readexactly(100_000))[::-1])
            await writer.drain()
            writer.close()

        async def listen() -> None:
            async with await streams.start_server(answer, server.address, PORT) as listening:
                await listening.serve_forever()

        async def send() -> bytes:
            reader, writer = await streams.open_connection(client_target, PORT)
            writer.write(bytes(range(250)) * 400)
            data = await reader.read()
            writer.close()
            await writer.wait_closed()
            return data

        client_target = server.address
        server.run(listen)
        await asyncio.sleep(0.1)
        return await client.run(send)

    assert simulate(scenario) == (bytes(range(250)) * 400)[::-1]


def test_streams_have_tls() -> None:
    authority = trustme.CA()
    ours, theirs = (
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
    )
    authority.issue_cert("server.test").configure_cert(ours)
    authority.configure_trust(theirs)

    async def scenario(simulation: Simulation) -> bytes:
        server, client = simulation.host(), simulation.host()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write((await reader.readline()).upper())
            await writer.drain()
            writer.close()

        async def listen() -> None:
            async with await streams.start_server(
                answer, server.address, PORT, ssl=ours
            ) as listening:
                await listening.serve_forever()

        async def send() -> bytes:
            reader, writer = await streams.open_connection(
                server.address, PORT, ssl=theirs, server_hostname="server.test"
            )
            writer.write(b"hello\n")
            line = await reader.readline()
            writer.close()
            await writer.wait_closed()
            return line

        server.run(listen)
        await asyncio.sleep(0.1)
        return await client.run(send)

    assert simulate(scenario) == b"HELLO\n"


def test_blocks_are_there_when_the_message_after_them_is() -> None:
    async def scenario(simulation: Simulation) -> None:
        async def check(connection: aiordma.Connection) -> None:
            memory = bytearray(64 * 1000)
            region = connection.register(memory, aiordma.Access.REMOTE_WRITE)
            await connection.send(region.remote().pack())
            await connection.receive()
            assert memory.count(b"x") == 64 * 500
            await connection.send(b"all of them")

        async def write() -> None:
            async with aiordma.connect(server.address, PORT, device="software") as connection:
                theirs = aiordma.RemoteMemory.unpack(await connection.receive())
                ours = connection.register(bytearray(b"x" * 64 * 500))
                places = aiordma.Blocks(
                    ours, theirs, range(0, 32000, 64), range(64, 64000, 128), 64
                )
                await connection.write_blocks(places)
                await connection.send(b"done")
                assert await connection.receive() == b"all of them"

        server, client = await two_hosts(simulation, check)
        await client.run(write)

    for seed in range(10):
        simulate(scenario, seed=seed)


def test_a_host_cannot_use_what_is_another_hosts() -> None:
    async def scenario(simulation: Simulation) -> None:
        server, client = await two_hosts(simulation)
        opened: list[aiordma.Connection] = []

        async def open_one() -> None:
            opened.append(await aiordma.connect(server.address, PORT, device="software"))

        async def use() -> None:
            await opened[0].send(b"from elsewhere")

        await client.run(open_one)
        with pytest.raises(aiordma.ForkError):
            await server.run(use)

    simulate(scenario)


def test_memory_that_changes_under_a_request_is_reported_with_the_line() -> None:
    async def scenario(simulation: Simulation) -> None:
        server, client = await two_hosts(simulation)

        async def change() -> None:
            async with aiordma.connect(server.address, PORT, device="software") as connection:
                memory = connection.register(bytearray(b"x" * 60_000))
                request = connection.post_send(memory[:1000])  # this line
                memory.view[5] = 0
                await request

        await client.run(change)

    line = line_of("post_send(memory", "# this line")
    with pytest.raises(OwnershipError, match=rf"test_simulation\.py:{line}"):
        simulate(scenario)


def line_with(text: str) -> int:
    """The number of the line that ends with this comment."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"  # {text}"))


async def with_guarded_memory(
    simulation: Simulation, program: Callable[[aiordma.Connection, memoryview], Any]
) -> None:
    """Run a program on a connection. Its peer lends memory, and answers each message."""

    async def lend_and_answer(connection: aiordma.Connection) -> None:
        region = connection.register(bytearray(b"r" * 8193), aiordma.Access.REMOTE_READ)
        await connection.send(region.remote().pack())
        async for _ in connection:
            await connection.send(b"m" * 8193)

    server, client = await two_hosts(simulation, lend_and_answer)

    async def run() -> None:
        options = aiordma.ConnectionOptions(receive_buffers=0, max_recv_wr=4)
        async with aiordma.connect(
            server.address, PORT, device="software", options=options
        ) as connection:
            await program(connection, simulation.guarded_memory(8193))

    await client.run(run)


@pytest.mark.parametrize("at", [0, 4096, 8192])
def test_a_change_of_guarded_memory_that_is_sent_is_reported_with_both_lines(at: int) -> None:
    async def program(connection: aiordma.Connection, memory: memoryview) -> None:
        region = connection.register(memory)
        request = connection.post_send(region[:])  # posted here
        assert memory[at] == 0  # it may be read
        memory[at] = 0  # changed here, to what it was
        await request
        memory[at] = 1

    posted, changed = line_with("posted here"), line_with("changed here, to what it was")
    with pytest.raises(OwnershipError, match=rf"8193 bytes .*\.py:{posted}; .*\.py:{changed}\b"):
        simulate(lambda simulation: with_guarded_memory(simulation, program))


@pytest.mark.parametrize("what", ["receive", "READ"])
def test_a_look_at_guarded_memory_before_the_completion_is_reported(what: str) -> None:
    looks: list[int] = []

    async def program(connection: aiordma.Connection, memory: memoryview) -> None:
        region = connection.register(memory, aiordma.Access.LOCAL_WRITE)
        received = await connection.post_recv(region[:])
        remote = aiordma.RemoteMemory.unpack(bytes(memory[: received.byte_len]))
        if what == "READ":
            request = connection.post_read(region[:], remote)
        else:
            request = connection.post_recv(region[:])
        looks.append(memory[8192])  # looked here
        await connection.send(b"go on")
        await request
        looks.append(memory[8192])

    looked = line_with("looked here")
    with pytest.raises(OwnershipError, match=rf"8193 bytes .*; accessed at .*\.py:{looked}\b"):
        simulate(lambda simulation: with_guarded_memory(simulation, program))
    assert looks == [0xDB, ord("r" if what == "READ" else "m")]


def test_guarded_memory_is_the_programs_where_and_when_no_request_has_it() -> None:
    kept: list[memoryview] = []

    async def program(connection: aiordma.Connection, memory: memoryview) -> None:
        kept.append(memory)
        region = connection.register(memory, aiordma.Access.LOCAL_WRITE)
        received = await connection.post_recv(region[:])
        remote = aiordma.RemoteMemory.unpack(bytes(memory[: received.byte_len]))
        for _ in range(3):
            answer = connection.post_recv(region[:])
            await connection.send(b"first")
            await answer
            assert memory == b"m" * 8193
            request = connection.post_read(region[:4096], remote[:4096])
            memory[4096:] = b"p" * 4097  # of other pages
            await request
            assert memory == b"r" * 4096 + b"p" * 4097
            await connection.send(region[:])
        connection.post_recv(region[:]).add_done_callback(aiordma.WorkRequest.exception)

    simulate(lambda simulation: with_guarded_memory(simulation, program))
    kept[0][:] = bytes(8193)


def test_a_fault_elsewhere_still_ends_a_process_that_guards_memory() -> None:
    program = """
import ctypes, sys
from aiordma.testing import simulate
async def scenario(simulation):
    simulation.guarded_memory(1)
    ctypes.string_at(8, 1)
simulate(scenario)
"""
    done = subprocess.run([sys.executable, "-Xfaulthandler", "-c", program], capture_output=True)
    assert done.returncode == -signal.SIGSEGV
    assert b"Fatal Python error: Segmentation fault" in done.stderr


def test_two_reads_into_the_same_memory_are_reported() -> None:
    async def scenario(simulation: Simulation) -> None:
        async def read() -> None:
            async with aiordma.connect(server.address, PORT, device="software") as connection:
                remote = aiordma.RemoteMemory.unpack(await connection.receive())
                memory = connection.register(bytearray(200), aiordma.Access.LOCAL_WRITE)
                first = connection.post_read(memory[:100], remote[:100])
                second = connection.post_read(memory[100:], remote[100:])
                third = connection.post_read(memory[150:], remote[:50])
                for each in (first, second, third):
                    await each

        server, client = await two_hosts(simulation, lend)
        await client.run(read)

    with pytest.raises(
        OwnershipError, match="50 bytes, some of which an earlier request"
    ) as caught:
        simulate(scenario)
    assert caught.value.__notes__[-1].count("by two requests") == 1


def test_memory_that_a_receive_waits_for_has_no_data() -> None:
    async def scenario(simulation: Simulation) -> bytes:
        server, client = await two_hosts(simulation)

        async def look() -> bytes:
            async with aiordma.connect(
                server.address, PORT, device="software", receive_buffers=0
            ) as connection:
                memory = connection.register(bytearray(8), aiordma.Access.LOCAL_WRITE)
                request = connection.post_recv(memory[:])
                before = bytes(memory.view)
                await connection.send(b"12345678")
                await request
                assert bytes(memory.view) == b"12345678"
                return before

        return await client.run(look)

    assert simulate(scenario) == b"\xdb" * 8


@pytest.mark.parametrize(
    "values", [{"loss": 1.1}, {"loss": float("nan")}, {"latency": -1}, {"bandwidth": float("inf")}]
)
def test_a_link_has_no_impossible_values(values: dict[str, Any]) -> None:
    async def scenario(simulation: Simulation) -> None:
        simulation.link(**values)

    with pytest.raises(ValueError, match="it must be in 0"):
        simulate(scenario)


def test_an_address_belongs_to_one_host() -> None:
    async def scenario(simulation: Simulation) -> None:
        simulation.host("one", "10.0.0.1", "fe80::1")
        simulation.host("two", "10.0.0.1")

    with pytest.raises(ValueError, match=r"10\.0\.0\.1 is the address of another host"):
        simulate(scenario)


# -- how a run ends ----------------------------------------------------------------------------


def test_tasks_that_wait_for_each_other_are_an_error() -> None:
    async def scenario(simulation: Simulation) -> None:
        await asyncio.Event().wait()

    with pytest.raises(SimulationError, match="nothing will ever happen"):
        simulate(scenario)


def test_the_limit_of_virtual_time_is_an_error() -> None:
    async def scenario(simulation: Simulation) -> None:
        while True:
            await asyncio.sleep(1)

    with pytest.raises(SimulationError, match="after 60 s"):
        simulate(scenario, limit=60)


def test_an_error_that_nobody_awaits_fails_the_run() -> None:
    async def scenario(simulation: Simulation) -> None:
        async def fail() -> None:
            raise ZeroDivisionError

        simulation.host().run(fail)
        await asyncio.sleep(1)

    with pytest.raises(ZeroDivisionError) as caught:
        simulate(scenario, seed=5)
    assert "seed 5" in caught.value.__notes__[-1]
    assert "host1: runs fail" in caught.value.__notes__[-1]


def test_a_run_has_no_effect_on_the_device_outside() -> None:
    async def real() -> None:
        async with aiordma.testing.connected_pair(device="software") as (client, server):
            await client.send(b"before")
            assert await server.receive() == b"before"

    async def scenario(simulation: Simulation) -> None:
        server, client = await two_hosts(simulation)
        await client.run(ask, server)

    asyncio.run(real())
    before = aiordma.testing.software_objects()
    simulate(scenario)
    assert aiordma.testing.software_objects() == before
    asyncio.run(real())


def test_an_interrupt_ends_a_run_and_leaves_the_device_outside() -> None:
    async def real() -> None:
        async with aiordma.testing.connected_pair(device="software") as (client, server):
            await client.send(b"after")
            assert await server.receive() == b"after"

    async def scenario(simulation: Simulation) -> None:
        server, client = await two_hosts(simulation)
        asking = client.run(ask, server, 100, 0.01)
        await asyncio.sleep(0.5)
        signal.raise_signal(signal.SIGINT)
        await asking

    with pytest.raises(KeyboardInterrupt):
        simulate(scenario)
    asyncio.run(real())


def test_faults_of_the_device_strike_on_virtual_time() -> None:
    async def scenario(simulation: Simulation) -> float:
        server, client = await two_hosts(simulation)

        async def slow() -> float:
            with aiordma.testing.Faults(seed=1) as faults:
                faults.delay_completions(0.5)
                return await ask(server)

        return await client.run(slow)

    assert simulate(scenario) >= 0.5


def test_a_simulation_inside_of_another_is_refused() -> None:
    async def scenario(simulation: Simulation) -> None:
        simulate(scenario)

    with pytest.raises(RuntimeError):
        simulate(scenario)


seen: list[int] = []


@simulated(seeds=3)
async def test_the_decorator_runs_a_test_for_each_seed(simulation: Simulation) -> None:
    seen.append(simulation.seed)


def test_the_environment_names_one_seed(
    monkeypatch: pytest.MonkeyPatch, rdma_simulated: Callable[..., None]
) -> None:
    del seen[:]

    async def scenario(simulation: Simulation) -> None:
        seen.append(simulation.seed)

    rdma_simulated(scenario, seeds=2)
    monkeypatch.setenv("AIORDMA_SEED", "12")
    rdma_simulated(scenario, seeds=2)
    assert seen == [0, 1, 12]
    monkeypatch.setenv("AIORDMA_SEED", "twelve")
    with pytest.raises(ValueError, match="AIORDMA_SEED='twelve'"):
        rdma_simulated(scenario)


# -- names, and links that are shared ----------------------------------------------------------


def test_a_host_is_reached_by_its_name() -> None:
    async def scenario(simulation: Simulation) -> None:
        server, client = simulation.host("server", "10.9.9.9", "fd00::9"), simulation.host()
        server.run(serve, server)
        await asyncio.sleep(0.1)

        async def program() -> None:
            async with aiordma.connect("server", PORT, device="software") as connection:
                await connection.send(b"1")
                assert await connection.receive() == b"1"
            with pytest.raises(aiordma.AddressError, match="no host of the simulation"):
                await aiordma.connect("elsewhere", PORT, device="software")

        await client.run(program)

    simulate(scenario)


def test_a_name_belongs_to_one_host() -> None:
    async def scenario(simulation: Simulation) -> None:
        simulation.host("one")
        simulation.host("one")

    with pytest.raises(ValueError, match="'one' is the name of another host"):
        simulate(scenario)


def test_streams_take_names() -> None:
    async def scenario(simulation: Simulation) -> bytes:
        server, client = simulation.host("server"), simulation.host()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.readline())
            writer.close()

        async def listen() -> None:
            async with await streams.start_server(answer, "server", PORT) as listening:
                await listening.serve_forever()

        async def send() -> bytes:
            reader, writer = await streams.open_connection("server", PORT)
            writer.write(b"by name\n")
            line = await reader.readline()
            writer.close()
            return line

        server.run(listen)
        await asyncio.sleep(0.1)
        return await client.run(send)

    assert simulate(scenario) == b"by name\n"


def test_connections_share_the_bandwidth_of_their_link() -> None:
    async def scenario(simulation: Simulation) -> float:
        async def receive(connection: aiordma.Connection) -> None:
            async for _ in connection:
                pass

        server, client = await two_hosts(simulation, receive)
        simulation.link(client, server, latency=0.0, bandwidth=100_000)

        async def send() -> None:
            async with aiordma.connect(server.address, PORT, device="software") as connection:
                for _ in range(10):
                    await connection.send(bytes(10_000))

        began = simulation.now
        await asyncio.gather(*(client.run(send) for _ in range(4)))
        return simulation.now - began

    assert 4 < simulate(scenario) < 4.5


def test_the_seed_delays_completions() -> None:
    async def scenario(simulation: Simulation) -> int:
        server, client = await two_hosts(simulation)
        late = 0

        async def program() -> None:
            nonlocal late
            now = asyncio.get_running_loop().time
            async with aiordma.connect(server.address, PORT, device="software") as connection:
                region = connection.register(bytearray(8), aiordma.Access.REMOTE_READ)
                for _ in range(300):
                    began = now()
                    await connection.post_send(region[:])
                    late += now() - began > 0.0028
                    await connection.receive()

        await client.run(program)
        return late

    counts = [simulate(scenario, seed=seed) for seed in range(3)]
    assert all(2 < each < 40 for each in counts)
    assert simulate(scenario, seed="0:") == 0


# -- ownership -------------------------------------------------------------------------------


def test_two_receives_into_the_same_memory_are_reported() -> None:
    async def scenario(simulation: Simulation) -> None:
        server, client = await two_hosts(simulation)

        async def program() -> None:
            options = aiordma.ConnectionOptions(receive_buffers=0, max_recv_wr=4)
            async with aiordma.connect(
                server.address, PORT, device="software", options=options
            ) as connection:
                memory = connection.register(bytearray(200), aiordma.Access.LOCAL_WRITE)
                connection.post_recv(memory[:100])
                connection.post_recv(memory[100:])
                connection.post_recv(memory[50:150])  # the second line
                await connection.send(b"1")
                await asyncio.sleep(1)

        await client.run(program)

    line = line_of("post_recv(memory", "# the second line")
    with pytest.raises(OwnershipError, match=rf"100 bytes, .*test_simulation\.py:{line}"):
        simulate(scenario)


def test_a_read_into_the_memory_of_a_receive_is_reported() -> None:
    async def scenario(simulation: Simulation) -> None:
        server, client = await two_hosts(simulation, lend)

        async def program() -> None:
            options = aiordma.ConnectionOptions(receive_buffers=0, max_recv_wr=4)
            async with aiordma.connect(
                server.address, PORT, device="software", options=options
            ) as connection:
                memory = connection.register(bytearray(200), aiordma.Access.LOCAL_WRITE)
                received = await connection.post_recv(memory[:])
                remote = aiordma.RemoteMemory.unpack(bytes(memory.view[: received.byte_len]))
                waiting = connection.post_recv(memory[:])
                await connection.read(memory[:10], remote[:10])
                waiting.add_done_callback(aiordma.WorkRequest.exception)

        await client.run(program)

    with pytest.raises(OwnershipError, match="10 bytes, some of which"):
        simulate(scenario)


def test_the_trace_has_an_access_after_the_end_of_a_grant() -> None:
    async def scenario(simulation: Simulation) -> None:
        async def lend(connection: aiordma.Connection) -> None:
            async with connection.grant(bytearray(100), aiordma.Access.REMOTE_WRITE) as grant:
                await connection.send(grant.remote.pack())
                await asyncio.sleep(0.1)
            await asyncio.sleep(5)

        server, client = await two_hosts(simulation, lend)

        async def write() -> None:
            async with aiordma.connect(server.address, PORT, device="software") as connection:
                remote = aiordma.RemoteMemory.unpack(await connection.receive())
                await connection.write(bytes(100), remote)
                assert not any("denies" in each for each in simulation.trace)
                await asyncio.sleep(1)
                with pytest.raises(aiordma.RemoteAccessError):
                    await connection.write(bytes(100), remote)

        await client.run(write)
        assert sum("server: denies an access" in each for each in simulation.trace) == 1

    simulate(scenario)
