"""What the software device puts on the wire, as Wireshark understands it: MPA, DDP and RDMAP."""

import contextlib
import shutil
import struct
from collections import Counter
from contextlib import AsyncExitStack

import anyio
import anyio.abc
import pytest
from anyio.abc import SocketStream

import aiordma
from aiordma import Access
from tests.connections import connect_to
from tests.devices import ADDRESS, DeviceUnderTest
from tests.interop.wireshark import captured

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.capability("iwarp"),
    pytest.mark.skipif(
        shutil.which("tshark") is None,
        reason="this machine lacks tshark: apt-get install tshark, as `make test` does",
    ),
]

SOFTWARE = "software"
PEER = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC

(WRITE, READ_REQUEST, READ_RESPONSE, SEND, SEND_INVALIDATE, SEND_SOLICITED, SEND_BOTH, TERMINATE,
 IMMEDIATE, IMMEDIATE_SOLICITED, ATOMIC_REQUEST, ATOMIC_RESPONSE) = range(12)  # fmt: skip


@pytest.mark.natively
async def test_every_operation_between_two_of_the_software_device() -> None:
    async with AsyncExitStack() as stack:
        listener = await stack.enter_async_context(
            await aiordma.listen(ADDRESS, 0, device=SOFTWARE)
        )
        async with captured(listener.port) as capture:
            client, server = await connect_to(listener, ADDRESS, device=SOFTWARE)
            async with client, server:
                await everything(client, server)
    decoded = capture.decoded
    assert decoded.faults() == []
    counted = Counter(decoded.opcodes())
    assert set(counted) == set(range(12))
    # What is long takes many frames; of what is one frame each there are as many as were asked for.
    assert counted[SEND_INVALIDATE] == counted[SEND_BOTH] == 1
    assert counted[SEND_SOLICITED] == 1
    assert counted[ATOMIC_REQUEST] == counted[ATOMIC_RESPONSE] == 2
    assert counted[TERMINATE] == 1
    assert sum("iwarp_mpa.key.req" in packet for packet in decoded.packets) == 1
    assert sum("iwarp_mpa.key.rep" in packet for packet in decoded.packets) == 1


async def everything(client: aiordma.Connection, server: aiordma.Connection) -> None:
    """Each operation at least once; in the end one that is refused."""
    await client.send(b"plain")
    await client.post_send(b"it wakes", solicited=True)
    await client.send(b"beside it", immediate=7)
    await server.send(bytes(range(256)) * 50)
    for _ in range(3):
        await server.receive()
    await client.receive()
    memory = bytearray(1 << 18)
    region = server.register(memory, PEER)
    remote = region.remote()
    await client.write(bytes(range(256)) * 1024, remote)
    assert await client.read_bytes(remote) == bytes(range(256)) * 1024
    await client.write(b"with a number", remote[:13], immediate=9)
    await client.post_write(b"and loud", remote[:8], immediate=10, solicited=True)
    for number in (9, 10):
        assert (await server.receive_message()).immediate == number
    assert await client.fetch_add(remote[:8], 1) == struct.unpack("=Q", b"and loud")[0]
    await client.compare_swap(remote[8:16], 1, 2)
    bindable = server.register(bytearray(64), Access.LOCAL_WRITE | Access.MW_BIND)
    for solicited in (False, True):
        window = await server.bind(bindable[:], Access.REMOTE_WRITE)
        await client.post_send(b"done", invalidate=window.remote.rkey, solicited=solicited)
        await server.receive_message()
        window.mark_invalidated()
        window.close()
    region.close()
    with pytest.raises(aiordma.RdmaError):
        await client.read_bytes(remote[:1])


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return ~crc & 0xFFFFFFFF


def framed(message: bytes, number: int, spoilt: int = 0) -> bytes:
    """A SEND in one frame, with its sum, or with another one."""
    header = struct.pack(">HBBIIII", 18 + len(message), 0x41, 0x43, 0, 0, number, 0)
    frame = header + message + bytes(-(len(header) + len(message)) % 4)
    return frame + struct.pack("<I", crc32c(frame) ^ spoilt)


@pytest.mark.natively
@pytest.mark.parametrize("spoilt", [0, 1], ids=["right", "wrong"])
async def test_sums_are_right_where_the_peer_asks_for_them(spoilt: int) -> None:
    """The peer is a plain socket, since the software device leaves sums out on its own machine."""
    reply_with_sums = (
        b"MPA ID Rep Frame" + bytes([0x50, 2, 0, 4]) + struct.pack(">HH", 0x8004, 0x8004)
    )
    posted, gone = anyio.Event(), anyio.Event()

    async def be_the_peer(stream: SocketStream) -> None:
        async with stream:
            assert (await stream.receive()).startswith(b"MPA ID Req Frame")
            await stream.send(reply_with_sums)
            await posted.wait()
            await stream.send(framed(b"pong", 1) + framed(b"pong!", 2, spoilt))
            with contextlib.suppress(anyio.EndOfStream):
                while True:
                    await stream.receive()
        gone.set()

    listener = await anyio.create_tcp_listener(local_host=ADDRESS)
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, be_the_peer)
        async with captured(port, with_sums=True) as capture:
            async with await aiordma.connect(ADDRESS, port, device=SOFTWARE) as connection:
                for size in range(8):
                    await connection.send(bytes(size))
                posted.set()
                assert await connection.receive() == b"pong"
                if spoilt:
                    with pytest.raises((aiordma.RdmaError, anyio.EndOfStream)):
                        await connection.receive()
                else:
                    assert await connection.receive() == b"pong!"
            await gone.wait()
        group.cancel_scope.cancel()
    decoded = capture.decoded
    assert len(decoded.sums) == len(decoded.opcodes()) >= 8 + 2 + 1 + spoilt
    assert decoded.opcodes().count(TERMINATE) == spoilt
    # tshark sees one wrong sum, if one was wrong: the device's own are all right.
    assert len(decoded.faults()) == spoilt


@pytest.fixture(params=["software to siw", "siw to software"])
def direction(request: pytest.FixtureRequest, device: DeviceUnderTest) -> tuple[str, str]:
    names = (SOFTWARE, device.name)
    return names if request.param == "software to siw" else names[::-1]


@pytest.mark.capability("kernel")
async def test_what_siw_and_the_software_device_say_to_each_other(
    direction: tuple[str, str],
) -> None:
    async with (
        await aiordma.listen(ADDRESS, 0, device=direction[1]) as listener,
        captured(listener.port) as capture,
    ):
        clients: list[aiordma.Connection] = []

        async def connect() -> None:
            client = await aiordma.connect(ADDRESS, listener.port, device=direction[0])
            clients.append(client)
            await client.send(b"first")

        async with anyio.create_task_group() as group:
            group.start_soon(connect)
            server = await listener.accept()
        async with clients[0] as client, server:
            await what_siw_can(client, server)
            await what_siw_can(server, client)
    decoded = capture.decoded
    assert decoded.faults() == []
    assert {WRITE, READ_REQUEST, READ_RESPONSE, SEND} <= set(decoded.opcodes())
    assert sum("iwarp_mpa.key.req" in packet for packet in decoded.packets) == 1
    assert sum("iwarp_mpa.key.rep" in packet for packet in decoded.packets) == 1


async def what_siw_can(one: aiordma.Connection, other: aiordma.Connection) -> None:
    there = bytearray(100_000)
    remote = other.register(there, Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE)
    await one.send(b"plain")
    await one.post_send(b"it wakes", solicited=True)
    await one.write(b"x" * len(there), remote.remote())
    assert await one.read_bytes(remote.remote()) == b"x" * len(there)
