"""`aiordma bench` on the device: every operation it has, server and client in two processes."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import anyio
import pytest
from typer.testing import CliRunner

import aiordma
from aiordma.bench import server, tcp
from aiordma.bench.meter import Measurement
from aiordma.bench.workload import OPERATIONS, Workload
from aiordma.cli import bench as cli_bench
from tests.device.players import one_loop
from tests.devices import ADDRESS, BUILT_IN, IPV6, DeviceUnderTest
from tests.docs.programs import ROOT, serving
from tests.forked import python
from tests.ports import free_port

pytestmark = [pytest.mark.one_kernel_device, pytest.mark.slow]

COMMAND = ("-c", "from aiordma.cli.main import main; main()", "bench")
NEEDS = {
    "datagrams": "datagrams",
    # Posted by hand, the server's receives can come after the first message.
    "echo": "rnr",
    "send": "rnr",
}
MOST_BUFFERED = 256 << 20
"""More bytes than the socket buffers of a TCP connection take."""

QUICK = ("--seconds", "0.05", "--size", "64")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*python(), *COMMAND, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.natively
def test_every_operation_is_measured(device: DeviceUnderTest, tmp_path: Path) -> None:
    here = [name for name in OPERATIONS if not device.lacks(NEEDS.get(name, ""))]
    chosen = [word for name in (*here, "stream") for word in ("-o", name)]
    file = tmp_path / "bench.json"
    done = bench(
        "local", "--host", ADDRESS, *QUICK, "-d", "1", "-d", "4", *chosen, "--json", str(file)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())
    names = [f"{name}/64{window}" for name in here for window in ("", "/window4")]
    beside = ("stream", "tcp streams", "tcp protocol")
    names += [f"{name}/64{window}" for window in ("", "/window4") for name in beside]
    assert [row["name"] for row in rows] == names
    assert {row.get("device") for row in rows} == {device.name, None}
    assert [row for row in rows if "error" in row] == []
    for row in rows:
        assert row["count"] > 0
        assert row["operations_per_second"] > 0
        assert row["cpu_us_per_operation"] > 0
        if not row["name"].startswith("chain"):
            assert 0 < row["p50_us"] <= row["p90_us"] <= row["p99_us"] <= row["p99.9_us"]
        assert row["name"] in done.stdout
    assert f"({device.name})" in done.stdout
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(
        r"Faster than TCP\? 64 B: (yes|no), \d+\.\d\d of the time\. "
        r"64 B: (yes|no), \d+\.\d\d of the rate\.",
        last,
    )


def rows_of(tmp_path: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    file = tmp_path / "rows.json"
    local = ("local", "--host", ADDRESS, "--no-tcp", "-s", "64", "--json", str(file))
    done = bench(*local, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.strip() == ""
    return {row["name"]: row for row in json.loads(file.read_text())}


@pytest.mark.natively
def test_iterations_are_counted_for_each_queue_pair(
    device: DeviceUnderTest, tmp_path: Path
) -> None:
    here = [name for name in OPERATIONS if not device.lacks(NEEDS.get(name, ""))]
    chosen = [word for name in here for word in ("-o", name)]
    rows = rows_of(tmp_path, "-n", "50", "-q", "2", "-d", "1", "-d", "4", *chosen)
    assert len(rows) == 2 * len(here)
    for name, row in rows.items():
        # A chain's operations are posted by twos.
        assert row["count"] == 100, name
        assert name.endswith("/qp2")


@pytest.mark.capability("rnr")
@pytest.mark.parametrize("loop", ["auto", pytest.param("trio", marks=pytest.mark.natively)])
def test_bidirectional_counts_the_messages_of_both_sides(tmp_path: Path, loop: str) -> None:
    each = 500 if BUILT_IN else 100
    options = ("-b", "-n", str(each), "-d", "4", "-q", "2", "--loop", loop)
    (row,) = rows_of(tmp_path, *options).values()
    assert row["name"] == "send/64/window4/both/qp2"
    assert row["count"] > 2 * each  # the server's, too


def test_connection_options_apply(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "-n", "20", "-d", "1", "-I", "0", "-T", "8", "-o", "messages")
    assert rows["messages/64"]["count"] == 20


@pytest.mark.natively
@pytest.mark.capability("rnr")
def test_every_operation_that_sends_can_do_it_inline(tmp_path: Path) -> None:
    names = [name for name in OPERATIONS if name not in ("read", "datagrams")]
    chosen = [word for name in names for word in ("-o", name)]
    rows = rows_of(tmp_path, "-n", "20", "-d", "4", "-I", "64", *chosen)
    assert {row["count"] for row in rows.values()} == {20}
    assert len(rows) == len(names)


@pytest.mark.capability("datagrams")
def test_datagram_options_apply(tmp_path: Path) -> None:
    index = "0" if BUILT_IN else "1"
    options = ("-n", "20", "-d", "1", "-x", index, "-S", "3", "-I", "32", "-o", "datagrams")
    assert rows_of(tmp_path, *options)["datagrams/64"]["count"] == 20


@pytest.mark.capability("datagrams")
def test_gid_index_and_service_level_are_those_of_the_datagrams(
    device: DeviceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = aiordma.Datagram.resolve
    found: list[tuple[bytes, aiordma.verbs.AddressVector]] = []

    async def resolving(self: aiordma.Datagram, *arguments: Any, **keywords: Any) -> Any:
        peer = await resolve(self, *arguments, **keywords)
        found.append((self.gid, peer.address))
        return peer

    monkeypatch.setattr(aiordma.Datagram, "resolve", resolving)
    with aiordma.verbs.Device(device.name).open() as context:
        entries = [each for each in context.gid_table() if ":" in each.address]
    usual = next(each for each in entries if each.address == IPV6)
    # Another address than the connection manager's choice, if there is one. (The loopback
    # interface has no link-local ones.)
    others = [each for each in entries if each is not usual]
    if device.is_built_in:
        others = [each for each in others if not each.address.startswith("fe80")]
    entry = (others or [usual])[0]
    port = str(free_port())
    with serving(*COMMAND, "server", "--bind", IPV6, "--port", port, "--device", device.name):
        options = ("-o", "datagrams", "-s", "64", "-d", "1", "-n", "10", "--no-tcp", "-p", port)
        chosen = ("-x", str(entry.index), "-S", "3")
        words = ["client", IPV6, *options, "--device", device.name]
        for extra in (chosen, ()):
            done = CliRunner().invoke(cli_bench.bench, [*words, *extra])
            assert done.exit_code == 0, done.output
    (gid, address), (usual_gid, usual_address) = found
    assert (gid, address.gid_index, address.service_level) == (entry.gid, entry.index, 3)
    assert (usual_gid, usual_address.gid_index) == (usual.gid, usual.index)
    assert usual_address.service_level == 0


@pytest.mark.capability("datagrams")
def test_gid_index_that_the_port_lacks_is_named(device: DeviceUnderTest) -> None:
    port = str(free_port())
    with serving(*COMMAND, "server", "--bind", ADDRESS, "--port", port):
        done = bench(
            "client", ADDRESS, "-p", port, "-o", "datagrams", *QUICK, "-x", "255", "--no-tcp"
        )
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"gid_index=255: port 1 of {device.name} has no GID there" in done.stderr


@pytest.mark.natively
def test_a_client_measures_with_a_server_of_its_own_loop() -> None:
    port = str(free_port())
    other = (*COMMAND, "server", "--bind", ADDRESS, "--port", port, "--loop", "trio")
    with serving(*other):
        done = bench("client", ADDRESS, "--port", port, *QUICK, "-o", "messages", "--no-tcp")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "messages/64" in done.stdout


ASKS_TOO_MUCH = [Workload("echo", 1 << 30, 4096), Workload("messages", 1 << 20, 4096)]


def test_client_that_asks_for_nonsense_leaves_the_server_running() -> None:
    """The reason is longer than what goes with a refusal."""
    nonsense = Workload.WIRE.pack(Workload.MAGIC, list(OPERATIONS).index("read"), True, 1, 64, -1)
    with pytest.raises(ValueError, match="-b: read") as caught:
        Workload.unpack(nonsense)
    assert len(str(caught.value)) > server.MOST_REASON_BYTES
    anyio.run(_is_rejected, nonsense)


@one_loop
@pytest.mark.anyio
@pytest.mark.parametrize("work", ASKS_TOO_MUCH, ids=str)
async def test_a_client_that_asks_for_too_much_is_rejected(work: Workload) -> None:
    text = await _is_rejected(work.pack())
    if BUILT_IN:  # siw pads and cuts what goes with a refusal
        assert b" bytes here, and a client gets " in text


async def _is_rejected(private_data: bytes) -> bytes:
    """Ask the server, and then modestly; return the reason of the refusal."""
    async with aiordma.listen(ADDRESS, 0) as listener, anyio.create_task_group() as group:

        async def serve() -> None:
            async for request in listener:
                group.start_soon(server._serve_one, request)

        group.start_soon(serve)
        with pytest.raises(aiordma.RejectedError) as caught:
            await aiordma.connect(ADDRESS, listener.port, private_data=private_data)
        modest = Workload("messages", 64).pack()
        async with aiordma.connect(ADDRESS, listener.port, private_data=modest) as connection:
            await connection.send(b"hello")
            assert await connection.receive() == b"hello"
        await listener.aclose()
    return caught.value.private_data


@pytest.mark.natively
@pytest.mark.parametrize("size", [0, (1 << 30) + 1])
def test_size_that_no_message_has_ends_its_tcp_client_alone(size: int) -> None:
    async def talk() -> None:
        async with tcp.serve_streams("127.0.0.1", 0) as port, asyncio.timeout(30):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(size.to_bytes(tcp.HEADER_BYTES, "big"))
            assert await reader.read() == b""
            assert (await tcp.measure_streams("127.0.0.1", port, 64, 0.5)).count > 0
            writer.close()
            await writer.wait_closed()

    asyncio.run(talk())


@pytest.mark.natively
@pytest.mark.parametrize("serve", [tcp.serve_streams, tcp.serve_protocol])
def test_tcp_client_that_does_not_read_is_read_no_more(
    serve: Callable[[str, int], AbstractAsyncContextManager[int]],
) -> None:
    async def talk() -> None:
        async with serve("127.0.0.1", 0) as port, asyncio.timeout(30):
            before = len(os.listdir("/proc/self/fd"))
            client.connect(("127.0.0.1", port))
            client.setblocking(False)
            client.sendall((1 << 10).to_bytes(tcp.HEADER_BYTES, "big"))
            sent = idle = 0
            while idle < 20:
                try:
                    sent += client.send(bytes(1 << 20))
                    idle = 0
                except BlockingIOError:
                    idle += 1
                await asyncio.sleep(0.01)
                # What the buffers of the two sockets take, on both ways.
                assert sent < MOST_BUFFERED
            client.close()
            while len(os.listdir("/proc/self/fd")) >= before:  # until the server's socket is closed
                await asyncio.sleep(0.01)

    with socket.socket() as client:
        asyncio.run(talk())


@pytest.mark.natively
def test_row_without_a_server_reports_it() -> None:
    done = bench("client", ADDRESS, "--port", "7469", *QUICK, "-o", "echo", "-d", "1", "--no-tcp")
    assert done.returncode == 1
    assert done.stderr.startswith(f"aiordma bench: echo/64: connect to {ADDRESS}:7469")


@pytest.mark.natively
def test_silent_host_is_tried_once_on_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    async def silent(_host: str, _port: int, work: Workload, *_: Any, **__: Any) -> Measurement:
        tried.append(work.operation)
        raise aiordma.ConnectTimeoutError("no answer")

    async def measured(*_: Any) -> Measurement:
        tried.append("tcp")
        return Measurement("tcp", 64, 1, 1.0, 1.0, 1, array("Q", [1]))

    monkeypatch.setattr(cli_bench, "measure", silent)
    monkeypatch.setattr(cli_bench, "measure_streams", measured)
    monkeypatch.setattr(cli_bench, "measure_protocol", measured)
    chosen = [word for name in ("echo", "write", "datagrams") for word in ("-o", name)]
    done = CliRunner().invoke(cli_bench.bench, ["client", ADDRESS, "-s", "64", *chosen])
    assert done.exit_code == 0
    assert tried == ["echo", "datagrams", *["tcp"] * 4]
    assert "echo/64, datagrams/64: no answer" in done.output
    assert "not tried: echo/64 reached no server" in done.output


@pytest.mark.natively
def test_tcp_server_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "CONNECT_SECONDS", 0.2)
    with socket.socket() as full, socket.socket() as first:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        first.connect(full.getsockname())  # more, and the kernel ignores them
        host, port = full.getsockname()
        for measure in (tcp.measure_streams, tcp.measure_protocol):
            with pytest.raises(aiordma.ConnectTimeoutError, match=r"TCP to 127\.0\.0\.1 port"):
                asyncio.run(measure(host, port, 64, 0.1))


@pytest.mark.natively
@pytest.mark.parametrize("measure", [tcp.measure_streams, tcp.measure_protocol])
def test_cancelled_tcp_client_closes_its_connection(
    measure: Callable[[str, int, int, float], Awaitable[Measurement]],
) -> None:
    async def talk() -> None:
        ended = asyncio.Event()

        async def read_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()
            ended.set()

        async with await asyncio.start_server(read_all, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await measure(host, port, 64, 0.1)
            async with asyncio.timeout(30):
                await ended.wait()

    asyncio.run(talk())


def local_bench(*arguments: str) -> "subprocess.Popen[str]":
    """Start `bench local`, in a process group of its own, and wait for its server."""
    process = subprocess.Popen(
        [sys.executable, *COMMAND, "local", "--host", ADDRESS, "--no-tcp", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not children(process.pid):
        assert process.poll() is None
        time.sleep(0.01)
    return process


def children(pid: int) -> list[int]:
    return [
        int(child)
        for thread in Path(f"/proc/{pid}/task").iterdir()
        for child in (thread / "children").read_text().split()
    ]


@pytest.mark.natively
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_server_ends_with_the_command_that_started_it(end: signal.Signals) -> None:
    with local_bench("-o", "echo", "-d", "1", "--seconds", "100") as process:
        (served,) = children(process.pid)
        process.send_signal(end)
        assert process.wait(30) == -end
        while Path(f"/proc/{served}").exists():  # or the test's time limit ends it
            time.sleep(0.01)


@pytest.mark.natively
@pytest.mark.parametrize(
    "words", ["-o echo -d 1", "-o echo -d 8", "-o write -d 8", "-o chain -d 8", "-b -d 8"]
)
def test_interrupt_ends_it_without_a_report_of_requests(words: str) -> None:
    with local_bench(*words.split(), "-s", "64", "--seconds", "100") as process:
        time.sleep(1.5)  # the connection, the warm-up
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=30)
        assert (process.returncode, said) == (130, "")
