"""The rings of a stream grow with the traffic, and no byte is lost, doubled or moved then."""

import struct
from collections import deque
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from aiordma import RemoteMemory
from aiordma.streams.protocol import GRANT_BYTES, TABLE_ENTRIES, Hello
from aiordma.verbs import WorkCompletionOpcode
from tests.fuzz.engine_world import EngineWorld
from tests.fuzz.model_protocol import Operation
from tests.fuzz.rsocket_driver import DEPTH, RING, TABLE, TABLE_ADDRESS, TABLE_KEY, Memory

GROWN = 160
ARRIVED = WorkCompletionOpcode.RECV_RDMA_WITH_IMM


class World(EngineWorld):
    """Checks that the memory of a message stays as it is until it has completed."""

    def __init__(self) -> None:
        super().__init__(uses_words=False)
        self.sources: deque[list[tuple[Memory, bytes]]] = deque()

    def take_send(self, work: Any) -> None:
        parts = [work.sges[number] for number in range(work.count)]
        memory = [self._memory_at(part.address, part.length) for part in parts]
        self.sources.append([(each, bytes(each)) for each in memory])
        super().take_send(work)

    def complete(self) -> None:
        """Complete the oldest message, if there is one."""
        if self.sends:
            assert all(bytes(memory) == data for memory, data in self.sources.popleft())
            self.sends.popleft().complete()


class Player:
    """A correct peer, a device and a program."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rsocket = world.rsocket()
        self.path = self.rsocket.path
        self.lent = deque([Hello.unpack(self.rsocket.hello()).buffer])  # to the peer
        table = RemoteMemory(TABLE_ADDRESS, TABLE, TABLE_KEY)
        hello = Hello(DEPTH, table, RemoteMemory(0x500000, RING // 2, 5))
        self.rsocket.start(hello.pack())
        self.world.permitted = DEPTH
        self.world.lent.append(hello.buffer)
        self.rsocket.begin(is_first=True)
        self.seen = self.arrived = self.read = self.written = 0
        self.messages, self.limit = 0, DEPTH  # of the peer's
        self.table_entry = 1
        self.ring_bytes = {False: RING, True: RING}  # inwards, outwards
        self.steps = (
            *(self.arrive, self.arrive, self.take, self.feed, self.write, self.write),
            *(self.complete, self.complete, self.lend, self.grow_inwards, self.grow_outwards),
        )

    def play(self, choices: list[tuple[int, int]]) -> None:
        """Play the steps, and then the rest of what is under way."""
        for step, number in choices:
            self.steps[step % len(self.steps)](number)
            self.look()
        self.take(1 << 20)
        assert self.read == self.arrived
        assert bytes(self.world.payload) == bytes(n & 0xFF for n in range(self.written))

    def look(self) -> None:
        """See what this side has granted."""
        if self.world.faults:
            raise self.world.faults[0]
        assert self.world.failure is None
        assert 0 <= self.path.free_bytes <= self.ring_bytes[True]
        for entry in self.world.done[self.seen :]:
            assert isinstance(entry, tuple)
            data, target, immediate = entry
            if target.rkey == TABLE_KEY and target.length == GRANT_BYTES:
                address, rkey, length = struct.unpack("=QII", data)
                self.lent.append(RemoteMemory(address, length, rkey))
                assert len(self.lent) <= TABLE_ENTRIES
            if immediate is not None and immediate >> 29 == Operation.GRANT:
                self.limit = immediate & 0x1FFFFFFF
        self.seen = len(self.world.done)

    def message(self, immediate: int, length: int) -> None:
        request, _ = self.world.receives.popleft()
        request.complete(
            SimpleNamespace(
                immediate=immediate, byte_len=length, opcode=int(ARRIVED), operation=ARRIVED
            )
        )

    def arrive(self, number: int) -> None:
        """The peer writes to the memory that it was lent."""
        if not self.lent or self.messages == self.limit:
            return
        self.messages += 1
        first = self.lent[0]
        length = min(1 + number, first.length)
        memory = self.world._memory_at(first.address, length)
        memory.view[:] = bytes(n & 0xFF for n in range(self.arrived, self.arrived + length))
        self.lent[0] = first[length:]
        if not self.lent[0].length:
            self.lent.popleft()
        self.arrived += length
        self.message(Operation.DATA << 29 | length, length)

    def take(self, number: int) -> None:
        """The program reads."""
        data = self.path.read(1 + number)
        assert data == bytes(n & 0xFF for n in range(self.read, self.read + len(data)))
        self.read += len(data)

    def feed(self, number: int) -> None:
        """The program copies from a view."""
        taken = bytearray()
        length = self.path.feed(taken.extend, 1 + number)
        assert length == len(taken)
        assert taken == bytes(n & 0xFF for n in range(self.read, self.read + length))
        self.read += length

    def write(self, number: int) -> None:
        """The program writes."""
        data = bytes(n & 0xFF for n in range(self.written, self.written + number))
        self.written += self.rsocket.write(data)

    def complete(self, _number: int) -> None:
        self.world.complete()

    def lend(self, number: int) -> None:
        """The peer grants memory, as its program reads."""
        if len(self.world.lent) < TABLE_ENTRIES:
            address, length = 0x600000 + (number << 12), RING // 2 + number
            start = RING + self.table_entry * GRANT_BYTES
            entry = struct.pack("=QII", address, 5, length)
            self.world.registered[0].view[start : start + GRANT_BYTES] = entry
            self.table_entry = (self.table_entry + 1) % TABLE_ENTRIES
            self.world.lent.append(RemoteMemory(address, length, 5))
        self.world.permitted = DEPTH
        self.message(Operation.GRANT << 29 | (self.world.sent + DEPTH & 0xFFFF), 0)

    def grow_inwards(self, number: int) -> None:
        self.grow(False, number)

    def grow_outwards(self, number: int) -> None:
        self.grow(True, number)

    def grow(self, outwards: bool, number: int) -> None:
        """Give a larger ring, once for each direction."""
        if self.ring_bytes[outwards] == RING:
            self.ring_bytes[outwards] = GROWN + 2 * number
            memory = bytearray(GROWN + 2 * number)
            region = self.world.register(memory)
            self.path.grow(outwards, region, memory, region.lkey if outwards else region.rkey)


STEPS = st.lists(st.tuples(st.integers(0, 10), st.integers(0, 100)), min_size=20, max_size=400)


@given(STEPS)
def test_bytes_are_exact_whenever_the_rings_grow(choices: list[tuple[int, int]]) -> None:
    world = World()
    with world.running():
        Player(world).play(choices)
