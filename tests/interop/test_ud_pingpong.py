"""ibv_ud_pingpong of libibverbs: datagrams without the connection manager. Each side sends the
other its LID, queue pair, first packet number and GID in a line of text over TCP."""

import re

import anyio
import pytest
from anyio.abc import SocketStream

import aiordma
from tests.devices import ADDRESS
from tests.interop.programs import only, running
from tests.ports import free_port

pytestmark = [pytest.mark.anyio, pytest.mark.capability("datagrams")]

QKEY = 0x11111111
COUNT = 100
SIZE = 1000
WORDS = ("-g", 1, "-n", COUNT, "-s", SIZE, "-r", 10)
LINE = re.compile(rb"([0-9a-f]{4}):([0-9a-f]{6}):[0-9a-f]{6}:([0-9a-f]{32})\0")


def line_of(socket: aiordma.Datagram) -> bytes:
    return f"{socket.lid:04x}:{socket.qp_num:06x}:{0:06x}:{socket.gid.hex()}\0".encode()


def peer_of(socket: aiordma.Datagram, line: bytes) -> aiordma.DatagramPeer:
    match = LINE.fullmatch(line)
    assert match is not None, line
    lid, qp_num, gid = match.groups()
    return socket.peer(bytes.fromhex(gid.decode()), int(qp_num, 16), lid=int(lid, 16))


async def read_line(stream: SocketStream) -> bytes:
    line = b""
    while not line.endswith(b"\0"):
        line += await stream.receive(1)
    return line


@pytest.mark.promise("A datagram arrives whole or not at all")
@pytest.mark.parametrize("options", [(), ("-e",)], ids=["polling", "events"])
async def test_a_c_client(options: tuple[str, ...]) -> None:
    async with (
        await aiordma.open_datagram(ADDRESS, qkey=QKEY) as socket,
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
    ):
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        words: list[str | int] = [*WORDS, *options, "-p", port, "127.0.0.1"]
        async with (
            running("ibv_ud_pingpong", *words) as client,
            await only(listener).accept() as stream,
        ):
            peer = peer_of(socket, await read_line(stream))
            await stream.send(line_of(socket))
            assert await read_line(stream) == b"done\0"
            for _ in range(COUNT):
                message = await socket.receive()
                assert len(message.data) == SIZE
                await socket.send(message.data, peer)
        assert f"{COUNT} iters in" in client.output


@pytest.mark.promise("A datagram arrives whole or not at all")
@pytest.mark.parametrize("options", [(), ("-e",)], ids=["polling", "events"])
async def test_a_c_server(options: tuple[str, ...]) -> None:
    port = free_port()
    async with await aiordma.open_datagram(ADDRESS, qkey=QKEY) as socket:
        async with running("ibv_ud_pingpong", *WORDS, *options, "-p", port) as server:
            await server.has_written("local address")
            async with await connect_tcp(port) as stream:
                await stream.send(line_of(socket))
                peer = peer_of(socket, await read_line(stream))
                await stream.send(b"done\0")
            for _ in range(COUNT):
                await socket.send(bytes(SIZE), peer)
                message = await socket.receive()
                assert (len(message.data), message.source) == (SIZE, peer)
        assert f"{COUNT} iters in" in server.output


async def connect_tcp(port: int) -> SocketStream:
    """Connect to a program that says that it is there before it listens."""
    while True:
        try:
            return await anyio.connect_tcp("127.0.0.1", port)
        except OSError:
            await anyio.sleep(0.05)
