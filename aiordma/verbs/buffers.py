"""Memory of any object as bytes: the view of a buffer, of an array without one, and their
addresses."""

import re
from pickle import PickleBuffer
from typing import Any, cast

from aiordma._base.arguments import Buffer, shown
from aiordma._native import ffi
from aiordma.verbs.foreign_memory import (
    RegistrableMemory,
    array_view,
    foreign_view,
    has_object_dtype,
)

__all__ = ("address_of", "blank_bytes", "flat_view", "registrable_view")

_OBJECTS = re.compile(r"(?:[^:O]|:[^:]*:)*O")
"""Matches the format (PEP 3118) of a buffer of Python objects. Between colons are fields' names."""


def registrable_view(memory: RegistrableMemory, call: str) -> memoryview:
    """Return a view of the memory as bytes. Raises the errors of `flat_view` and `foreign_view`,
    with the name of the called function."""
    where = f"{call}(): buffer"
    given: Any = memory
    try:
        return flat_view(given, where)
    except (TypeError, ValueError) as error:  # ValueError: also elements that have no buffer format
        if _holds_objects(memory):
            raise
        no_buffer = error
    try:
        view = foreign_view(memory, where)
        if view is None:
            raise no_buffer
        return view
    except BufferError:
        raise _not_contiguous(where) from None
    finally:
        del no_buffer  # its traceback holds this frame, and so the memory


def _holds_objects(memory: object) -> bool:
    if has_object_dtype(memory):
        return True
    try:
        return bool(_OBJECTS.match(memoryview(cast("Buffer", memory)).format))
    except (TypeError, ValueError, BufferError):
        return False


def flat_view(buffer: Buffer, where: str = "buffer", place: int = 0) -> memoryview:
    """Return a view of an object's memory as bytes, for elements of every type.

    Args:
        buffer: the object.
        where: the parameter's name, for messages, with {} for the index of a list's element.
        place: this index.

    Raises:
        TypeError: the object has no buffer, or its elements are Python objects.
        ValueError: the buffer is not contiguous.
    """
    if isinstance(buffer, memoryview):
        if "O" in buffer.format and _OBJECTS.match(buffer.format):
            raise _objects_error(where.format(place), buffer)
        try:
            return _flat_memoryview(buffer)
        except BufferError:
            raise _not_contiguous(where.format(place)) from None
    has_objects = False
    try:
        if not isinstance(buffer, bytes | bytearray):
            # First, because of a scalar of numpy's that refuses, PickleBuffer drops a reference
            # that it does not have, and frees the scalar.
            has_objects = bool(_OBJECTS.match(memoryview(buffer).format))
        # Unlike memoryview.cast, this ignores the type of the elements: it also works for arrays of
        # structures, and for foreign byte order.
        exported = PickleBuffer(buffer)
    except TypeError:
        raise TypeError(
            f"{where.format(place)}={shown(buffer)}: {type(buffer).__name__} has no buffer: give "
            "bytes, bytearray, memoryview, mmap, a numpy array, registered memory, or anything "
            "else with the buffer protocol"
        ) from None
    except (BufferError, ValueError) as error:
        return _formatless_view(buffer, where.format(place), error)
    if has_objects:
        raise _objects_error(where.format(place), buffer)
    try:
        return exported.raw()
    except BufferError:
        raise _not_contiguous(where.format(place)) from None


def _formatless_view(buffer: object, what: str, error: Exception) -> memoryview:
    """Return `flat_view` of an object that refuses its buffer, as numpy does if an element has no
    buffer format (a date, or a structure with one).

    Args:
        buffer: the object.
        what: the parameter's name, for messages.
        error: the object's refusal.

    Raises: as `flat_view`.
    """
    if has_object_dtype(buffer):
        raise _objects_error(what, buffer) from None
    try:
        view = array_view(buffer, what)
    except BufferError:
        raise _not_contiguous(what) from None
    if view is None:
        raise ValueError(
            f"{what}: {type(buffer).__name__} gives no buffer: {error}: register it"
        ) from None
    return view


def _objects_error(what: str, buffer: object) -> TypeError:
    return TypeError(
        f"{what}={shown(buffer)}: the elements of this {type(buffer).__name__} are Python objects, "
        "and its bytes are their addresses in this process: convert it, as numpy's astype() does, "
        "or serialize it"
    )


def _not_contiguous(what: str) -> ValueError:
    return ValueError(f"{what}: the buffer is not contiguous: copy it, or register its base")


def _flat_memoryview(view: memoryview) -> memoryview:
    """Return `flat_view` of a memoryview, without a lasting export of the memoryview.

    Up to 3.12, CPython's garbage collector crashes if such an export is part of a cycle, which any
    traceback can create (memory_clear releases memory that the exports still need). A cast is a
    view of the memoryview's base, not of the memoryview.

    Raises:
        BufferError: the memory, or that of its base, is not contiguous.
    """
    try:
        return view.cast("B")
    except (TypeError, ValueError):
        pass  # structures, foreign byte order, Fortran order, or empty
    taken = PickleBuffer(view)
    try:
        with taken.raw() as raw:
            start, length = address_of(raw), raw.nbytes
    finally:
        taken.release()
    base = view.obj
    whole = _flat_memoryview(base) if isinstance(base, memoryview) else PickleBuffer(base).raw()
    offset = start - address_of(whole) if length else 0
    part = whole[offset : offset + length]
    return part.toreadonly() if view.readonly else part


def blank_bytes(length: int) -> tuple[bytes, Any]:
    """Return new bytes of zeros, and a writable buffer of their memory. The caller fills the buffer
    before it passes the bytes on. This is fast, because it does not access the memory. The buffer
    keeps the bytes alive.
    """
    made = bytes(length)
    return made, ffi.buffer(ffi.from_buffer("char[]", made), length)


def address_of(view: memoryview) -> int:
    """Return the address of a view's memory, which is valid while the view exists.

    Only the view keeps the memory in place. A lasting export by cffi would, together with a
    memoryview, crash the garbage collector of CPython 3.11 if both are part of a cycle, which any
    traceback can create.
    """
    with ffi.from_buffer(view) as exported:
        return int(ffi.cast("uintptr_t", exported))
