"""A device that takes no time, under a real connection: what remains is the cost of aiordma.

It replaces calls of the device's context and of the provider's table. They are below aiordma, all
of whose code runs as usual.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from aiordma import Connection, Datagram
from tests.internals import ffi, software

from .compiling import NATIVE, compiled


@cache
def _library() -> Any:
    return ctypes.CDLL(str(compiled("instant.c", "-shared", "-fPIC", f"-I{NATIVE}")))


def _pointer(function: Any) -> int:
    found = ctypes.cast(function, ctypes.c_void_p).value
    assert found
    return found


@cache
def prepare() -> None:
    """Put it into the software device's table; before the first connection of this process."""
    library = _library()
    below = software().table
    table = ffi.new("struct aiordma_provider *", below[0])
    library.instant_over(
        ctypes.c_void_p(int(ffi.cast("uintptr_t", below.get_cq_event))),
        ctypes.c_void_p(int(ffi.cast("uintptr_t", below.ack_cq_events))),
    )
    table.get_cq_event = ffi.cast(
        "int (*)(struct ibv_comp_channel *, struct ibv_cq **, void **)",
        _pointer(library.instant_get_cq_event),
    )
    table.ack_cq_events = ffi.cast(
        "void (*)(struct ibv_cq *, unsigned int)", _pointer(library.instant_ack_cq_events)
    )
    software().table = table


@contextmanager
def instant(connection: Connection | Datagram) -> Iterator[None]:
    """Complete each request that is posted in the block at once, without sending anything."""
    library = _library()
    context = int(ffi.cast("uintptr_t", connection.context.pointer))
    library.instant_begin(ctypes.c_void_p(context))
    try:
        yield
    finally:
        left = library.instant_end()
        assert left == 0, f"{left} completions were not taken"


def doorbell_fails(error: int) -> None:
    """Complete the next post, in a block of `instant`, without passing it to the device."""
    _library().instant_doorbell_fails(error)


def refuses(error: int) -> None:
    """Refuse the next post on a send queue, in a block of `instant`."""
    _library().instant_refuses(error)
