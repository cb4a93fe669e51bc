"""Registers memory of the CPU or of a GPU. That of a GPU is exported as a dma-buf by CUDA's driver,
libcuda, which is opened when it is first needed.

See: CUDA's driver API, cuMemGetHandleForAddressRange.
"""

import ctypes
import os
from mmap import PAGESIZE
from typing import Any

from aiordma._base.enums import Access
from aiordma._base.errors import NotSupportedError
from aiordma.verbs.device import ProtectionDomain
from aiordma.verbs.dmabuf import DmabufRegion
from aiordma.verbs.foreign_memory import Described, RegistrableMemory, described_on_gpu
from aiordma.verbs.memory import MemoryRegion, checked_access

__all__ = ("register_anywhere",)

LIBRARY = "libcuda.so.1"
_EXPORT = "cuMemGetHandleForAddressRange"
_DMA_BUF_FD = 1
"""CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD"""


def register_anywhere(
    domain: ProtectionDomain,
    memory: RegistrableMemory,
    access: Access | None = None,
    call: str = "register",
) -> MemoryRegion:
    """Register memory where it is: a MemoryRegion if it is the CPU's, else a DmabufRegion.

    Args:
        domain: the protection domain.
        memory: as of `Connection.register`.
        access: as of MemoryRegion.
        call: the function that was called, for messages.

    Raises:
        as the constructor of MemoryRegion, and as that of DmabufRegion.
        NotSupportedError: the memory is a GPU's, and CUDA's driver cannot export it.
    """
    found = described_on_gpu(memory, f"{call}(): buffer")
    if found is None:
        return MemoryRegion._registered_by(call, domain, memory, access)
    if not found.is_contiguous:
        raise ValueError(
            f"{call}(): buffer: the tensor is not contiguous: copy it, or register its base"
        )
    access = checked_access(domain, memory, found.length, found.readonly, access, call)
    try:
        return _register(domain, found, access)
    except NotSupportedError as error:
        raise NotSupportedError(
            f"registering memory of a GPU ({type(memory).__name__}): {error}. Copy it to the CPU, "
            "and register the copy"
        ) from error


def _register(domain: ProtectionDomain, found: Described, access: Access) -> DmabufRegion:
    start = found.address & ~(PAGESIZE - 1)
    descriptor = _export(start, found.address + found.length - start)
    try:
        region = DmabufRegion(
            domain,
            descriptor,
            found.length,
            offset=found.address - start,
            access=access,
            iova=found.address,
        )
    finally:
        os.close(descriptor)
    region._readonly, region._owner = found.readonly, found.owner
    return region


def _export(start: int, length: int) -> int:
    """Return the descriptor of a dma-buf of the pages of a GPU's memory that begin at `start`."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise NotSupportedError(f"CUDA's driver cannot be opened ({error})") from None
    export = getattr(library, _EXPORT, None)
    if export is None:
        raise NotSupportedError(
            f"CUDA's driver has no {_EXPORT}: install that of CUDA 11.7 or newer"
        )
    export.restype = ctypes.c_int
    export.argtypes = (
        *(ctypes.POINTER(ctypes.c_int), ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int),
        ctypes.c_ulonglong,
    )
    descriptor = ctypes.c_int(-1)
    pages = -(-length // PAGESIZE) * PAGESIZE
    failed = export(ctypes.byref(descriptor), start, pages, _DMA_BUF_FD, 0)
    if failed:
        raise NotSupportedError(
            f"CUDA's driver exports no dma-buf of it ({_EXPORT}: {_name(library, failed)})"
        )
    return descriptor.value


def _name(library: Any, error: int) -> str:
    """Return the name of an error of CUDA's driver."""
    name = ctypes.c_char_p()
    library.cuGetErrorName(error, ctypes.byref(name))
    return f"error {error}" if name.value is None else name.value.decode(errors="replace")
