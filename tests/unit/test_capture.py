"""AIORDMA_CAPTURE: the file has the traffic of the software device, whole and once."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.internals import capture
from tests.interop.wireshark import decode
from tests.unit.pcapng import ACK, SYN, Capture, frames, read_capture

WRITE, READ_REQUEST, READ_RESPONSE, SEND = range(4)
UD_SEND_ONLY = 0x64

PAIR = """
import asyncio, aiordma, aiordma.testing
from aiordma import Access

async def main():
    async with aiordma.testing.connected_pair(ADDRESS) as (client, server):
        size = SIZE
        memory = server.register(bytearray(size), Access.REMOTE_READ | Access.REMOTE_WRITE)
        await client.send(b"a message")
        assert await server.receive() == b"a message"
        await client.write(b"w" * size, memory.remote())
        await client.read(bytearray(100), memory.remote()[:100])
        await server.send(b"an answer")
        assert await client.receive() == b"an answer"

asyncio.run(main())
"""


DATAGRAM = """
import asyncio, aiordma

async def main():
    async with (
        aiordma.open_datagram(ADDRESS, 0, device="software") as one,
        aiordma.open_datagram(ADDRESS, 0, device="software") as other,
    ):
        peer = await one.resolve(ADDRESS, other.port)
        await one.send(b"a datagram", peer)
        assert (await other.receive()).data == b"a datagram"

asyncio.run(main())
"""


def run(code: str, path: Path | str, **variables: str) -> str:
    environment = {**os.environ, "AIORDMA_CAPTURE": str(path), **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def pair(path: Path, address: str = "127.0.0.1", size: int = 200_000, **variables: str) -> Capture:
    run(PAIR.replace("ADDRESS", repr(address)).replace("SIZE", str(size)), path, **variables)
    return read_capture(path)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_connection_is_captured_whole_and_once(tmp_path: Path, address: str) -> None:
    captured = pair(tmp_path / "a.pcapng", address)
    assert captured.addresses == {
        bytes([127, 0, 0, 1]) if address == "127.0.0.1" else bytes(15) + b"\1"
    }
    ((client, there), (server, back)) = captured.streams.items()
    assert client == tuple(reversed(server))
    assert captured.flags[client][:2] == [SYN, ACK]
    assert captured.flags[server][0] == SYN | ACK
    sent, answered = frames(there), frames(back)
    assert [payload for opcode, payload in sent if opcode == SEND] == [b"a message"]
    assert b"".join(payload for opcode, payload in sent if opcode == WRITE) == b"w" * 200_000
    assert [payload for opcode, payload in answered if opcode == SEND] == [b"an answer"]
    assert b"w" * 100 in [payload for opcode, payload in answered if opcode == READ_RESPONSE]
    assert captured.nanoseconds == sorted(captured.nanoseconds)


def test_both_sides_capture_the_same_bytes(tmp_path: Path) -> None:
    server = """
import asyncio, aiordma

async def main():
    async with aiordma.listen("127.0.0.1", 0, device="software") as listener:
        print(listener.port, flush=True)
        async with await listener.accept() as connection:
            async for message in connection:
                await connection.send(message[::-1])

asyncio.run(main())
"""
    client = """
import asyncio, sys, aiordma

async def main():
    async with aiordma.connect("127.0.0.1", PORT, device="software") as connection:
        for i in range(20):
            await connection.send(bytes([i]) * 1000)
            assert await connection.receive() == bytes([i]) * 1000

asyncio.run(main())
"""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    with subprocess.Popen(
        [sys.executable, "-c", server],
        env={**os.environ, "AIORDMA_CAPTURE": str(theirs)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        run(client.replace("PORT", process.stdout.readline()), ours)
        assert process.wait(30) == 0
    here, there = read_capture(ours), read_capture(theirs)
    assert len(here.streams) == 2
    for key, stream in here.streams.items():
        # The end of one side's can be unread by the other, which closes at the same time.
        assert stream.startswith(there.streams[key]) or there.streams[key].startswith(stream)
        messages = [payload for opcode, payload in frames(stream) if opcode == SEND]
        assert messages == [bytes([i]) * 1000 for i in range(20)]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_datagram_is_captured_once(tmp_path: Path, address: str) -> None:
    run(DATAGRAM.replace("ADDRESS", repr(address)), tmp_path / "a")
    packets = [packet for _, _, packet in read_capture(tmp_path / "a").datagrams]
    (ours,) = [packet for packet in packets if b"a datagram" in packet]
    assert ours[0] == UD_SEND_ONLY
    assert ours[20:30] == b"a datagram"


def test_a_capture_ends_at_its_limit_with_a_whole_packet(tmp_path: Path) -> None:
    path = tmp_path / "a"
    captured = pair(path, size=3 << 20, AIORDMA_CAPTURE_MIB="1")
    assert (1 << 20) - 40_000 < path.stat().st_size <= 1 << 20
    assert sum(map(len, captured.streams.values())) > 900_000


def test_each_process_has_a_file_by_its_number(tmp_path: Path) -> None:
    code = PAIR.replace("ADDRESS", "'127.0.0.1'").replace("SIZE", "100")
    code += (
        "\nimport os\nif os.fork():\n    assert os.wait()[1] == 0\nelse:\n    asyncio.run(main())\n"
    )
    run(code, tmp_path / "all.%p")
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    for file in files:
        assert len(read_capture(file).streams) == 2
    run(code, tmp_path / "parent")
    assert len(read_capture(tmp_path / "parent").streams) == 2


@pytest.mark.parametrize("mib", ["0", "-1", "many", ""])
def test_a_limit_that_is_no_number_of_mib_is_refused(mib: str) -> None:
    with pytest.raises(ValueError, match="AIORDMA_CAPTURE_MIB="):
        capture("/dev/null", mib)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"AIORDMA_CAPTURE=.*No such file or directory"):
        capture(str(tmp_path / "missing" / "a"), "1")


def test_a_full_file_system_is_named() -> None:
    with pytest.raises(ValueError, match=r"AIORDMA_CAPTURE='/dev/full'.*No space left"):
        capture("/dev/full", "1")


needs_tshark = pytest.mark.skipif(
    shutil.which("tshark") is None,
    reason="this machine lacks tshark: apt-get install tshark, as `make test` does",
)


@needs_tshark
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_wireshark_decodes_a_captured_connection(tmp_path: Path, address: str) -> None:
    path = tmp_path / "a.pcapng"
    pair(path, address)
    decoded = await decode(path, with_sums=False)
    assert decoded.faults() == []
    assert sum("iwarp_mpa.key.req" in packet for packet in decoded.packets) == 1
    assert sum("iwarp_mpa.key.rep" in packet for packet in decoded.packets) == 1
    codes = decoded.opcodes()
    assert set(codes) == {WRITE, READ_REQUEST, READ_RESPONSE, SEND}
    assert codes.count(SEND) == 2
    assert codes.count(WRITE) >= 200_000 // 65_536


@needs_tshark
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_wireshark_decodes_a_captured_datagram(tmp_path: Path) -> None:
    path = tmp_path / "a.pcapng"
    run(DATAGRAM.replace("ADDRESS", "'127.0.0.1'"), path)
    # As docs/observability.md says: their ports are not those of RoCE v2.
    (port,) = [there for _, there, packet in read_capture(path).datagrams if b"a dat" in packet]
    decoded = await decode(path, False, "-d", f"udp.port=={port},infiniband")
    assert decoded.faults() == []
    found = [code for packet in decoded.packets for code in packet.get("infiniband.bth.opcode", ())]
    assert [int(code, 0) for code in found] == [UD_SEND_ONLY]
