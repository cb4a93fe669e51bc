"""Descriptions of arrays and tensors: which bytes each one has, and which are refused."""

import ctypes
import math
import re
from typing import Any

import numpy
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from aiordma.verbs import foreign_memory
from aiordma.verbs.foreign_memory import described_on_gpu, foreign_view
from tests.internals import ffi

CALL = "register(): buffer"
CPU, CUDA = 1, 2
SPACE = 2**64
BYTES = numpy.zeros(64, numpy.uint8)
GOOD: dict[str, Any] = {
    name: value for name, value in BYTES.__array_interface__.items() if name != "descr"
}


class HasInterface:
    def __init__(self, description: Any) -> None:
        self.__array_interface__ = description


class HasCudaInterface:
    def __init__(self, description: Any) -> None:
        self.__cuda_array_interface__ = description


class Tensor:
    """A tensor whose library describes it by a struct of these values."""

    def __init__(
        self,
        name: bytes = b"dltensor_versioned",
        version: int = 1,
        flags: int = 0,
        device: int = CPU,
        *,
        shape: list[int] | None = None,
        strides: list[int] | None = None,
        **fields: int,
    ) -> None:
        self.name, self.device = name, device
        self.shape = None if shape is None else (ctypes.c_int64 * len(shape))(*shape)
        self.strides = None if strides is None else (ctypes.c_int64 * len(strides))(*strides)
        fields = {
            "data": 1 << 20,
            "device_type": device,
            "ndim": len(shape or ()),
            "code": 1,
            "bits": 8,
            "lanes": 1,
            **fields,
        }
        tensor = foreign_memory._Tensor(**fields, shape=self.shape, strides=self.strides)
        versioned = foreign_memory._Versioned(version, 0, None, None, flags, tensor)
        self.described: Any = versioned if name.endswith(b"versioned") else tensor

    def __dlpack__(self, **how: Any) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self.described), self.name, None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0


class Answers:
    """A tensor whose functions return these values, or raise them."""

    def __init__(self, capsule: Any = None, device: Any = (CPU, 0)) -> None:
        self.capsule, self.device = capsule, device

    def __dlpack__(self, **how: Any) -> Any:
        return self._answer(self.capsule)

    def __dlpack_device__(self) -> Any:
        return self._answer(self.device)

    def _answer(self, value: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value


class Unreadable:
    """An array whose properties raise."""

    @property
    def __array_interface__(self) -> Any:
        raise RuntimeError("this array is being freed")


class UnreadableCuda:
    """The same on a GPU."""

    @property
    def __cuda_array_interface__(self) -> Any:
        raise RuntimeError("this array is being freed")


class Contrary:
    """A number that is none."""

    def __index__(self) -> int:
        raise RuntimeError("not today")

    def __bool__(self) -> bool:
        raise RuntimeError("not today")


def changed(**changes: Any) -> dict[str, Any]:
    return {**GOOD, **changes}


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in GOOD.items() if name != key}


MALFORMED: list[tuple[Any, str]] = [
    (5, "interface__=5 (int): expected a dict"),
    ({}, "data=None"),
    (without("data"), "data=None"),
    (changed(data=None), "data=None"),
    (changed(data=b"bytes"), "data=b'bytes' (bytes): expected a tuple (address, read-only)"),
    (changed(data=(1,)), "data=(1,)"),
    (changed(data=(1, False, 0)), "data=(1, False, 0)"),
    (changed(data=(None, False)), "data[0]=None"),
    (changed(data=(1.5, False)), "data[0]=1.5"),
    (changed(data=("0x1000", False)), "data[0]='0x1000'"),
    (changed(data=(True, False)), "data[0]=True"),
    (changed(data=(-8, False)), "data[0]=-8 is not in"),
    (changed(data=(SPACE, False)), "is not in"),
    (changed(data=(SPACE - 63, False)), "64 bytes at 0xffffffffffffffc1 end beyond the address sp"),
    (changed(data=(0, False)), "its address is 0, and it has 64 bytes"),
    (changed(data=(Contrary(), False)), "not today"),
    (changed(data=(4096, Contrary())), "not today"),
    (without("typestr"), "typestr=None"),
    (changed(typestr=b"|u1"), "typestr=b'|u1'"),
    (changed(typestr=""), "typestr='': expected a type of numpy's, such as '<f8'"),
    (changed(typestr="|u"), "typestr='|u'"),
    (changed(typestr="u1"), "typestr='u1'"),
    (changed(typestr="|u-1"), "typestr='|u-1'"),
    (changed(typestr="|u\u0661"), "typestr='|u"),
    (changed(typestr="|u1 "), "typestr='|u1 '"),
    (changed(typestr="|T16"), "typestr='|T16'"),
    (changed(typestr="<M4[s]"), "typestr='<M4[s]'"),
    (changed(typestr="|u8[s]"), "typestr='|u8[s]'"),
    (changed(typestr="|u" + "9" * 5000), "expected a type of numpy's"),
    (changed(typestr="|u" + "9" * 18), "is more than the address space"),
    (changed(typestr="|t4"), "typestr='|t4' is a field of bits, not of bytes"),
    (changed(typestr="|t8"), "typestr='|t8' is a field of bits, not of bytes"),
    (changed(typestr="|O8"), "typestr='|O8': its elements are Python objects"),
    (changed(descr=5), "descr=5 (int)"),
    (changed(descr=[5]), "a field of descr=5"),
    (changed(descr=[("", "|O8")]), "Python objects"),
    (changed(typestr="|V8", shape=(8,), descr=[("a", [("o", "|O8")])]), "Python objects"),
    (changed(typestr="|V8", descr=[("a", "|u4")]), "typestr='|V8' has 8 bytes, and descr="),
    (changed(descr=[("a", "|u1", (-1,))]), "a shape in descr[0]=-1 is not in"),
    (changed(mask=BYTES), "its mask says that some elements are not valid"),
    (changed(offset=8), "offset=8 goes with data that is a buffer"),
    (without("shape"), "shape=None"),
    (changed(shape=64), "shape=64"),
    (changed(shape="64"), "shape='64'"),
    (changed(shape=(-5,)), "shape[0]=-5 is not in"),
    (changed(shape=(-8, -8)), "shape[0]=-8 is not in"),
    (changed(shape=(1.5,)), "shape[0]=1.5"),
    (changed(shape=(2**63,)), "is not in"),
    (changed(shape=(2**62, 4)), "is more than the address space"),
    (changed(shape=(1,) * 65), "shape has 65 dimensions, and 64 is the most"),
    (changed(strides=1), "strides=1"),
    (changed(strides=(1, 2)), "1 sizes in shape and 2 in strides"),
    (changed(strides=()), "1 sizes in shape and 0 in strides"),
    (changed(strides=("1",)), "strides[0]='1'"),
]


@pytest.mark.promise("Arrays and tensors are registered where they are")
@pytest.mark.parametrize("kind", [HasInterface, HasCudaInterface])
@pytest.mark.parametrize(("description", "why"), MALFORMED)
def test_malformed_interface_is_refused(kind: Any, description: Any, why: str) -> None:
    which = "CUDA array" if kind is HasCudaInterface else "array"
    expected = f"{CALL}: the {which} interface of {kind.__name__} describes no plain memory: "
    with pytest.raises(TypeError) as caught:
        foreign_view(kind(description), CALL)
    text = str(caught.value)
    assert text.startswith(expected)
    assert why in text
    assert text.endswith(
        ": give an object with a buffer, such as a bytearray, an mmap or a numpy array"
    )


@pytest.mark.promise("Arrays and tensors are registered where they are")
@pytest.mark.parametrize(
    ("thing", "why"),
    [
        (Unreadable(), "Unreadable.__array_interface__ failed: this array is being freed"),
        (UnreadableCuda(), "UnreadableCuda.__cuda_array_interface__ failed: this array is being f"),
        (Answers(RuntimeError("use tensor.detach()")), "__dlpack__() refused: use tensor.detach()"),
        (Answers(BufferError("read-only")), "Answers.__dlpack__() refused: read-only"),
        (Answers(TypeError("no")), "Answers.__dlpack__() refused: no"),
        (Answers(AttributeError()), "Answers.__dlpack__() refused: AttributeError"),
        (Answers(5), "Answers.__dlpack__() returned 5: expected a capsule"),
        (Answers(None), "Answers.__dlpack__() returned None: expected a capsule"),
        (Answers(5, (CUDA, 0)), "Answers.__dlpack__() returned 5: expected a capsule"),
        (Answers(5, RuntimeError("none")), "Answers.__dlpack_device__() failed: none"),
        (Answers(5, ()), "Answers.__dlpack_device__() failed: tuple index out of range"),
        (Answers(5, None), "Answers.__dlpack_device__() failed: "),
        (Tensor(b"used_dltensor", shape=[1]), "expected a capsule of a tensor that was not taken"),
        (Tensor(version=0, shape=[1]), "DLPack version 0 of Tensor is not known"),
        (Tensor(version=2, shape=[1]), "DLPack version 2 of Tensor is not known"),
        (Tensor(flags=2, shape=[1]), "made a copy"),
        (Tensor(flags=4, bits=4, lanes=2, shape=[1]), "padded elements of 4 bits"),
        (Tensor(bits=4, shape=[8]), "elements of 4 bits"),
        (Tensor(bits=6, lanes=2, shape=[8]), "elements of 12 bits"),
        (Tensor(bits=0, shape=[1]), "0 bits and 1 lanes"),
        (Tensor(lanes=0, shape=[1]), "8 bits and 0 lanes"),
        (Tensor(code=3, bits=64, shape=[1]), "handles"),
        (Tensor(device_type=CUDA, shape=[1]), "type 2, and __dlpack_device__ says 1 or 3 or 11"),
        (Tensor(device=CUDA, device_type=CPU, shape=[1]), "type 1, and __dlpack_device__ says 2"),
        (Tensor(ndim=-1, shape=[1]), "it has -1 dimensions: expected 0..64"),
        (Tensor(ndim=2**31 - 1, shape=[1]), "it has 2147483647 dimensions"),
        (Tensor(ndim=1), "it has 1 dimensions, and no shape"),
        (Tensor(shape=[-5]), "shape[0]=-5 is not in"),
        (Tensor(shape=[2**62, 4]), "is more than the address space"),
        (Tensor(shape=[2**62], bits=128), "is more than the address space"),
        (Tensor(shape=[1], data=0), "its address is 0, and it has 1 elements"),
        (Tensor(shape=[1], data=0, byte_offset=64), "its address is 0, and it has 1 elements"),
        (Tensor(shape=[1], byte_offset=SPACE - 1), "beyond the address space"),
        (Tensor(b"dltensor", shape=[2], data=SPACE - 1), "beyond the address space"),
    ],
)
def test_failing_or_malformed_tensor_is_refused(thing: Any, why: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(CALL)}: .*{re.escape(why)}"):
        foreign_view(thing, CALL)


@pytest.mark.parametrize(
    "thing",
    [
        HasInterface(changed(shape=(0,), data=(0, False))),
        HasInterface(changed(shape=(0, 2**62, 4), data=(0, False))),
        HasInterface(changed(typestr="|V0", data=(0, False))),
        Tensor(shape=[0], data=0),
        Tensor(shape=[4, 0], strides=[7, -7], data=0),
    ],
)
def test_empty_memory_needs_no_address(thing: Any) -> None:
    view = foreign_view(thing, CALL)
    assert view is not None
    assert view.nbytes == 0


def place_of(view: memoryview) -> tuple[int, int]:
    return int(ffi.cast("uintptr_t", ffi.from_buffer(view))), view.nbytes


SCALARS: list[tuple[Any, int]] = [
    (HasInterface(changed(shape=())), 1),
    (HasInterface(changed(shape=(), strides=())), 1),
    (HasInterface(changed(shape=(), typestr="<U3")), 12),
    (HasInterface(changed(shape=[2, 3], typestr="<M8[25s]", strides=None)), 48),
    (HasInterface(changed(descr=None, mask=None, offset=None)), 64),
    (Tensor(shape=None, bits=64), 8),
    (Tensor(shape=[3], bits=4, lanes=2, code=17), 3),
    (Tensor(shape=[3], bits=32, lanes=4, strides=[1]), 48),
]


@pytest.mark.parametrize(("thing", "length"), SCALARS)
def test_lawful_description_is_taken(thing: Any, length: int) -> None:
    view = foreign_view(thing, CALL)
    assert view is not None
    start = GOOD["data"][0] if isinstance(thing, HasInterface) else 1 << 20
    assert place_of(view) == (start, length)


@pytest.mark.promise("Arrays and tensors are registered where they are")
@given(
    arrays.arrays(
        st.one_of(
            arrays.array_dtypes(max_size=4), arrays.nested_dtypes(), arrays.datetime64_dtypes()
        ),
        arrays.array_shapes(min_dims=0),
    )
)
def test_every_array_of_numpys_is_taken_whole(array: Any) -> None:
    assume(not array.dtype.hasobject and array.nbytes)
    view = foreign_view(HasInterface(array.__array_interface__), CALL)
    assert view is not None
    assert place_of(view) == (array.ctypes.data, array.nbytes)


def expect_documented(error: Exception) -> None:
    assert isinstance(error, BufferError) or str(error).startswith(CALL)


def extent(address: int, shape: list[int], strides: list[int] | None, item: int) -> tuple[int, int]:
    """Return where the elements begin and end, by their places."""
    assert min(shape, default=0) >= 0
    if 0 in shape:
        return address, address
    if strides is None:
        strides, size = [], item
        for count in shape[::-1]:
            strides.insert(0, size)
            size *= count
    ends = [(count - 1) * stride for count, stride in zip(shape, strides, strict=True)]
    return (
        address + sum(end for end in ends if end < 0),
        address + sum(end for end in ends if end > 0) + item,
    )


NUMBERS = st.one_of(
    st.integers(-9, 70), st.integers(-(2**66), 2**66), st.sampled_from([2**31, 2**62, 2**63 - 1])
)
INT64 = NUMBERS.filter(lambda number: -(2**63) <= number < 2**63)
ADDRESSES = st.one_of(st.just(0), st.just(4096), st.integers(0, SPACE - 1), st.just(SPACE - 8))
JUNK = st.one_of(st.none(), st.text(max_size=3), st.floats(), st.booleans(), st.binary(max_size=3))


def or_junk(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 9).flatmap(lambda number: strategy if number else JUNK)


ANY: dict[str, st.SearchStrategy[Any]] = {
    "shape": or_junk(st.lists(or_junk(NUMBERS), max_size=4).map(tuple)),
    "typestr": or_junk(st.from_regex(r"[<>|][tbiufcmMOSUV][0-9]{1,3}(\[s\])?", fullmatch=True)),
    "data": or_junk(st.tuples(or_junk(ADDRESSES), st.booleans())),
    "strides": or_junk(st.lists(or_junk(NUMBERS), max_size=4).map(tuple)),
    "descr": or_junk(st.lists(st.tuples(st.text(max_size=2), st.sampled_from(["|u1", "|t4"])))),
    "mask": JUNK,
    "offset": or_junk(st.integers(-1, 8)),
}


def dense(shape: tuple[int, ...], item: int) -> tuple[int, ...]:
    return tuple(item * math.prod(shape[place + 1 :]) for place in range(len(shape)))


@st.composite
def descriptions(draw: st.DrawFn) -> dict[str, Any]:
    """Lawful ones, with up to two fields replaced by anything."""
    item, shape = draw(st.integers(1, 16)), draw(st.lists(st.integers(1, 9), max_size=3).map(tuple))
    fortran = dense(shape[::-1], item)[::-1]
    made: dict[str, Any] = {
        "shape": shape,
        "typestr": f"|V{item}",
        "data": (draw(st.integers(4096, 2**47)), draw(st.booleans())),
        "strides": draw(st.sampled_from([None, dense(shape, item), fortran])),
    }
    for field in draw(st.lists(st.sampled_from(list(ANY)), max_size=2)):
        made[field] = draw(ANY[field])
    return made


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, Any]:
    """The arguments of Tensor: lawful ones, with up to two fields replaced by anything."""
    shape = draw(st.lists(st.integers(1, 9), max_size=3))
    each = tuple(shape)
    made: dict[str, Any] = {
        "shape": shape,
        "strides": draw(st.sampled_from([None, [*dense(each, 1)], [*dense(each[::-1], 1)[::-1]]])),
        "data": draw(st.integers(4096, 2**47)),
        "code": draw(st.integers(0, 17)),
        "bits": draw(st.sampled_from([4, 8, 16, 32, 64])),
        "lanes": draw(st.integers(1, 4)),
        "byte_offset": draw(st.integers(0, 64)),
        "name": draw(st.sampled_from([b"dltensor", b"dltensor_versioned"])),
    }
    values = {
        "shape": st.lists(INT64, min_size=len(shape), max_size=len(shape)),
        "strides": st.lists(INT64, min_size=len(shape), max_size=len(shape)),
        "data": ADDRESSES,
        "bits": st.integers(0, 255),
        "lanes": st.integers(0, 65535),
        "byte_offset": ADDRESSES,
    }
    for field in draw(st.lists(st.sampled_from(list(values)), max_size=2)):
        made[field] = draw(values[field])
    return made


@pytest.mark.promise("Arrays and tensors are registered where they are")
@given(descriptions(), st.sampled_from([HasInterface, HasCudaInterface]))
@example({"shape": (64,), "typestr": "|t4", "data": (4096, False)}, HasInterface)
@example({"shape": (-5,), "typestr": "|u1", "data": (4096, False)}, HasInterface)
@example({"shape": (-5, -5), "typestr": "|u1", "data": (4096, False)}, HasInterface)
def test_no_interface_yields_bytes_beside_its_elements(described: Any, kind: Any) -> None:
    try:
        if kind is HasInterface:
            view = foreign_view(kind(described), CALL)
            assert view is not None
            if not view.nbytes:
                return
            start, length = place_of(view)
        else:
            found = described_on_gpu(kind(described), CALL)
            assert found is not None
            if not found.is_contiguous or not found.length:
                return
            start, length = found.address, found.length
    except (TypeError, BufferError) as error:
        expect_documented(error)
        return
    code, size = described["typestr"][1], int(re.findall("[0-9]+", described["typestr"])[0])
    assert code not in "tO"
    item = size * 4 if code == "U" else size
    least, most = extent(described["data"][0], described["shape"], described.get("strides"), item)
    assert least <= start <= start + length <= most
    assert 0 < start < start + length <= SPACE


@pytest.mark.promise("Arrays and tensors are registered where they are")
@given(tensors())
@example({"shape": [64], "bits": 4, "lanes": 1, "data": 4096, "byte_offset": 0})
@example({"shape": [-5], "bits": 8, "lanes": 1, "data": 4096, "byte_offset": 0})
def test_no_tensor_yields_bytes_beside_its_elements(values: dict[str, Any]) -> None:
    try:
        view = foreign_view(Tensor(**values), CALL)
    except (TypeError, BufferError) as error:
        expect_documented(error)
        return
    assert view is not None
    if not view.nbytes:
        return
    start, length = place_of(view)
    item, strides = values["bits"] * values["lanes"] // 8, values.get("strides")
    bytewise = None if strides is None else [stride * item for stride in strides]
    least, most = extent(values["data"] + values["byte_offset"], values["shape"], bytewise, item)
    assert least <= start <= start + length <= most
    assert 0 < start < start + length <= SPACE
