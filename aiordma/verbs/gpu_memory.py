"""Registers memory of the CPU or of a GPU, which CUDA's driver exports as a dma-buf."""

import os
from mmap import PAGESIZE

from aiordma._base.enums import Access
from aiordma._base.errors import NotSupportedError
from aiordma.verbs.cuda import CudaError, export
from aiordma.verbs.device import ProtectionDomain
from aiordma.verbs.dmabuf import DmabufRegion
from aiordma.verbs.foreign_memory import Described, RegistrableMemory, described_on_gpu
from aiordma.verbs.memory import MemoryRegion, checked_access

__all__ = ("register_anywhere",)


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
    except (CudaError, NotSupportedError) as error:
        raise NotSupportedError(
            f"registering memory of a GPU ({type(memory).__name__}): {error}. Copy it to the CPU, "
            "and register the copy"
        ) from error


def _register(domain: ProtectionDomain, found: Described, access: Access) -> DmabufRegion:
    start = found.address & ~(PAGESIZE - 1)
    descriptor = export(start, found.address + found.length - start)
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
