"""The only door to C: no other module imports the compiled binding.

`ffi` and `lib` are cffi's, for everything but the hot path. `lib` has our own C functions, the
inline verbs behind them, and the constants; every call that lives in libibverbs or librdmacm goes
through a provider's table (provider.h): rdma-core's, or that of the software device. Nothing is
opened at import.

`c_backend` is the hot path as Python objects written in C (engine/). What this module exports of it
is used with both backends: registered memory, slots, completions, what a task waits for, and what
cannot be written in Python (docs/design.md, "One data path, two backends"). The rest has a
counterpart in Python: requests, the in-flight table, ports, the drain, arrivals, streams' paths.
`_base/backend.py` chooses.

`leak` keeps an object that a device may still use, and all that it refers to, for the life of the
process. It cannot fail, and nothing collects the object.

Both are the process's, and work in its main interpreter only: in another one importing aiordma is
an ImportError. They need the GIL: a free-threaded build of Python turns it on as it imports them.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import aiordma._native._engine as _engine  # first: it refuses what is not the main interpreter
from aiordma._native._binding import ffi, lib
from aiordma._native._engine import (
    CompletionFields,
    DatagramFields,
    HandleBase,
    Lease,
    Part,
    Pool,
    RegionBase,
    SendersBase,
    Slab,
    Slots,
    Spinner,
    Waiter,
    WindowBase,
    leak,
)

__all__ = (
    "CompletionFields",
    "DatagramFields",
    "HandleBase",
    "Lease",
    "Part",
    "Pool",
    "RegionBase",
    "SendersBase",
    "Slab",
    "Slots",
    "Spinner",
    "Waiter",
    "WindowBase",
    "c_backend",
    "ffi",
    "given",
    "leak",
    "lib",
    "load_rdma_core",
    "load_software",
)

Reference = TypeVar("Reference")


def _joined(engine: Any) -> Any:
    """Let the engine post and drain by the binding's data path (data_path.h)."""
    engine.use_data_path(int(ffi.cast("uintptr_t", lib.aiordma_data_path())))
    return engine


c_backend: Any = _joined(_engine)
"""The engine, joined with the binding."""


def given(part: str) -> Callable[[Reference], Reference]:
    """Decorate what the engine uses of Python's."""

    def give(reference: Reference) -> Reference:
        c_backend.give(**{part: reference})
        return reference

    return give


def load_rdma_core() -> Any:
    """Return the table of calls of libibverbs and librdmacm, opening both at the first use.

    Raises:
        OSError: one of the two is not installed; the text is the dynamic loader's.
    """
    message = ffi.new("char[512]")
    table = lib.aiordma_rdma_core(message, len(message))
    if table == ffi.NULL:
        raise OSError(ffi.string(message).decode(errors="replace"))
    return table


def load_software() -> Any:
    """Return the table of calls of the software device, which is part of the binding."""
    return lib.aiordma_software()
