"""Memory of objects without Python's buffer protocol: `__array_interface__`, DLPack, and
`__cuda_array_interface__`.

A description is the object's word. All of it is checked before any address is used, and what
contradicts its specification, or is no plain bytes, is a TypeError.

See: numpy's page "The array interface protocol"; the DLPack specification (dlpack.h); Numba's page
"CUDA Array Interface".
"""

import ctypes
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from mmap import mmap
from typing import Any, NamedTuple, Protocol, TypeAlias

from aiordma._base.arguments import Buffer, shown, whole_number, wrong_type
from aiordma._base.errors import NotSupportedError
from aiordma._native import ffi

__all__ = (
    "Described",
    "HasArrayInterface",
    "HasCudaArrayInterface",
    "HasDLPack",
    "RegistrableMemory",
    "array_view",
    "described",
    "described_on_gpu",
    "foreign_view",
    "has_object_dtype",
)

_HOST = (1, 3, 11)
"""kDLCPU, kDLCUDAHost, kDLROCMHost: memory that the CPU accesses like any other."""
_CUDA = 2
"""kDLCUDA"""
_WITHOUT_WAITING = {"stream": -1}
"""The argument of `__dlpack__` of a tensor on a GPU for which the tensor's library waits for no
stream: no bytes are read here."""
_READ_ONLY = 1
"""DLPACK_FLAG_BITMASK_READ_ONLY"""
_IS_COPIED = 2
"""DLPACK_FLAG_BITMASK_IS_COPIED"""
_IS_PADDED = 4
"""DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED"""
_VERSION = (1, 0)
"""The newest version of DLPack that is understood here."""
_OPAQUE_HANDLE = 3
"""kDLOpaqueHandle"""
_MOST_DIMENSIONS = 64
"""As in numpy, and in Python's buffer protocol. In DLPack, more are taken for a broken struct."""
_MOST_BYTES = sys.maxsize
_MOST_ADDRESS = 2**64 - 1
_INSTEAD = "give an object with a buffer, such as a bytearray, an mmap or a numpy array"
_ITEM = re.compile(r"[<>|=](?:([tbiufcOSUV])([0-9]{1,18})|([mM])8(?:\[[^\[\]]*\])?)")
"""numpy's typestr: the order of the bytes, the kind, the size, and a date's unit."""
_CHARACTER = 4
"""Bytes of a character of U."""


class HasArrayInterface(Protocol):
    """An array of numpy's array interface, version 3."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...


class HasCudaArrayInterface(Protocol):
    """An array on a GPU with Numba's interface, version 3."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


class HasDLPack(Protocol):
    """A tensor that DLPack describes: of torch, jax, and others."""

    def __dlpack__(self) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, int]: ...


RegistrableMemory: TypeAlias = Buffer | HasArrayInterface | HasDLPack | HasCudaArrayInterface
"""Memory that can be registered: an object with a buffer, or an array or tensor, on the CPU or on a
GPU of CUDA."""


class _Tensor(ctypes.Structure):
    """struct DLTensor"""

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
    )


class _Versioned(ctypes.Structure):
    """struct DLManagedTensorVersioned"""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_capsule_is = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is.restype = ctypes.c_int
_capsule_is.argtypes = (ctypes.py_object, ctypes.c_char_p)


class Described(NamedTuple):
    """The memory of an array or tensor, as its own description has it."""

    address: int
    shape: Sequence[int]
    strides: Sequence[int] | None  # in bytes
    item: int  # bytes of an element
    readonly: bool
    owner: object  # keeps the memory

    @property
    def length(self) -> int:
        """Its length in bytes."""
        return prod(self.shape) * self.item

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie side by side, in C's or Fortran's order."""
        if self.strides is None or 0 in self.shape:
            return True
        pairs = list(zip(self.shape, self.strides, strict=True))
        return any(_is_dense(order, self.item) for order in (pairs[::-1], pairs))


def foreign_view(thing: object, what: str) -> memoryview | None:
    """Return a view of an array's or tensor's memory as bytes, without a copy. The view keeps the
    memory; nothing keeps its object from moving it. None: the object has neither interface.

    Args:
        thing: the object.
        what: the call and its parameter, for messages.

    Raises:
        BufferError: the memory is not contiguous.
        NotSupportedError: the memory is a GPU's.
        TypeError: the object's own function failed, or describes no plain memory.
    """
    found = _described(thing, what)
    return None if found is None else _view_of(found)


def array_view(thing: object, what: str) -> memoryview | None:
    """Return `foreign_view` of an array with `__array_interface__`. None: the object has none.

    Args: as of `foreign_view`.

    Raises: BufferError and TypeError as `foreign_view`.
    """
    found = _of_array_interface(thing, "__array_interface__", what)
    return None if found is None else _view_of(found)


def has_object_dtype(thing: object) -> bool:
    """Return whether numpy's dtype of an array says that its elements have Python objects. It also
    knows this of elements that have no buffer format."""
    try:
        return bool(getattr(getattr(thing, "dtype", None), "hasobject", False))
    except Exception:  # of the object's own code
        return False


def _view_of(found: Described) -> memoryview:
    if not found.is_contiguous:
        raise BufferError("the memory is not contiguous")
    if not found.length:
        return memoryview(b"" if found.readonly else bytearray())
    owner = found.owner

    def forget(_: object, _owner: object = owner) -> None:
        """Do nothing. The pointer keeps the owner by this function."""

    pointer = ffi.gc(ffi.cast("char *", found.address), forget)
    view = memoryview(ffi.buffer(pointer, found.length)).cast("B")
    return view.toreadonly() if found.readonly else view


def described_on_gpu(thing: Any, what: str) -> Described | None:
    """Return the description of memory of a GPU of CUDA. None: the object does not say that its
    memory is on a GPU.

    Args: as of `foreign_view`.

    Raises:
        NotSupportedError: the memory is another device's.
        TypeError: the object's own function failed, or describes no plain memory.
    """
    if hasattr(type(thing), "__dlpack_device__"):
        with _failing(f"{what}: {type(thing).__name__}.__dlpack_device__() failed"):
            device = int(thing.__dlpack_device__()[0])
        if device in _HOST:
            return None
        if device != _CUDA:
            raise NotSupportedError(
                f"registering memory of a GPU: {type(thing).__name__} is on a device of DLPack's "
                f"type {device}, and CUDA's type {_CUDA} is supported: copy it to the CPU"
            )
        return _of_dlpack(thing, _WITHOUT_WAITING, (_CUDA,), what)
    return _of_array_interface(thing, "__cuda_array_interface__", what)


def described(thing: Any, what: str) -> Described | None:
    """Return the description of memory of the CPU or of a GPU. None: the object has none.

    Args: as of `foreign_view`.

    Raises: as `described_on_gpu`.
    """
    found = described_on_gpu(thing, what)
    return _described_on_cpu(thing, what) if found is None else found


def _described(thing: Any, what: str) -> Described | None:
    if described_on_gpu(thing, what) is not None:
        raise NotSupportedError(
            f"MemoryRegion registers memory of the CPU, and {type(thing).__name__} is on a GPU: "
            "use Connection.register or Domain.register, or copy it to the CPU"
        )
    return _described_on_cpu(thing, what)


def _described_on_cpu(thing: Any, what: str) -> Described | None:
    found = _of_array_interface(thing, "__array_interface__", what)
    if found is None and hasattr(type(thing), "__dlpack__"):
        found = _of_dlpack(thing, {}, _HOST, what)
    return found


@contextmanager
def _failing(text: str, advice: str = f": {_INSTEAD}") -> Iterator[None]:
    """Turn an error of the object's own code, or of a check of its description, into a TypeError.

    Args:
        text: the beginning of its message.
        advice: its end.
    """
    try:
        yield
    except Exception as error:
        why = str(error) or type(error).__name__
        raise TypeError(f"{text}: {why}{advice}") from error


# -- numpy's array interface, and Numba's ---------------------------------------------------------


_PLAIN = (bytearray, bytes, memoryview, mmap)
"""They have no attributes of their own."""


def _of_array_interface(thing: object, name: str, what: str) -> Described | None:
    """Read numpy's description, or Numba's, which is the same. None: the object has none."""
    if type(thing) in _PLAIN:
        return None
    kind = type(thing).__name__
    with _failing(f"{what}: {kind}.{name} failed"):
        described = getattr(thing, name, None)
    if described is None:
        return None
    cuda = "" if name == "__array_interface__" else "CUDA "
    text = f"{what}: the {cuda}array interface of {kind} describes no plain memory"
    with _failing(text):
        return _read_array_interface(thing, described, name)


def _read_array_interface(thing: object, described: Any, name: str) -> Described:
    if not isinstance(described, dict):
        raise wrong_type(described, name, "a dict")
    data, typestr, descr = described.get("data"), described.get("typestr"), described.get("descr")
    if not isinstance(data, tuple) or len(data) != 2:
        raise wrong_type(data, "data", "a tuple (address, read-only)")
    address = whole_number(data[0], "data[0]", 0, _MOST_ADDRESS)
    if has_object_dtype(thing):
        raise TypeError("its elements are Python objects, and its bytes are their addresses")
    bits = _bits_of(typestr, "typestr")
    if bits % 8 or str(typestr)[1] == "t":
        raise TypeError(f"typestr={typestr!r} is a field of bits, not of bytes")
    # A structure, whose typestr is V, can have objects in it.
    if descr is not None and (fields := _bits_of_fields(descr)) != bits:
        raise TypeError(
            f"typestr={typestr!r} has {bits // 8} bytes, and descr={shown(descr)} has {fields} bits"
        )
    if described.get("mask") is not None:
        raise TypeError("its mask says that some elements are not valid")
    if described.get("offset"):
        raise TypeError(
            f"offset={shown(described['offset'])} goes with data that is a buffer, not an address"
        )
    shape = _sizes(described.get("shape"), "shape", 0)
    strides = described.get("strides")
    if strides is not None:
        strides = _sizes(strides, "strides", -_MOST_BYTES)
        if len(strides) != len(shape):
            raise TypeError(f"{len(shape)} sizes in shape and {len(strides)} in strides")
    # The description of one of numpy's scalars keeps the copy that it describes ("__ref").
    return _checked(
        Described(address, shape, strides, bits // 8, bool(data[1]), owner=(thing, described))
    )


def _sizes(value: Any, name: str, least: int) -> tuple[int, ...]:
    if not isinstance(value, tuple | list):
        raise wrong_type(value, name, "a tuple of whole numbers")
    if len(value) > _MOST_DIMENSIONS:
        raise TypeError(f"{name} has {len(value)} dimensions, and {_MOST_DIMENSIONS} is the most")
    return tuple(
        whole_number(each, f"{name}[{place}]", least, _MOST_BYTES)
        for place, each in enumerate(value)
    )


def _bits_of(typestr: Any, name: str) -> int:
    """Return the bits of an element of plain bytes or bits."""
    if not isinstance(typestr, str):
        raise wrong_type(typestr, name, "a str such as '<f8'")
    found = _ITEM.fullmatch(typestr)
    if found is None:
        raise TypeError(f"{name}={shown(typestr)}: expected a type of numpy's, such as '<f8'")
    kind, size = found[1], int(found[2] or 8)
    if kind == "O":
        raise TypeError(
            f"{name}={shown(typestr)}: its elements are Python objects, and its bytes are their "
            "addresses"
        )
    if kind == "t":
        return size
    return size * 8 * (_CHARACTER if kind == "U" else 1)


def _bits_of_fields(fields: Any) -> int:
    """Return the bits of a structure's fields (`descr`)."""
    if not isinstance(fields, list | tuple):
        raise wrong_type(fields, "descr", "a list of (name, type) or (name, type, shape)")
    bits = 0
    for field in fields:
        if not isinstance(field, tuple | list) or len(field) not in (2, 3):
            raise wrong_type(field, "a field of descr", "(name, type) or (name, type, shape)")
        nested = isinstance(field[1], list | tuple)
        size = _bits_of_fields(field[1]) if nested else _bits_of(field[1], "a type in descr")
        shape = field[2] if len(field) == 3 else ()
        bits += size * prod(_sizes(shape, "a shape in descr", 0))
    return bits


def _checked(found: Described) -> Described:
    """Return a description, after checking that its bytes lie in the address space."""
    if found.length > _MOST_BYTES:
        raise TypeError(f"shape={shown(tuple(found.shape))} is more than the address space")
    if found.length and not found.address:
        raise TypeError(f"its address is 0, and it has {found.length} bytes")
    if found.address + found.length > _MOST_ADDRESS + 1:
        raise TypeError(f"{found.length} bytes at {found.address:#x} end beyond the address space")
    return found


# -- DLPack ---------------------------------------------------------------------------------------


def _capsule(thing: Any, flags: dict[str, object], how: dict[str, int]) -> object:
    try:
        return thing.__dlpack__(**flags, **how)
    except TypeError:
        raise
    except Exception:
        if not how:
            raise
        # jax takes the stream of -1 for a handle. Without one it may wait for the GPU.
        return thing.__dlpack__(**flags)


def _of_dlpack(thing: Any, how: dict[str, int], devices: Sequence[int], what: str) -> Described:
    kind = type(thing).__name__
    is_negated = getattr(thing, "is_neg", None)
    if is_negated is not None and is_negated():
        raise TypeError(
            f"{what}: {kind} is negative only by a flag (is_neg()), which its memory does not "
            "have: use tensor.resolve_neg()"
        )
    knows_flags = True
    with _failing(f"{what}: {kind}.__dlpack__() refused", ""):
        try:
            # A copy would not be the program's memory: what a peer writes would not reach it.
            capsule = _capsule(thing, {"max_version": _VERSION, "copy": False}, how)
        except TypeError:  # older than DLPack 1.0
            knows_flags = False
            capsule = _capsule(thing, {}, how)
    # A library that knows the flags and gives none cannot say that memory is read-only (jax).
    readonly = knows_flags
    # The capsule is never consumed. So its destructor frees the tensor, when the view has gone.
    if _capsule_is(capsule, b"dltensor_versioned"):
        managed = _Versioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        if managed.major != _VERSION[0]:
            raise TypeError(f"{what}: DLPack version {managed.major} of {kind} is not known")
        if managed.flags & _IS_COPIED:
            raise TypeError(
                f"{what}: {kind}.__dlpack__(copy=False) made a copy, and a peer would not reach "
                "the tensor: register memory that DLPack describes without a copy"
            )
        if managed.flags & _IS_PADDED:
            raise TypeError(
                f"{what}: {kind} has padded elements of {managed.tensor.bits} bits: register the "
                "bytes that hold them"
            )
        readonly, tensor = bool(managed.flags & _READ_ONLY), managed.tensor
    elif _capsule_is(capsule, b"dltensor"):
        tensor = _Tensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    else:
        raise TypeError(
            f"{what}: {kind}.__dlpack__() returned {shown(capsule)}: expected a capsule of a "
            f"tensor that was not taken: {_INSTEAD}"
        )
    bits = tensor.bits * tensor.lanes
    if bits % 8:
        raise TypeError(
            f"{what}: {kind} has elements of {bits} bits: register the bytes that hold them"
        )
    with _failing(f"{what}: DLPack's description of {kind} is no plain memory"):
        return _read_tensor(tensor, readonly, devices, capsule)


def _read_tensor(
    tensor: _Tensor, readonly: bool, devices: Sequence[int], capsule: object
) -> Described:
    if tensor.device_type not in devices:
        raise TypeError(
            f"the tensor's device is of type {tensor.device_type}, and __dlpack_device__ says "
            f"{' or '.join(map(str, devices))}"
        )
    if tensor.code == _OPAQUE_HANDLE:
        raise TypeError("its elements are handles, which have no meaning to a peer")
    item = tensor.bits * tensor.lanes // 8
    if not item:
        raise TypeError(f"its elements have {tensor.bits} bits and {tensor.lanes} lanes")
    count = tensor.ndim
    if not 0 <= count <= _MOST_DIMENSIONS:
        raise TypeError(f"it has {count} dimensions: expected 0..{_MOST_DIMENSIONS}")
    if count and not tensor.shape:
        raise TypeError(f"it has {count} dimensions, and no shape")
    shape = _sizes(tensor.shape[:count] if count else (), "shape", 0)
    strides = None
    if count and tensor.strides:
        strides = [stride * item for stride in tensor.strides[:count]]
    if prod(shape) and not tensor.data:
        raise TypeError(f"its address is 0, and it has {prod(shape)} elements")
    address = (tensor.data or 0) + tensor.byte_offset
    return _checked(Described(address, shape, strides, item, readonly, capsule))


def _is_dense(pairs: Sequence[tuple[int, int]], item: int) -> bool:
    for count, stride in pairs:
        if count != 1 and stride != item:
            return False
        item *= count
    return True
