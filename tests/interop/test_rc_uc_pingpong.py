"""ibv_rc_pingpong and ibv_uc_pingpong of libibverbs: queue pairs without the connection manager,
the C side with events and without."""

import re

import anyio
import pytest
from anyio.abc import SocketAttribute

import aiordma
from aiordma import QueuePairAddress
from aiordma.types import UnmanagedConnection
from aiordma.verbs import Mtu, QueuePairType
from tests.device.by_hand import GID_INDEX
from tests.devices import DEVICE, DeviceUnderTest
from tests.internals import SOFTWARE
from tests.interop.programs import only, running
from tests.interop.test_ud_pingpong import connect_tcp, read_line
from tests.ports import free_port

pytestmark = [pytest.mark.anyio, pytest.mark.capability("queue pairs by hand")]

COUNT = 100
SIZE = 3000
WORDS: tuple[str | int, ...] = ("-g", GID_INDEX, "-n", COUNT, "-s", SIZE, "-r", 10, "-c")
if DEVICE == SOFTWARE:
    WORDS = ("-d", f"{SOFTWARE}_roce", *WORDS)
LINE = re.compile(rb"([0-9a-f]{4}):([0-9a-f]{6}):([0-9a-f]{6}):([0-9a-f]{32})\0")

services = pytest.mark.parametrize(
    "service", [QueuePairType.RC, QueuePairType.UC], ids=["rc", "uc"]
)
events = pytest.mark.parametrize("options", [(), ("-e",)], ids=["polling", "events"])


def line_of(address: QueuePairAddress) -> bytes:
    numbers = f"{address.lid:04x}:{address.qp_num:06x}:{address.psn:06x}"
    return f"{numbers}:{address.gid.hex()}\0".encode()


def address_of(line: bytes) -> QueuePairAddress:
    match = LINE.fullmatch(line)
    assert match is not None, line
    lid, qp_num, psn, gid = (part.decode() for part in match.groups())
    return QueuePairAddress(int(qp_num, 16), int(psn, 16), bytes.fromhex(gid), int(lid, 16))


async def open_pair(device: DeviceUnderTest, service: QueuePairType) -> UnmanagedConnection:
    return await aiordma.open_queue_pair(device.by_hand, service=service, gid_index=GID_INDEX)


@services
@events
async def test_a_c_client(
    device: DeviceUnderTest, service: QueuePairType, options: tuple[str, ...]
) -> None:
    async with (
        await open_pair(device, service) as pair,
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
    ):
        port = listener.extra(SocketAttribute.local_port)
        program = f"ibv_{service.name.lower()}_pingpong"
        async with running(
            program, *WORDS, *options, "-p", port, "127.0.0.1", as_nobody=False
        ) as client:
            async with await only(listener).accept() as stream:
                peer = address_of(await read_line(stream))
                await pair.connect_to(peer, path_mtu=Mtu.MTU_1024)
                await stream.send(line_of(pair.address))
                assert await read_line(stream) == b"done\0"
            for _ in range(COUNT):
                message = await pair.receive()
                assert len(message) == SIZE
                await pair.send(message)
        assert f"{COUNT} iters in" in client.output


@services
@events
async def test_a_c_server(
    device: DeviceUnderTest, service: QueuePairType, options: tuple[str, ...]
) -> None:
    port = free_port()
    async with await open_pair(device, service) as pair:
        program = f"ibv_{service.name.lower()}_pingpong"
        # What it checks (-c) in the end is what it sends itself, page by page: sent back.
        async with running(program, *WORDS, *options, "-p", port, as_nobody=False) as server:
            await server.has_written("local address")
            async with await connect_tcp(port) as stream:
                await stream.send(line_of(pair.address))
                peer = address_of(await read_line(stream))
                await pair.connect_to(peer, path_mtu=Mtu.MTU_1024)
                await stream.send(b"done\0")
            message = bytes(SIZE)
            for _ in range(COUNT):
                await pair.send(message)
                message = await pair.receive()
                assert len(message) == SIZE
        assert f"{COUNT} iters in" in server.output
