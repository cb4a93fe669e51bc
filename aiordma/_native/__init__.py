"""The only door to C: no other module imports the compiled binding.

`ffi` and `lib` are cffi's. `lib` has our own C functions, the inline verbs behind them, and the
constants; every call that lives in libibverbs or librdmacm goes through a provider's table
(provider.h): rdma-core's, or that of the software device. Nothing is opened at import.
"""

from typing import Any

from aiordma._native._binding import ffi, lib

__all__ = ("ffi", "lib", "load_rdma_core", "load_software")


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
