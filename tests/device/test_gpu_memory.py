"""Registering arrays and tensors on a GPU, with a stand-in for CUDA's driver (tests/native/cuda.c).

The stand-in's memory is a file in memory, and its addresses are none of this process's.
"""

import ctypes
import gc
import mmap
import os
import subprocess
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aiordma
from aiordma import Access
from aiordma.verbs import gpu_memory
from tests.device.dmabufs import Pages, pages
from tests.device.players import REMOTE, connected, one_loop
from tests.devices import ADDRESS, DeviceUnderTest
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
        self.state.address, self.state.fd, self.state.error = BASE, memory.fd, 0

    def bytes_of(self, tensor: Any) -> bytes:
        start = tensor.pointer - BASE
        return self.memory.bytes[start : start + tensor.nbytes]


@pytest.fixture
def gpu(driver: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    monkeypatch.setattr(gpu_memory, "LIBRARY", str(driver))
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


# -- what the machine cannot do -------------------------------------------------------------------


@pytest.mark.promise("The CPU does not access memory of other devices")
@one_loop
async def test_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "LIBRARY", "libcuda-that-is-missing.so.1")
    async with connected() as (client, _):
        expected = r"memory of a GPU \(WithInterface\): CUDA's driver cannot be opened .*missing"
        with pytest.raises(aiordma.NotSupportedError, match=expected) as caught:
            client.register(WithInterface())
        assert str(caught.value).endswith(". Copy it to the CPU, and register the copy")


@pytest.mark.promise("The CPU does not access memory of other devices")
@one_loop
async def test_old_driver_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_memory, "LIBRARY", str(compiled(tmp_path / "old", "-DOLD")))
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
            aiordma.NotSupportedError, match=rf"exports no dma-buf .*: {name}\)\. Copy it"
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
