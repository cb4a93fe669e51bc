"""Memory of objects without Python's buffer protocol: `__array_interface__`, DLPack, and
`__cuda_array_interface__`.

See: numpy's page "The array interface protocol"; the DLPack specification (dlpack.h); Numba's page
"CUDA Array Interface".
"""

import ctypes
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, Protocol, TypeAlias

from aiordma._base.arguments import Buffer
from aiordma._base.errors import NotSupportedError
from aiordma._native import ffi

__all__ = (
    "Described",
    "HasArrayInterface",
    "HasCudaArrayInterface",
    "HasDLPack",
    "RegistrableMemory",
    "array_view",
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
_VERSION = (1, 0)
"""The newest version of DLPack that is understood here."""


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
        TypeError: the object's own function refused, or describes no plain memory.
    """
    found = _described(thing, what)
    return None if found is None else _view_of(found)


def array_view(thing: object, what: str) -> memoryview | None:
    """Return `foreign_view` of an array with `__array_interface__`. None: the object has none.

    Args: as of `foreign_view`.

    Raises: BufferError and TypeError as `foreign_view`.
    """
    described = getattr(thing, "__array_interface__", None)
    return None if described is None else _view_of(_of_array_interface(thing, described, what))


def has_object_dtype(thing: object) -> bool:
    """Return whether numpy's dtype of an array says that its elements have Python objects. It also
    knows this of elements that have no buffer format."""
    return bool(getattr(getattr(thing, "dtype", None), "hasobject", False))


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
        TypeError: the object's own function refused, or describes no plain memory.
    """
    if hasattr(type(thing), "__dlpack_device__"):
        device = int(thing.__dlpack_device__()[0])
        if device in _HOST:
            return None
        if device != _CUDA:
            raise NotSupportedError(
                f"registering memory of a GPU: {type(thing).__name__} is on a device of DLPack's "
                f"type {device}, and CUDA's type {_CUDA} is supported: copy it to the CPU"
            )
        return _of_dlpack(thing, _WITHOUT_WAITING, what)
    described = getattr(thing, "__cuda_array_interface__", None)
    return None if described is None else _of_array_interface(thing, described, what)


def _described(thing: Any, what: str) -> Described | None:
    if described_on_gpu(thing, what) is not None:
        raise NotSupportedError(
            f"MemoryRegion registers memory of the CPU, and {type(thing).__name__} is on a GPU: "
            "use Connection.register or Domain.register, or copy it to the CPU"
        )
    described = getattr(thing, "__array_interface__", None)
    if described is not None:
        return _of_array_interface(thing, described, what)
    return _of_dlpack(thing, {}, what) if hasattr(type(thing), "__dlpack__") else None


def _of_array_interface(thing: object, described: dict[str, Any], what: str) -> Described:
    """Read numpy's description, or Numba's, which is the same."""
    data, kind = described.get("data"), str(described["typestr"])
    has_objects = "O" in kind or has_object_dtype(thing) or _has_objects(described.get("descr", ()))
    if not isinstance(data, tuple) or has_objects:
        raise TypeError(
            f"{what}: the array interface of {type(thing).__name__} describes no plain memory"
        )
    address, readonly = data
    size = kind[2:].partition("[")[0]  # M8[s]: eight bytes
    item = int(size) * (4 if kind[1] == "U" else 1)  # a character of U has 4 bytes
    strides = described.get("strides")
    # The description of one of numpy's scalars keeps the copy that it describes ("__ref").
    owner = thing, described
    return Described(address, described["shape"], strides, item, bool(readonly), owner)


def _has_objects(fields: Any) -> bool:
    """Return whether a field of a structure (`descr`), or of a structure in it, is an object. The
    typestr of structures is V."""
    return any(
        _has_objects(kind) if isinstance(kind, list | tuple) else "O" in str(kind)
        for _, kind, *_ in fields
    )


def _of_dlpack(thing: Any, how: dict[str, int], what: str) -> Described:
    kind = type(thing).__name__
    knows_flags = True
    try:
        try:
            # A copy would not be the program's memory: what a peer writes would not reach it.
            capsule = thing.__dlpack__(max_version=_VERSION, copy=False, **how)
        except TypeError:  # older than DLPack 1.0
            knows_flags = False
            capsule = thing.__dlpack__(**how)
    except (BufferError, ValueError) as error:
        raise TypeError(f"{what}: {kind}.__dlpack__() refused: {error}") from error
    # A library that knows the flags and gives none cannot say that memory is read-only (jax).
    readonly = knows_flags
    # The capsule is never consumed. So its destructor frees the tensor, when the view has gone.
    if _capsule_is(capsule, b"dltensor_versioned"):
        managed = _Versioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        if managed.major > _VERSION[0]:
            raise TypeError(f"{what}: DLPack version {managed.major} of {kind} is not known")
        if managed.flags & _IS_COPIED:
            raise TypeError(
                f"{what}: {kind}.__dlpack__(copy=False) made a copy, and a peer would not reach "
                "the tensor: register memory that DLPack describes without a copy"
            )
        readonly, tensor = bool(managed.flags & _READ_ONLY), managed.tensor
    else:
        tensor = _Tensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    bits = tensor.bits * tensor.lanes
    if bits % 8:
        raise TypeError(
            f"{what}: {kind} has elements of {bits} bits: register the bytes that hold them"
        )
    shape = tensor.shape[: tensor.ndim]
    strides = None
    if tensor.strides:
        strides = [stride * bits // 8 for stride in tensor.strides[: tensor.ndim]]
    address = (tensor.data or 0) + tensor.byte_offset
    return Described(address, shape, strides, bits // 8, readonly, capsule)


def _is_dense(pairs: Sequence[tuple[int, int]], item: int) -> bool:
    for count, stride in pairs:
        if count != 1 and stride != item:
            return False
        item *= count
    return True
