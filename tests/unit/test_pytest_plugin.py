"""The pytest plugin, as a project that has installed aiordma gets it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import aiordma
from aiordma.testing import connected_pair, fabric

QUIET = ("-p", "no:cacheprovider", "-q", "--tb=line")

ALL_FIXTURES = """
import anyio, pytest, aiordma

{marks}
async def test_pair(rdma_pair):
    async with rdma_pair(receive_buffers=4) as (client, server):
        await client.send(b"x")
        assert await server.receive() == b"x"

{marks}
async def test_streams(rdma_stream_pair):
    async with rdma_stream_pair() as (client, server):
        await client.send(b"abc")
        assert await server.receive() == b"abc"

{marks}
async def test_fabric(rdma_fabric):
    async with rdma_fabric(3) as fabric:
        await fabric[0, 2].send(b"to 2")
        assert await fabric[2, 0].receive() == b"to 2"
        assert len(fabric) == 3 and set(fabric.of(1)) == {{0, 2}}

async def echo(connection):
    async for message in connection:
        await connection.send(message)

{marks}
async def test_service(rdma_listener, rdma_address, rdma_device):
    async with rdma_listener(echo) as listener:
        # As a program connects that says nothing of a device.
        async with await aiordma.connect(rdma_address, listener.port) as connection:
            assert rdma_device in repr(connection)
            await connection.send(b"y")
            assert await connection.receive() == b"y"

{marks}
async def test_faults(rdma_pair, rdma_faults):
    async with rdma_pair() as (client, server):
        fault = rdma_faults.drop_connection(after_bytes=1000)
        with pytest.raises(aiordma.RdmaError):
            for _ in range(100):
                await client.send(bytes(64))
                await server.receive()
        assert fault.struck == 1
"""

LEAK = """
import aiordma, pytest
kept = []

{mark}
@pytest.mark.asyncio
async def test_leak():
    kept.append(await aiordma.listen("127.0.0.1", 0))
"""


def run(folder: Path, source: str, *words: str, settings: str = "") -> str:
    """Run pytest in a project of its own; returns what it prints."""
    (folder / "test_it.py").write_text(source)
    (folder / "pytest.ini").write_text(f"[pytest]\n{settings}\n")
    environment = {key: os.environ[key] for key in os.environ if key != "AIORDMA_DEVICE"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *QUIET, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("mark", "passed"), [("@pytest.mark.asyncio", 5), ("@pytest.mark.anyio", 10)]
)
def test_each_fixture_works_with_each_way_to_run_tests(
    mark: str, passed: int, tmp_path: Path
) -> None:
    # anyio's plugin runs each test twice: on asyncio and on trio.
    said = run(tmp_path, ALL_FIXTURES.format(marks=mark))
    assert f"{passed} passed" in said, said
    assert "failed" not in said


def test_a_leak_fails_the_test_and_says_what_was_left(tmp_path: Path) -> None:
    said = run(tmp_path, LEAK.format(mark=""), "-W", "ignore")
    assert "the test has left open: 1 connections or listeners" in said, said
    assert "1 failed" in said


@pytest.mark.parametrize(
    ("mark", "settings"),
    [("@pytest.mark.rdma_leaks('on purpose')", ""), ("", "rdma_leak_check = false")],
)
def test_a_leak_can_be_permitted(mark: str, settings: str, tmp_path: Path) -> None:
    said = run(tmp_path, LEAK.format(mark=mark), "-W", "ignore", settings=settings)
    assert "1 passed" in said, said


def test_another_device_is_required_by_name(tmp_path: Path) -> None:
    source = ALL_FIXTURES.format(marks="@pytest.mark.asyncio")
    said = run(tmp_path, source, "--rdma=rxe9", "--rdma-address=127.0.0.1", "-rs")
    assert "rxe9 has no fault injection" in said, said
    assert "4 failed, 1 skipped" in said
    assert "rxe9" in said.partition("NoDeviceError")[2]


def test_a_device_without_an_address_is_refused_in_one_line(tmp_path: Path) -> None:
    source = ALL_FIXTURES.format(marks="@pytest.mark.asyncio")
    said = run(tmp_path, source, "--rdma=rxe9", "-k", "pair")
    assert "rxe9" in said
    assert "NoDeviceError" in said


@pytest.mark.anyio
async def test_a_fabric_has_at_least_two_endpoints() -> None:
    with pytest.raises(ValueError, match="size=1"):
        async with fabric(1):
            pass


@pytest.mark.anyio
async def test_no_endpoint_is_connected_with_itself() -> None:
    async with fabric(2) as made:
        with pytest.raises(KeyError):
            made[0, 0]
        with pytest.raises(KeyError):
            made.of(2)


@pytest.mark.anyio
async def test_a_pair_that_cannot_connect_raises_the_error_itself() -> None:
    # Not a group of errors, which no caller of `connect` expects.
    with pytest.raises(aiordma.NoDeviceError, match="rxe9"):
        async with connected_pair(device="rxe9"):
            pass
