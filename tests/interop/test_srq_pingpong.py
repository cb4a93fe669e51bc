"""ibv_srq_pingpong of libibverbs: several queue pairs on one shared receive queue, without the
connection manager. Each side sends the other its LID, queue pair, first packet number and GID in a
line of text over TCP for each of 256 queue pairs, whether it has them or not, all in a row."""

import re
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream

import aiordma
from tests.device.by_hand import GID_INDEX
from tests.devices import ADDRESS, DEVICE, DeviceUnderTest
from tests.internals import SOFTWARE
from tests.interop.programs import only, running
from tests.interop.test_ud_pingpong import connect_tcp
from tests.ports import free_port

pytestmark = [pytest.mark.anyio, pytest.mark.capability("queue pairs by hand")]

PAIRS = 4
COUNT = 100
SIZE = 3000
ROUNDS = ("-q", PAIRS, "-n", COUNT, "-s", SIZE, "-r", 20)
WORDS: tuple[str | int, ...] = ("ibv_srq_pingpong", "-g", GID_INDEX, *ROUNDS)
if DEVICE == SOFTWARE:
    WORDS = (*WORDS, "-d", f"{SOFTWARE}_roce")
LINE = re.compile(r"([0-9a-f]{4}):([0-9a-f]{6}):([0-9a-f]{6}):([0-9a-f]{32})\0")
LINES = 256
LINE_LENGTH = 52

with_and_without_events = pytest.mark.parametrize(
    "options", [(), ("-e",)], ids=["polling", "events"]
)


class Players:
    """Our side: each message that comes on a queue pair is answered there, until all are sent."""

    def __init__(
        self, shared: aiordma.SharedReceiveQueue, pairs: list[aiordma.types.UnmanagedConnection]
    ) -> None:
        self.pairs = pairs
        self.heard = dict.fromkeys(pairs, 0)
        self._shared = shared
        self._memory = shared.register(bytearray(SIZE))
        self._arrivals: deque[aiordma.WorkRequest] = deque()
        self._arrived = anyio.Event()
        self._post(shared.depth)

    def _post(self, count: int) -> None:
        for request in self._shared.post_srq_recv([self._memory] * count):
            request.add_done_callback(self._arrived_now)

    def _arrived_now(self, request: aiordma.WorkRequest) -> None:
        if request.exception() is None:  # else it was left over at the end
            self._arrivals.append(request)
            self._arrived.set()

    async def _arrival(self) -> aiordma.verbs.WorkCompletion:
        while not self._arrivals:
            self._arrived = anyio.Event()
            await self._arrived.wait()
        return self._arrivals.popleft().result()

    def lines(self) -> bytes:
        lines = [
            f"{a.lid:04x}:{a.qp_num:06x}:{a.psn:06x}:{a.gid.hex()}\0".encode()
            for a in (pair.address for pair in self.pairs)
        ]
        nobody = f"{0:04x}:{0:06x}:{0:06x}:{0:032x}\0".encode()
        return b"".join(lines + [nobody] * (LINES - len(lines)))

    async def connect(self, lines: bytes) -> None:
        """Connect each to the one of the same place at the peer."""
        for pair, match in zip(self.pairs, LINE.finditer(lines.decode()), strict=False):
            lid, qp_num, psn, gid = match.groups()
            peer = aiordma.QueuePairAddress(
                int(qp_num, 16), int(psn, 16), bytes.fromhex(gid), int(lid, 16)
            )
            await pair.connect_to(peer, path_mtu=aiordma.verbs.Mtu.MTU_1024)

    async def play(self, *, first: bool) -> None:
        """Send and receive as many messages as the program does, over all queue pairs together."""
        sent = 0
        if first:
            for pair in self.pairs:
                await pair.send(bytes(SIZE))
                sent += 1
        for _ in range(COUNT):
            completion = await self._arrival()
            assert completion.byte_len == SIZE
            member = self._shared.connection_of(completion)
            assert isinstance(member, aiordma.types.UnmanagedConnection)
            self.heard[member] += 1
            self._post(1)
            if sent < COUNT:
                await member.send(bytes(SIZE))
                sent += 1
        assert sent == COUNT
        assert min(self.heard.values()) > 0


@asynccontextmanager
async def playing(device: DeviceUnderTest) -> AsyncIterator[Players]:
    async with (
        await aiordma.open_shared_receive(
            ADDRESS, device=device.by_hand, depth=20, max_sge=1
        ) as shared,
        AsyncExitStack() as open_pairs,
    ):
        pairs = [
            await open_pairs.enter_async_context(
                await aiordma.open_queue_pair(
                    device.by_hand, gid_index=GID_INDEX, shared_receive=shared
                )
            )
            for _ in range(PAIRS)
        ]
        yield Players(shared, pairs)


async def read_exactly(stream: SocketStream, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += await stream.receive(count - len(data))
    return data


@with_and_without_events
async def test_a_c_client(device: DeviceUnderTest, options: tuple[str, ...]) -> None:
    async with (
        playing(device) as ours,
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
    ):
        port = listener.extra(SocketAttribute.local_port)
        async with running(*WORDS, *options, "-p", port, "127.0.0.1", as_nobody=False) as client:
            async with await only(listener).accept() as stream:
                await ours.connect(await read_exactly(stream, LINES * LINE_LENGTH))
                await stream.send(ours.lines())
                assert await read_exactly(stream, 5) == b"done\0"
            await ours.play(first=False)
        assert f"{COUNT} iters in" in client.output


@with_and_without_events
async def test_a_c_server(device: DeviceUnderTest, options: tuple[str, ...]) -> None:
    port = free_port()
    async with playing(device) as ours:
        async with running(*WORDS, *options, "-p", port, as_nobody=False) as server:
            await server.has_written("local address", PAIRS)
            async with await connect_tcp(port) as stream:
                await stream.send(ours.lines())
                await ours.connect(await read_exactly(stream, LINES * LINE_LENGTH))
                await stream.send(b"done\0")
            await ours.play(first=True)
        assert f"{COUNT} iters in" in server.output
