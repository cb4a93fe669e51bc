"""Arrays and tensors on a GPU, registered or staged, with a stand-in for CUDA's driver
(tests/native/cuda.c).

The stand-in's memory is a file in memory, and its addresses are none of this process's.
"""

import ctypes
import gc
import mmap
import os
import random
import subprocess
import time
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import aiordma
from aiordma import Access
from aiordma.integrations import arrays
from aiordma.integrations.arrays import ArrayError
from aiordma.verbs import cuda, gpu_memory
from aiordma.verbs.cuda import PinnedMemory
from tests.device.dmabufs import Pages, pages
from tests.device.players import REMOTE, connected, one_loop
from tests.devices import ADDRESS, DeviceUnderTest
from tests.internals import gpu_staging
from tests.unit.test_native import WITHOUT_RUNTIME

pytestmark = [pytest.mark.anyio, pytest.mark.natively]

PAGE = mmap.PAGESIZE
BASE = 0x2000_0000_0000
SOURCE = Path(__file__).parents[1] / "native" / "cuda.c"
INVALID_VALUE, NOT_SUPPORTED = 1, 801
CUDA, MANAGED, ROCM = 2, 13, 10
"""Devices of DLPack."""


class StandIn(ctypes.Structure):
    """struct stand_in"""

    _fields_ = (
        ("address", ctypes.c_ulonglong),
        ("fd", ctypes.c_int),
        ("error", ctypes.c_int),
        ("asked_address", ctypes.c_ulonglong),
        ("asked_size", ctypes.c_size_t),
        ("copy_error", ctypes.c_int),
        ("retained", ctypes.c_int),
        ("pinned", ctypes.c_void_p),
        ("pinned_size", ctypes.c_size_t),
    )


def compiled(folder: Path, *flags: str) -> Path:
    made = folder / "libcuda.so.1"
    folder.mkdir(exist_ok=True)
    command = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", *flags, str(SOURCE), "-o", str(made)]
    subprocess.run(command, env=WITHOUT_RUNTIME, check=True)
    return made


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("cuda"))


class Gpu:
    """The memory of the stand-in."""

    def __init__(self, memory: Pages, library: Path) -> None:
        self.memory = memory
        self.state = StandIn.in_dll(ctypes.CDLL(str(library)), "stand_in")
        self.state.address, self.state.fd = BASE, memory.fd
        self.state.error = self.state.copy_error = 0

    def bytes_of(self, tensor: Any) -> bytes:
        start = tensor.pointer - BASE
        return self.memory.bytes[start : start + tensor.nbytes]


@pytest.fixture
def gpu(driver: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    monkeypatch.setattr(cuda, "LIBRARY", str(driver))
    before = set(os.listdir("/proc/self/fd"))
    with pages(4) as memory:
        yield Gpu(memory, driver)
    gc.collect()
    left = {fd for fd in os.listdir("/proc/self/fd") if fd not in before}
    assert [fd for fd in left if "memfd" in _target(fd)] == []


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


class Tensor:
    """Memory on the GPU: `pointer`, and what the interfaces say of it."""

    def __init__(
        self,
        offset: int = 256,
        shape: tuple[int, ...] = (1000,),
        strides: tuple[int, ...] | None = None,
        *,
        item: int = 1,
        readonly: bool = False,
    ) -> None:
        self.pointer = BASE + offset
        self.shape, self.strides, self.item, self.readonly = shape, strides, item, readonly
        self.nbytes = item
        for count in shape:
            self.nbytes *= count


class WithInterface(Tensor):
    """An array with Numba's interface only."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "data": (self.pointer, self.readonly),
            "shape": self.shape,
            "strides": self.strides,
            "typestr": f"|u{self.item}",
            "version": 3,
        }


class DLTensor(ctypes.Structure):
    """struct DLManagedTensor, which begins with its struct DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class WithDLPack(Tensor):
    """A tensor of a library that knows no DLPack 1.0."""

    device = CUDA

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __dlpack__(self, stream: int | None = None) -> Any:
        assert stream == -1, "nothing is to be waited for"
        count = len(self.shape)
        numbers = ctypes.c_int64 * count
        strides = None if self.strides is None else [each // self.item for each in self.strides]
        self.described = DLTensor(
            data=self.pointer - 64,
            device_type=self.device,
            ndim=count,
            code=1,
            bits=8 * self.item,
            lanes=1,
            shape=numbers(*self.shape),
            strides=None if strides is None else numbers(*strides),
            byte_offset=64,
        )
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self.described), b"dltensor", None)


class LikeJax(WithDLPack):
    """A tensor of a library that takes the stream of -1 for a handle."""

    def __dlpack__(self, stream: int | None = None) -> Any:
        if stream is not None:
            raise RuntimeError("CUDA_ERROR_INVALID_HANDLE: invalid resource handle")
        return super().__dlpack__(-1)


class OnRocm(WithDLPack):
    """A tensor on a GPU of another maker."""

    device = ROCM


class Managed(WithDLPack):
    """A tensor in memory that moves between the CPU and the GPU."""

    device = MANAGED


KINDS: list[Any] = [WithInterface, WithDLPack, LikeJax]


@pytest.mark.promise("The CPU does not access memory of other devices")
@pytest.mark.parametrize("kind", KINDS)
async def test_peer_reads_and_writes_the_tensor(gpu: Gpu, kind: Any) -> None:
    tensor = kind()
    async with connected() as (client, server):
        region = server.register(tensor, REMOTE)
        assert isinstance(region, aiordma.verbs.DmabufRegion)
        assert (region.address, region.length) == (tensor.pointer, 1000)
        await client.write(b"g" * 1000, region.remote())
        assert gpu.bytes_of(tensor) == b"g" * 1000
        assert gpu.memory.bytes[:] == bytes(256) + b"g" * 1000 + bytes(4 * PAGE - 1256)
        assert await client.read_bytes(region[:3].remote()) == b"ggg"
        await server.send(region[:5])
        assert await client.receive() == b"ggggg"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("offset", "shape", "size"),
    [
        (0, (1,), PAGE),
        (256, (PAGE - 256,), PAGE),
        (256, (PAGE - 255,), 2 * PAGE),
        (8, (2, 600), PAGE),
    ],
)
async def test_pages_of_the_tensor_are_exported(
    gpu: Gpu, kind: Any, offset: int, shape: tuple[int, ...], size: int
) -> None:
    async with connected() as (client, _):
        client.register(kind(offset, shape))
        assert (gpu.state.asked_address, gpu.state.asked_size) == (BASE, size)


@pytest.mark.parametrize("kind", KINDS)
async def test_every_registering_call_takes_a_tensor(gpu: Gpu, kind: Any) -> None:
    async with aiordma.open_domain(ADDRESS) as domain:
        async with connected(server={"domain": domain}) as (client, server):
            regions = [
                domain.register(kind(), REMOTE),
                await server.register_in_thread(kind(), REMOTE),
            ]
            for number, region in enumerate(regions):
                await client.write(bytes([number]), region[number : number + 1].remote())
            assert gpu.bytes_of(kind())[:2] == b"\0\1"
        async with aiordma.open_shared_receive(ADDRESS, domain=domain) as shared:
            tensor: Any = kind()
            assert shared.register(tensor).address == tensor.pointer


@pytest.mark.promise("The CPU does not access memory of other devices")
@pytest.mark.parametrize("kind", KINDS)
async def test_region_keeps_the_tensor_and_gives_it_back(gpu: Gpu, kind: Any) -> None:
    tensor = kind()
    gone = weakref.ref(tensor)
    async with connected() as (client, _):
        region = client.register(tensor)
        if kind is WithInterface:  # a capsule without a destructor keeps nothing
            del tensor
            gc.collect()
            assert gone() is not None
        region.close()
        tensor = None
        gc.collect()
        assert gone() is None


class Lent(WithInterface):
    """One that is counted."""


def test_tensor_outlives_a_collected_region_in_use(gpu: Gpu) -> None:
    """A GPU's allocator could give the tensor's memory to another one, while the device writes."""

    def forget() -> None:
        domain = aiordma.verbs.ProtectionDomain(aiordma.verbs.Device("software").open())
        gpu_memory.register_anywhere(domain, Lent(), None)[:]._hold()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        forget()
        gc.collect()
    # A weak reference would be cleared: the collector found the tensor, which was then kept.
    assert [type(each) for each in gc.get_objects() if isinstance(each, Lent)] == [Lent]


@pytest.mark.promise("The CPU does not access memory of other devices")
async def test_read_only_tensor_permits_no_writing(gpu: Gpu) -> None:
    tensor = WithInterface(readonly=True)
    async with connected() as (client, server):
        await client.send(b"first")
        region = server.register(tensor)
        assert region.access == Access(0)
        with pytest.raises(TypeError, match="WithInterface is read-only"):
            server.register(tensor, Access.REMOTE_WRITE)
        async with server.grant(region, Access.REMOTE_READ) as grant:
            assert await client.read_bytes(grant.remote) == bytes(1000)
        with pytest.raises(TypeError, match="is read-only"):
            await server.grant(region, Access.REMOTE_WRITE)


@pytest.mark.parametrize("kind", KINDS)
async def test_part_of_a_tensor_is_registered_if_it_is_contiguous(gpu: Gpu, kind: Any) -> None:
    async with connected() as (client, _):
        region = client.register(kind(0, (4, 8), (32, 4), item=4))
        assert region.length == 128
        assert client.register(kind(0, (4, 8), (4, 16), item=4)).length == 128  # Fortran's order
        with pytest.raises(ValueError, match="not contiguous"):
            client.register(kind(0, (4, 4), (32, 4), item=4))
        with pytest.raises(ValueError, match="an empty buffer"):
            client.register(kind(0, (0,)))


@one_loop
async def test_access_that_no_dmabuf_has_is_refused(gpu: Gpu) -> None:
    async with connected() as (client, _):
        with pytest.raises(ValueError, match=r"MW_BIND: for a dma-buf the kernel permits"):
            client.register(WithInterface(), Access.MW_BIND)


# -- staging --------------------------------------------------------------------------------------

HALF = 1024
LENGTHS = [1, HALF, HALF + 1, 2 * HALF, 3 * HALF + 7]


class Bytes(WithDLPack):
    """A tensor that has what arrays are described by."""

    dtype = np.dtype(np.uint8)

    def __init__(self, offset: int, length: int) -> None:
        super().__init__(offset, (length,), (1,))


class FixedBytes(WithInterface):
    """The same, but not to be written."""

    dtype = Bytes.dtype

    def __init__(self, offset: int, length: int) -> None:
        super().__init__(offset, (length,), (1,), readonly=True)


@pytest.fixture
def unregistrable(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """A GPU whose memory the device cannot register. All copies have ended after the test."""
    monkeypatch.setattr(gpu_staging, "HALF", HALF)
    gpu.state.error = NOT_SUPPORTED
    yield gpu
    assert (gpu.state.retained, gpu.state.pinned) == (0, None)


@asynccontextmanager
async def both() -> AsyncIterator[tuple[arrays.ArrayServer, arrays.ArrayClient]]:
    """Yield a server of arrays, and a client of it."""
    async with (
        arrays.serve_arrays(ADDRESS) as server,
        arrays.connect_arrays(ADDRESS, server.port) as client,
    ):
        yield server, client


def numbers(length: int) -> "np.ndarray[Any, Any]":
    return np.frombuffer(random.Random(length).randbytes(length), np.uint8)


@pytest.mark.parametrize("length", LENGTHS)
async def test_staged_arrays_are_fetched_and_put(unregistrable: Gpu, length: int) -> None:
    tensor, array, place = Bytes(256, length), numbers(length), np.zeros(length, np.uint8)
    async with both() as (server, client):
        server.publish("a", array)
        server.publish("w", place, writable=True)
        assert await client.fetch("a", into=tensor, staging=True) is tensor
        assert unregistrable.bytes_of(tensor) == array.tobytes()
        around = unregistrable.memory.bytes
        assert not any(around[:256] + around[256 + length :])
        await client.put("w", tensor, staging=True)
        assert (place == array).all()


async def test_memory_is_staged_only_if_asked_and_needed(unregistrable: Gpu) -> None:
    tensor = Bytes(0, HALF)
    async with both() as (server, client):
        server.publish("a", numbers(HALF), writable=False)
        server.publish("w", np.zeros(HALF, np.uint8), writable=True)
        with pytest.raises(aiordma.NotSupportedError, match=r"the copy, or give staging=True$"):
            await client.fetch("a", into=tensor)
        with pytest.raises(aiordma.NotSupportedError, match=r"the copy, or give staging=True$"):
            await client.put("w", tensor)
        with pytest.raises(aiordma.NotSupportedError, match="Copy it to the CPU"):
            server.publish("b", tensor)
        assert not any(unregistrable.memory.bytes[:])
        unregistrable.state.error, unregistrable.state.copy_error = 0, INVALID_VALUE
        await client.fetch("a", into=tensor, staging=True)  # registered, not copied
        assert unregistrable.bytes_of(tensor) == numbers(HALF).tobytes()
        cpu = np.zeros(HALF, np.uint8)
        assert (await client.fetch("a", into=cpu, staging=True) == numbers(HALF)).all()


async def test_read_only_tensor_is_not_staged_into(unregistrable: Gpu) -> None:
    async with both() as (server, client):
        server.publish("a", numbers(HALF))
        with pytest.raises(TypeError, match=r"fetch\(\): into: FixedBytes is read-only"):
            await client.fetch("a", into=FixedBytes(0, HALF), staging=True)
        assert not any(unregistrable.memory.bytes[:])


@pytest.mark.parametrize("parts", [1, 4])
async def test_refused_copies_are_named_and_the_client_usable(
    unregistrable: Gpu, parts: int
) -> None:
    tensor, length = Bytes(0, parts * HALF), parts * HALF
    async with both() as (server, client):
        server.publish("a", numbers(length))
        server.publish("w", np.zeros(length, np.uint8), writable=True)
        unregistrable.state.copy_error = NOT_SUPPORTED
        refused = r"\(\): CUDA's driver refused cuMemcpy\w+: CUDA_ERROR_NOT_SUPPORTED$"
        with pytest.raises(ArrayError, match="^fetch" + refused):
            await client.fetch("a", into=tensor, staging=True)
        with pytest.raises(ArrayError, match="^put" + refused):
            await client.put("w", tensor, staging=True)
        unregistrable.state.copy_error = 0
        await client.fetch("a", into=tensor, staging=True)
        assert unregistrable.bytes_of(tensor) == numbers(length).tobytes()


async def test_copies_overlap_with_transfers(
    unregistrable: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first copy to the GPU ends only when the second part has been READ; and the second copy
    from it only when the first part has been written."""
    tensor, length = Bytes(0, 3 * HALF), 3 * HALF
    array, place = numbers(length), np.zeros(length, np.uint8)
    copy_in, copy_out = PinnedMemory.copy_in, PinnedMemory.copy_out
    seen = []

    def until(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 30
        while not condition() and time.monotonic() < end:
            time.sleep(0.001)
        seen.append(condition())

    def late_in(self: PinnedMemory, start: int, offset: int, count: int) -> None:
        if not start:
            until(lambda: self.memory[HALF : 2 * HALF] == array[HALF : 2 * HALF].tobytes())
        copy_in(self, start, offset, count)

    def late_out(self: PinnedMemory, start: int, offset: int, count: int) -> None:
        if start == HALF:
            until(lambda: place[:HALF].tobytes() == array[:HALF].tobytes())
        copy_out(self, start, offset, count)

    monkeypatch.setattr(PinnedMemory, "copy_in", late_in)
    monkeypatch.setattr(PinnedMemory, "copy_out", late_out)
    async with both() as (server, client):
        server.publish("a", array)
        server.publish("w", place, writable=True)
        await client.fetch("a", into=tensor, staging=True)
        assert unregistrable.bytes_of(tensor) == array.tobytes()
        await client.put("w", tensor, staging=True)
        assert (place == array).all()
    assert seen == [True, True]


@pytest.mark.promise("Cancellation loses no message and leaves nothing open")
@pytest.mark.parametrize("call", ["fetch", "put"])
async def test_cancelled_staging_leaves_the_client_usable(unregistrable: Gpu, call: str) -> None:
    tensor, length = Bytes(0, 4 * HALF), 4 * HALF
    async with both() as (server, client):
        server.publish("a", numbers(length), writable=False)
        server.publish("w", np.zeros(length, np.uint8), writable=True)

        async def move() -> None:
            if call == "fetch":
                await client.fetch("a", into=tensor, staging=True)
            else:
                await client.put("w", tensor, staging=True)

        for steps in range(0, 60, 3):
            async with anyio.create_task_group() as group:
                group.start_soon(move)
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()
            assert (unregistrable.state.retained, unregistrable.state.pinned) == (0, None)
        await client.fetch("a", into=tensor, staging=True)
        assert unregistrable.bytes_of(tensor) == numbers(length).tobytes()


# -- what the machine cannot do -------------------------------------------------------------------


@pytest.mark.promise("The CPU does not access memory of other devices")
@one_loop
async def test_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "LIBRARY", "libcuda-that-is-missing.so.1")
    async with connected() as (client, _):
        expected = r"memory of a GPU \(WithInterface\): CUDA's driver cannot be opened .*missing"
        with pytest.raises(aiordma.NotSupportedError, match=expected) as caught:
            client.register(WithInterface())
        assert str(caught.value).endswith(". Copy it to the CPU, and register the copy")


@pytest.mark.promise("The CPU does not access memory of other devices")
@one_loop
async def test_old_driver_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda, "LIBRARY", str(compiled(tmp_path / "old", "-DOLD")))
    async with connected() as (client, _):
        with pytest.raises(aiordma.NotSupportedError, match=r"CUDA 11\.7 or newer"):
            client.register(WithInterface())


@pytest.mark.promise("The CPU does not access memory of other devices")
@one_loop
@pytest.mark.parametrize(
    ("error", "name"), [(NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"), (INVALID_VALUE, "error 1")]
)
async def test_refusal_of_the_driver_is_named(gpu: Gpu, error: int, name: str) -> None:
    gpu.state.error = error
    async with connected() as (client, _):
        with pytest.raises(
            aiordma.NotSupportedError, match=rf"cuMemGetHandle\w+: {name}\. Copy it"
        ):
            client.register(WithInterface())


@pytest.mark.promise("The CPU does not access memory of other devices")
@one_loop
async def test_memory_that_the_device_cannot_reach_is_named(gpu: Gpu) -> None:
    descriptor = os.open("/sys/devices/system/cpu/online", os.O_RDONLY)  # it cannot be mapped
    try:
        gpu.state.fd = descriptor
        async with connected() as (client, _):
            with pytest.raises(aiordma.NotSupportedError, match="registering a dma-buf: software"):
                client.register(WithInterface(), Access.REMOTE_READ)
    finally:
        os.close(descriptor)


@one_loop
@pytest.mark.parametrize("kind", [OnRocm, Managed])
async def test_other_memory_than_cudas_is_refused(kind: Any) -> None:
    async with connected() as (client, _):
        with pytest.raises(aiordma.NotSupportedError, match=f"type {kind.device}, and CUDA's"):
            client.register(kind())


def test_memory_region_names_the_calls_for_gpus(gpu: Gpu, device: DeviceUnderTest) -> None:
    with aiordma.verbs.Device(device.name).open() as context, context.alloc_pd() as domain:
        for kind in KINDS:
            with pytest.raises(aiordma.NotSupportedError, match=r"use Connection\.register"):
                aiordma.MemoryRegion(domain, kind())
        assert domain._children == {}
