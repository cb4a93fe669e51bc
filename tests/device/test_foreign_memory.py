"""Registering arrays and tensors that have no buffer: __array_interface__ and DLPack."""

import ctypes
import gc
import weakref
from typing import Any

import numpy
import pytest

import aiordma
from aiordma.verbs import foreign_memory
from tests.device.players import OWN_RECEIVES, REMOTE, connected, one_loop

pytestmark = pytest.mark.anyio


class WithArrayInterface:
    """An array without Python's buffer protocol."""

    def __init__(self, array: Any, **changes: Any) -> None:
        self.array = array
        self.__array_interface__: dict[str, Any] = {**array.__array_interface__, **changes}


class WithDLPack:
    """A tensor of a library that knows no DLPack 1.0."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.array.__dlpack_device__()
        return device


class WithNewDLPack(WithDLPack):
    """A tensor of a library that knows DLPack 1.0, as far as numpy does."""

    def __dlpack__(self, **how: Any) -> Any:
        try:
            return self.array.__dlpack__(**how)
        except TypeError as error:
            pytest.skip(f"this numpy lacks DLPack 1.0: {error}")


KINDS = [WithArrayInterface, WithDLPack, WithNewDLPack]


@pytest.mark.promise("Arrays and tensors are registered where they are")
@pytest.mark.parametrize("kind", KINDS)
async def test_peer_writes_to_the_array_itself(kind: Any) -> None:
    array = numpy.zeros((16, 32), numpy.float64)
    async with connected() as (client, server):
        region = server.register(kind(array), REMOTE)
        assert region.address == array.ctypes.data
        assert region.length == array.nbytes
        await client.write(numpy.full(512, 0.5).data, region.remote())
        assert (array == 0.5).all()
        assert await client.read_bytes(region.remote()) == bytes(array)


@pytest.mark.promise("Arrays and tensors are registered where they are")
@pytest.mark.parametrize("kind", KINDS)
async def test_region_keeps_the_array_and_gives_it_back(kind: Any) -> None:
    array = numpy.zeros(4096, numpy.uint8)
    gone = weakref.ref(array)
    async with connected() as (client, _):
        region = client.register(kind(array))
        del array
        gc.collect()
        assert gone() is not None
        region.close()
        del region
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize("kind", KINDS)
async def test_part_of_an_array_is_registered_alone(kind: Any) -> None:
    array = numpy.arange(64, dtype=numpy.int32).reshape(8, 8)
    async with connected() as (client, _):
        region = client.register(kind(array[2:4]))
        assert bytes(region) == array[2:4].tobytes()
        fortran = numpy.asfortranarray(array)
        assert bytes(client.register(kind(fortran))) == fortran.tobytes("A")
        with pytest.raises(ValueError, match="not contiguous"):
            client.register(kind(array[:, 2:4]))
        with pytest.raises(ValueError, match="not contiguous"):
            client.register(kind(array[::-1]))
        with pytest.raises(ValueError, match="an empty buffer"):
            client.register(kind(array[:0]))


@pytest.mark.promise("Arrays and tensors are registered where they are")
async def test_read_only_array_permits_no_writing() -> None:
    array = numpy.zeros(64, numpy.uint8)
    array.setflags(write=False)
    async with connected() as (client, _):
        for thing in (WithArrayInterface(array), WithNewDLPack(array)):
            assert client.register(thing).access == aiordma.Access(0)
            with pytest.raises(TypeError, match="is read-only"):
                client.register(thing, aiordma.Access.REMOTE_WRITE)


class WithoutFlags(WithDLPack):
    """A tensor of a library that knows DLPack 1.0, and gives a tensor without its flags (jax)."""

    def __dlpack__(self, *, max_version: Any = None, copy: bool | None = None) -> Any:
        return self.array.__dlpack__()


@pytest.mark.promise("Arrays and tensors are registered where they are")
async def test_tensor_without_flags_permits_no_writing() -> None:
    tensor = WithoutFlags(numpy.zeros(64, numpy.uint8))
    async with connected() as (client, _):
        assert client.register(tensor).access == aiordma.Access(0)
        with pytest.raises(TypeError, match="is read-only"):
            client.register(tensor, aiordma.Access.REMOTE_WRITE)


@pytest.mark.promise("Arrays and tensors are registered where they are")
async def test_elements_without_a_buffer_format_are_registered() -> None:
    array: Any = numpy.zeros(8, "datetime64[s]")
    with pytest.raises(ValueError, match="buffer"):
        memoryview(array)
    async with connected() as (client, _):
        assert client.register(array).address == array.ctypes.data


@pytest.mark.promise("Arrays and tensors are registered where they are")
@pytest.mark.parametrize("count", [16, 1 << 10, 1 << 14, 1 << 18])
async def test_elements_without_a_buffer_format_are_sent_and_read(count: int) -> None:
    dates: Any = numpy.arange(count).astype("datetime64[s]")
    got: Any = numpy.zeros(count, [("t:", "M8[s]")])
    async with connected(server=OWN_RECEIVES, client=OWN_RECEIVES) as (client, server):
        received = server.post_recv(got)
        await client.send(dates)
        assert (await received).byte_len == dates.nbytes
        assert (got["t:"] == dates).all()
        region = server.register(numpy.zeros(count, "datetime64[s]"), REMOTE)
        await client.write(dates, region.remote())
        assert bytes(region) == dates.tobytes()
        back: Any = numpy.zeros_like(dates)
        await client.read(back, region.remote())
        assert (back == dates).all()
        with pytest.raises(ValueError, match=r"data: the buffer is not contiguous"):
            client.post_send(dates[::2])
        dates.setflags(write=False)
        with pytest.raises(TypeError, match="read-only"):
            client.post_recv(dates)


async def test_scalar_without_a_buffer_format_is_sent() -> None:
    array: Any = numpy.array([(7, 8)], [("t", "M8[s]"), ("i", "i8")])
    scalar = array[0].copy()
    async with connected() as (client, server):
        await client.send(scalar)
        assert await server.receive() == array.tobytes()
        assert bytes(client.register(scalar)) == array.tobytes()


class Copies:
    """A tensor whose DLPack is a copy, if copies are permitted; it can ignore that they are not."""

    def __init__(self, array: Any, *, obeys: bool) -> None:
        self.array = array
        self.obeys = obeys

    def __dlpack__(self, *, max_version: Any = None, copy: bool | None = None) -> Any:
        if copy is False and self.obeys:
            raise BufferError("this tensor can only be copied")
        return self.array.__dlpack__(max_version=max_version, copy=True)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


@pytest.mark.promise("Arrays and tensors are registered where they are")
@pytest.mark.parametrize(
    ("obeys", "message"), [(True, "refused: .* only be copied"), (False, "made a copy")]
)
async def test_tensor_that_can_only_be_copied_is_refused(obeys: bool, message: str) -> None:
    tensor = Copies(numpy.zeros(64, numpy.uint8), obeys=obeys)
    async with connected() as (client, _):
        with pytest.raises(TypeError, match=message):
            client.register(tensor)


class Crafted:
    """A tensor whose library describes it by a struct DLManagedTensorVersioned of these values."""

    def __init__(self, major: int, bits: int) -> None:
        self.memory = ctypes.create_string_buffer(64)
        self.shape = (ctypes.c_int64 * 1)(64)
        tensor = foreign_memory._Tensor(
            ctypes.addressof(self.memory), 1, 0, 1, 1, bits, 1, self.shape, None, 0
        )
        self.described = foreign_memory._Versioned(major, 0, None, None, 0, tensor)

    def __dlpack__(self, **how: Any) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self.described), b"dltensor_versioned", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class NoMemory(numpy.ndarray[Any, Any]):
    """An array of dates, which have no buffer format, whose interface names no memory."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"data": None, "typestr": "<M8[s]", "shape": (4,), "version": 3}


NUMBERS = numpy.zeros(64, numpy.uint8)


@pytest.mark.natively
@one_loop
@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (WithArrayInterface(NUMBERS, data=None), "interface of WithArrayInterface describes no pl"),
        (Copies(NUMBERS, obeys=True), r"Copies\.__dlpack__\(\) refused: .* only be copied"),
        (Copies(NUMBERS, obeys=False), r"Copies\.__dlpack__\(copy=False\) made a copy"),
        (Crafted(2, 8), "DLPack version 2 of Crafted is not known"),
        (Crafted(1, 4), "Crafted has elements of 4 bits"),
    ],
)
async def test_each_refusal_of_a_tensor_names_the_call(thing: Any, message: str) -> None:
    async with connected() as (client, _):
        with pytest.raises(TypeError, match=rf"^register\(\): buffer: .*{message}"):
            client.register(thing)
        with pytest.raises(TypeError, match=rf"^MemoryRegion\(\): buffer: .*{message}"):
            aiordma.MemoryRegion(client._endpoint.memory.domain, thing)


@pytest.mark.natively
@one_loop
async def test_post_of_an_array_without_memory_names_the_parameter() -> None:
    dates: Any = numpy.zeros(4, "datetime64[s]").view(NoMemory)
    async with connected() as (client, _):
        with pytest.raises(TypeError, match=r"^post_send\(\): data: the array interface"):
            client.post_send(dates)


async def test_objects_are_no_memory() -> None:
    objects = numpy.zeros(4, object)
    # The typestr of a structure does not say that a field of it is an object.
    nested = numpy.zeros(4, [("date", "M8[s]"), ("inner", [("i", "i4"), ("o", object)])])
    async with connected() as (client, _):
        for thing in (WithArrayInterface(objects), WithArrayInterface(nested), 42):
            with pytest.raises(TypeError):
                client.register(thing)  # type: ignore[arg-type]
