"""A world of `rsocket_driver` whose rsocket's data path is the engine's. The engine gives its work
requests to functions of this module, in place of a device."""

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from aiordma import RemoteMemory
from aiordma._native import (
    DATA_PATH,
    Drain,
    InFlightTable,
    OpenRequests,
    Pool,
    Port,
    RegionBase,
    Slots,
    StreamPath,
)
from aiordma.streams.path import Memory as StreamMemory
from tests.fuzz.rsocket_driver import TRANSFER, Memory, World
from tests.internals import engine

__all__ = ("EngineWorld",)

WRITE, WRITE_WITH_IMMEDIATE, SEND = 0, 1, 2
"""enum ibv_wr_opcode."""


class Sge(ctypes.Structure):
    _fields_ = [
        ("address", ctypes.c_uint64),
        ("length", ctypes.c_uint32),
        ("lkey", ctypes.c_uint32),
    ]


class SendWork(ctypes.Structure):
    """The beginning of struct ibv_send_wr."""


SendWork._fields_ = [
    ("wr_id", ctypes.c_uint64),
    ("next", ctypes.POINTER(SendWork)),
    ("sges", ctypes.POINTER(Sge)),
    ("count", ctypes.c_int),
    ("opcode", ctypes.c_int),
    ("flags", ctypes.c_uint),
    ("immediate", ctypes.c_uint32),
    ("remote_address", ctypes.c_uint64),
    ("rkey", ctypes.c_uint32),
]


class ReceiveWork(ctypes.Structure):
    """struct ibv_recv_wr."""


ReceiveWork._fields_ = [
    ("wr_id", ctypes.c_uint64),
    ("next", ctypes.POINTER(ReceiveWork)),
    ("sges", ctypes.POINTER(Sge)),
    ("count", ctypes.c_int),
]

POST_SENDS = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(SendWork), ctypes.c_void_p
)
POST_RECEIVES = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ReceiveWork), ctypes.c_void_p
)
POLL_QUEUES = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class DataPath(ctypes.Structure):
    """struct aiordma_data_path."""

    _fields_ = [
        ("take_events", ctypes.c_void_p),
        ("arm_queues", ctypes.c_void_p),
        ("poll_queues", POLL_QUEUES),
        ("post_sends", POST_SENDS),
        ("post_receives", POST_RECEIVES),
        ("fill_sends", ctypes.c_void_p),
    ]


class Region(RegionBase):
    """Stands for a region; its addresses are those that `Memory` chooses."""

    memory: Memory
    rkey = 7

    @classmethod
    def register(cls, buffer: bytearray, domain: object) -> "Region":
        made = cls()
        made.memory = Memory.register(buffer)
        made.domain, made.lkey = domain, 5
        made.address, made.length = made.memory.remote().address, len(buffer)
        made._usable = made._writable = True
        return made

    def __getitem__(self, where: slice) -> Memory:
        return self.memory[where]

    @property
    def view(self) -> memoryview:
        return self.memory.view


class Request:
    """One of the engine's requests, as the driver completes it."""

    def __init__(self, world: "EngineWorld", wr_id: int) -> None:
        self._world, self._wr_id = world, wr_id

    def complete(self, completion: Any = None, error: Exception | None = None) -> None:
        request: Any = self._world.table.take(self._wr_id)
        if error is not None:
            request._fail(error)
            return
        opcode, length, immediate = 0, 0, 0
        if completion is not None:
            opcode, length = completion.opcode, completion.byte_len
            immediate = completion.immediate
        request._complete((self._wr_id, 0, opcode, 0, length, immediate, *(0,) * 8))


class EngineWorld(World):
    """See the module."""

    current: "EngineWorld | None" = None

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.table: InFlightTable = InFlightTable()
        owner = SimpleNamespace(loop=None, request_failed=None, doorbell_failed=None)
        hub = SimpleNamespace(watch_over=lambda: None, drain_soon=lambda: None)
        self.domain = object()
        self.send_slots, self.receive_slots = Slots(), Slots()
        self.send_slots.total = self.send_slots.free = self.options.max_send_wr
        self.receive_slots.total = self.receive_slots.free = self.options.max_recv_wr
        self.drain = Drain(hub, 0, 0, self.table)
        self.port = Port(
            owner,
            self.drain,
            self.send_slots,
            self.receive_slots,
            OpenRequests(),
            self._endpoint.loop and self._endpoint.loop.asyncio_loop,
            self.domain,
        )
        self.port.open(1, 1 << 30, 0, 4, 4, 4, Pool())
        self.port.ready = self.port.can_receive = True

    @contextmanager
    def running(self) -> Iterator[None]:
        EngineWorld.current = self
        engine.use_data_path(ctypes.addressof(_TABLE))
        try:
            yield
        finally:
            engine.use_data_path(DATA_PATH)
            EngineWorld.current = None

    def register(self, buffer: bytearray, _access: object = None) -> Any:
        region = Region.register(buffer, self.domain)
        self.registered.append(region.memory)
        return region

    def path(self, memory: StreamMemory) -> StreamPath:
        return StreamPath(
            port=self.port,
            lent=memory.lent,
            lent_memory=memory.lent_bytes,
            lent_rkey=memory.lent.rkey,
            ours=memory.ours,
            our_memory=memory.our_bytes,
            ring=memory.ring_bytes,
            receives=self.options.max_recv_wr,
            depth=self.options.max_send_wr,
            transfer=TRANSFER,
            uses_words=self.uses_words,
        )

    def end(self, error: Exception) -> None:
        self.port.ready = self.port.can_receive = False
        super().end(error)

    # -- what the engine calls --------------------------------------------------------------------

    def bytes_of(self, work: SendWork | ReceiveWork) -> bytes:
        sent = b""
        for number in range(work.count):
            sge = work.sges[number]
            memory = self._memory_at(sge.address, sge.length)
            sent += bytes(memory)
        return sent

    def _memory_at(self, address: int, length: int) -> Memory:
        for memory in self.registered:
            start = address - memory.remote().address
            if 0 <= start <= start + length <= len(memory):
                return memory[start : start + length]
        raise AssertionError(f"{address:#x} is not registered")

    def take_send(self, work: SendWork) -> None:
        data = self.bytes_of(work)
        if work.opcode == SEND:
            self._accept_word(data)
        else:
            target = RemoteMemory(work.remote_address, len(data), work.rkey)
            immediate = None
            if work.opcode == WRITE_WITH_IMMEDIATE:
                (immediate,) = struct.unpack(">I", struct.pack("=I", work.immediate))
            self._accept_write(data, target, immediate)
        self._enqueue(Request(self, work.wr_id))

    def take_receive(self, work: ReceiveWork) -> None:
        assert len(self.receives) < self.options.max_recv_wr
        assert work.count == 1
        place = self._memory_at(work.sges[0].address, work.sges[0].length)
        self.receives.append((Request(self, work.wr_id), place))


def _take_all(take: str, first: Any) -> int:
    world = EngineWorld.current
    assert world is not None
    try:
        while first:
            getattr(world, take)(first.contents)
            first = first.contents.next
    except BaseException as fault:
        world.faults.append(fault)  # ctypes would only print it
    return 0


_TABLE = DataPath(
    poll_queues=POLL_QUEUES(lambda _drain: 0),  # `Request.complete` brings what there is
    post_sends=POST_SENDS(lambda _pair, first, _refused: _take_all("take_send", first)),
    post_receives=POST_RECEIVES(
        lambda _pair, _shared, first, _refused: _take_all("take_receive", first)
    ),
)
