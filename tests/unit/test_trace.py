"""trace(): a record of each work request, for a file, a function, OpenTelemetry."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import aiordma
import aiordma.testing
from aiordma.integrations.opentelemetry import RequestSpans
from aiordma.types import TracedRequest
from tests.internals import take_trace

pytestmark = pytest.mark.anyio

SCENARIO = """
import asyncio, aiordma, aiordma.testing
from aiordma import Access

async def main():
    async with aiordma.testing.connected_pair(receive_buffers=0) as (client, server):
        memory = server.register(bytearray(64), Access.REMOTE_READ | Access.REMOTE_WRITE)
        receives = [server.post_recv(bytearray(16)) for _ in range(4)]
        await client.send(b"hello")
        await client.sendv([b"a", b"bc"])
        with client.chain(signal_last_only=True) as chain:
            requests = [chain.post_send(b"d"), chain.post_write(b"e" * 64, memory.remote())]
        await requests[1]
        await receives[2]
        await client.read(bytearray(64), memory.remote())
        wrong = aiordma.RemoteMemory(memory.remote().address, 64, memory.remote().rkey ^ 1)
        try:
            await client.read(bytearray(64), wrong)
        except aiordma.RemoteAccessError:
            pass
        await client.ended()
        await server.ended()
        receives[3].exception()

asyncio.run(main())
"""


def run(code: str, path: Path | str) -> None:
    environment = {**os.environ, "AIORDMA_TRACE": str(path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_request_of_a_program_is_a_line_of_json(tmp_path: Path) -> None:
    run(SCENARIO, tmp_path / "a")
    found = lines(tmp_path / "a")
    assert sorted((each["operation"], each["bytes"], each["status"]) for each in found) == [
        ("RDMA_READ", 64, "REM_ACCESS_ERR"),
        ("RDMA_READ", 64, "SUCCESS"),
        ("RDMA_WRITE", 64, "SUCCESS"),
        ("RECV", 1, "SUCCESS"),
        ("RECV", 3, "SUCCESS"),
        ("RECV", 5, "SUCCESS"),
        ("RECV", 16, "WR_FLUSH_ERR"),
        ("SEND", 1, "SUCCESS"),
        ("SEND", 3, "SUCCESS"),
        ("SEND", 5, "SUCCESS"),
    ]
    assert len({each["qp_num"] for each in found}) == 2
    assert {each["device"] for each in found} == {"software"}
    assert all(each["peer"].startswith("127.0.0.1:") for each in found)
    assert all(each["latency_ns"] >= 0 for each in found)
    assert len({(each["wr_id"], each["posted_ns"]) for each in found}) == len(found)


async def exchange(count: int) -> None:
    async with aiordma.testing.connected_pair() as (client, server):
        for _ in range(count):
            await client.send(b"hello")
            await server.receive()


async def test_a_function_gets_the_requests() -> None:
    found: list[TracedRequest] = []
    with aiordma.trace(found.extend) as trace:
        await exchange(5)
    sends = [each for each in found if each.operation == "SEND"]
    assert [(each.bytes, each.status) for each in sends] == [(5, "SUCCESS")] * 5
    assert [each.posted_ns for each in sends] == sorted(each.posted_ns for each in sends)
    assert trace.lost == 0


async def test_nothing_is_recorded_after_the_end() -> None:
    found: list[TracedRequest] = []
    trace = aiordma.trace(found.extend)
    trace.close()
    trace.close()
    await exchange(1)
    assert found == []
    assert take_trace() == ([], 0)


async def test_requests_posted_before_the_trace_are_not_in_it() -> None:
    found: list[TracedRequest] = []
    async with aiordma.testing.connected_pair(receive_buffers=0) as (client, server):
        receive = server.post_recv(bytearray(8))
        with aiordma.trace(found.extend):
            await client.send(b"a")
            await receive
    assert [each.operation for each in found] == ["SEND"]


async def test_trace_closed_by_its_own_function_makes_room_for_another() -> None:
    called: list[Sequence[TracedRequest]] = []

    def once(records: Sequence[TracedRequest]) -> None:
        trace.close()
        called.append(records)  # behind it: the test goes on at once

    async with aiordma.testing.connected_pair() as (client, server):
        trace = aiordma.trace(once)
        with anyio.fail_after(30):
            while not called:
                await client.send(b"a")
                await server.receive()
        found: list[TracedRequest] = []
        with aiordma.trace(found.extend):
            await client.send(b"b")
            await server.receive()
    assert len(called) == 1
    assert "SEND" in {each.operation for each in found}


async def test_one_trace_runs_at_a_time() -> None:
    with aiordma.trace(lambda _: None), pytest.raises(aiordma.BusyError, match="running"):
        aiordma.trace(lambda _: None)
    aiordma.trace(lambda _: None).close()


async def test_what_the_limit_excludes_is_counted() -> None:
    batches: list[int] = []
    with aiordma.trace(lambda batch: batches.append(len(batch)), limit=3) as trace:
        await exchange(50)
    assert max(batches) <= 3
    assert trace.lost >= 1
    # 50 SENDs, and the receives that were posted during the trace.
    assert sum(batches) + trace.lost >= 100


async def test_a_function_that_fails_ends_the_records_but_not_the_program(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(_: Sequence[TracedRequest]) -> None:
        raise ZeroDivisionError

    with caplog.at_level(logging.ERROR, "aiordma"), aiordma.trace(fail):
        await exchange(3)
        await anyio.sleep(0.25)
        await exchange(3)
    assert [record.message for record in caplog.records] == [
        "the trace of the work requests ends, because it cannot be written"
    ]


@pytest.mark.parametrize("to", [7, None])
def test_a_wrong_argument_is_named(to: Any) -> None:
    with pytest.raises(TypeError, match="trace"):
        aiordma.trace(to)
    with pytest.raises(ValueError, match="limit"):
        aiordma.trace("/dev/null", limit=0)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"AIORDMA_TRACE=.*cannot be opened"):
        run(SCENARIO, tmp_path / "missing" / "a")


def test_a_forked_child_writes_to_a_file_of_its_own(tmp_path: Path) -> None:
    code = SCENARIO + "\nimport os\nif os.fork():\n    os.wait()\nelse:\n    asyncio.run(main())\n"
    run(code, tmp_path / "all.%p")
    files = list(tmp_path.iterdir())
    assert len(files) == 2
    assert all(len(lines(file)) == 10 for file in files)
    run(code, tmp_path / "parent")
    assert len(lines(tmp_path / "parent")) == 10


async def test_each_request_is_a_span() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with aiordma.trace(RequestSpans(provider.get_tracer("test"))):
        async with aiordma.testing.connected_pair() as (client, server):
            remote = server.register(bytearray(8), aiordma.Access.REMOTE_WRITE).remote()
            await client.write(b"12345678", remote)
            wrong = aiordma.RemoteMemory(remote.address, 8, remote.rkey ^ 1)
            with pytest.raises(aiordma.RemoteAccessError):
                await client.read(bytearray(8), wrong)
    spans = [span for span in exporter.get_finished_spans() if span.name == "rdma RDMA_WRITE"]
    first = spans[0]
    assert first.attributes is not None
    assert (first.attributes["rdma.bytes"], first.attributes["rdma.status"]) == (8, "SUCCESS")
    assert first.start_time is not None
    assert first.end_time is not None
    assert first.end_time >= first.start_time
    assert first.status.status_code is StatusCode.UNSET
    failed = [span for span in exporter.get_finished_spans() if span.name == "rdma RDMA_READ"]
    assert [span.status.status_code for span in failed] == [StatusCode.ERROR]
    assert failed[0].status.description == "REM_ACCESS_ERR"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_ordinary_close_makes_no_error_span(host: str) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with aiordma.trace(RequestSpans(provider.get_tracer("test"))):
        async with aiordma.testing.connected_pair(host) as (client, server):
            await client.send(b"hello")
            await server.receive()
            assert client.peer_address is not None
            port = client.peer_address[1]
    spans = exporter.get_finished_spans()
    assert [each.status.status_code for each in spans] == [StatusCode.UNSET] * 2
    (sent,) = (each.attributes for each in spans if each.name == "rdma SEND")
    assert sent is not None
    assert (sent["network.peer.address"], sent["network.peer.port"]) == (host, port)
