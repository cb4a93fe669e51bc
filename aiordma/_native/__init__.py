"""The only door to C: no other module imports the compiled extensions.

`ffi` and `lib` are cffi's, for everything but the hot path. `lib` has our own C functions, the
inline verbs behind them, and the constants; every call that lives in libibverbs or librdmacm goes
through a provider's table (provider.h): rdma-core's, or that of the software device. Nothing is
opened at import.

The other names are the engine: the hot path as Python objects written in C (`engine/`, declared in
`_engine.pyi`). docs/hot-path.md describes it.

`leak` keeps an object that a device may still use, and all that it refers to, for the life of the
process. It cannot fail, and nothing collects the object.

Both extensions are the process's, and work in its main interpreter only: in another one importing
aiordma is an ImportError. They need the GIL: a free-threaded build of Python turns it on as it
imports them.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import aiordma._native._engine as _engine  # first: it refuses what is not the main interpreter
from aiordma._native._binding import ffi, lib
from aiordma._native._engine import (
    BATCH,
    COPY_LIMIT,
    ArrivalQueue,
    ArrivalView,
    BlockPort,
    ChainPort,
    CompletionFields,
    DatagramFields,
    DatagramReceive,
    Drain,
    HandleBase,
    InFlightTable,
    Lease,
    OpenRequests,
    Part,
    Pool,
    PooledReceives,
    Port,
    RegionBase,
    SendersBase,
    SharedPort,
    Slab,
    Slots,
    Spinner,
    StreamPath,
    Waiter,
    WindowBase,
    WorkRequest,
    begin_trace,
    call_at_end,
    call_then_run,
    end_chain,
    grh_ends,
    leak,
    set_engine_process,
    take_trace,
)

__all__ = (
    "BATCH",
    "COPY_LIMIT",
    "DATA_PATH",
    "ArrivalQueue",
    "ArrivalView",
    "BlockPort",
    "ChainPort",
    "CompletionFields",
    "DatagramFields",
    "DatagramReceive",
    "Drain",
    "HandleBase",
    "InFlightTable",
    "Lease",
    "OpenRequests",
    "Part",
    "Pool",
    "PooledReceives",
    "Port",
    "RegionBase",
    "SendersBase",
    "SharedPort",
    "Slab",
    "Slots",
    "Spinner",
    "StreamPath",
    "Waiter",
    "WindowBase",
    "WorkRequest",
    "begin_trace",
    "call_at_end",
    "call_then_run",
    "calls_port",
    "end_chain",
    "ffi",
    "given",
    "grh_ends",
    "leak",
    "lib",
    "load_rdma_core",
    "load_software",
    "set_engine_process",
    "take_trace",
)

Reference = TypeVar("Reference")

DATA_PATH: int = _engine.use_data_path(int(ffi.cast("uintptr_t", lib.aiordma_data_path())))
"""The address of the binding's data path (data_path.h), by which the engine posts and drains."""


def given(part: str) -> Callable[[Reference], Reference]:
    """Decorate what the engine uses of Python's."""

    def give(reference: Reference) -> Reference:
        parts: Any = {part: reference}
        _engine.give(**parts)
        return reference

    return give


def calls_port(name: str) -> Callable[[Reference], Reference]:
    """Decorate a method: a call goes to the method `name` of `self._port` first, without Python
    code. The decorated method takes the general path, and runs only if that returns None."""
    return lambda method: _engine.method(name, method)


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


def load_software(*, is_roce: bool = False) -> Any:
    """Return the table of calls of the software device, which is part of the binding.

    Args:
        is_roce: the connection manager of this table uses the RoCE device.
    """
    return lib.aiordma_software_roce() if is_roce else lib.aiordma_software()
