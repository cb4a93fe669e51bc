"""Regions of dma-bufs: memory of GPUs and other devices, without Python's buffer protocol."""

import os
from mmap import PAGESIZE
from typing import Any

from aiordma._base.arguments import resource, whole_number, wrong_type
from aiordma._base.calls import check_pointer, check_supported
from aiordma._base.enums import REMOTE_WRITING, Access, names_of
from aiordma._base.errors import NotSupportedError, VerbsCallError
from aiordma.verbs.device import ProtectionDomain
from aiordma.verbs.foreign_memory import RegistrableMemory
from aiordma.verbs.memory import MemoryRegion

__all__ = ("DmabufRegion", "checked_part")

_PERMITTED = Access.LOCAL_WRITE | Access.REMOTE_READ | REMOTE_WRITING | Access.RELAXED_ORDERING
"""What the kernel permits for a dma-buf (uverbs_std_types_mr.c): no windows can be bound to it."""


_INSTEAD = "copy the data to memory of the CPU, and register that"


class DmabufRegion(MemoryRegion):
    """Memory of another device, registered by the descriptor of its dma-buf. The CPU need not be
    able to access it.

    It is a MemoryRegion in everything except the memory itself: it and its slices are parts of work
    requests, and `remote()` describes them to a peer. Nothing of it is copied by the CPU. So
    `view`, `bytes(region)` and `reregister` raise NotSupportedError, and a request that also has
    buffers that are not registered registers them for this request, however short they are.

    The device keeps the memory while it is registered, and the region keeps a duplicate of the
    descriptor (for `Connection.grant`). So you may close yours.

    `address` is the address of its first byte in work requests and for peers: the iova.

    Args:
        domain: the protection domain.
        fd: the descriptor of the dma-buf, from the driver of the memory: for CUDA,
            cuMemGetHandleForAddressRange, which `Connection.register` calls for you.
        length: bytes to register.
        offset: where the region begins in the dma-buf, in bytes.
        access: the permitted access: LOCAL_WRITE, REMOTE_READ, REMOTE_WRITE, REMOTE_ATOMIC,
            RELAXED_ORDERING. LOCAL_WRITE is added if a remote permission requires it.
        iova: the region's `address`; commonly the address of the memory in the GPU's own space, so
            that its pointers are the addresses of work requests. It and `offset` lie the same
            number of bytes into a page. None: the number of `offset`.

    Raises:
        TypeError, ValueError: an argument has the wrong type, or is out of range; or the iova does
            not fit.
        NotSupportedError: the device or the installed rdma-core (34 is the first) cannot register
            dma-bufs, or the device cannot reach this one. (rxe and siw cannot.)
        VerbsCallError: the driver refused. EBADF: there is no such descriptor; EINVAL: it is no
            dma-buf, or ends before the region.
        ClosedError, ForkError: the domain is closed, or was opened by the parent of this process.

    See: man ibv_reg_mr, ibv_reg_dmabuf_mr.
    """

    def __init__(
        self,
        domain: ProtectionDomain,
        fd: int,
        length: int,
        *,
        offset: int = 0,
        access: Access = Access.LOCAL_WRITE,
        iova: int | None = None,
    ) -> None:
        resource(domain, "domain", "a ProtectionDomain", "DmabufRegion")
        fd, length, offset, access, iova = checked_part(
            fd, length, offset, access, iova, "DmabufRegion"
        )
        domain._require_open()
        self._offset = offset
        self._owner: object = None
        """The object whose memory it is, so that this is not used for anything else."""
        self._readonly = False
        self._descriptor = _duplicate(fd)
        try:
            self._enter(domain, access, iova, length, 0, lambda: self._register_descriptor(fd))
        except BaseException:
            self._close_descriptor()
            raise

    def _register_descriptor(self, fd: int) -> Any:
        domain, what = self.domain, "registering a dma-buf"
        arguments = (self._offset, self.length, self.address, fd, int(self.access))
        try:
            pointer = domain.provider.reg_dmabuf_mr(domain.pointer, *arguments)
            return check_pointer(pointer, "ibv_reg_dmabuf_mr", f"descriptor {fd}")
        except NotSupportedError as error:
            raise NotSupportedError(f"{what}: {error}") from None
        except VerbsCallError as error:
            try:
                check_supported(error.errno or 0, what, domain.context.device_name)
            except NotSupportedError as lacking:
                raise NotSupportedError(f"{lacking}: {_INSTEAD}") from None
            raise

    @property
    def view(self) -> memoryview:
        """There is none: the CPU does not access the memory.

        Raises:
            NotSupportedError: always.
        """
        raise NotSupportedError(
            f"{self!r} is memory of another device, which the CPU does not access: copy it with "
            "that device's functions, or READ it into memory of the CPU"
        )

    def reregister(
        self,
        access: Access | None = None,
        *,
        domain: ProtectionDomain | None = None,
        buffer: RegistrableMemory | None = None,
    ) -> None:
        """Refuse: a dma-buf's registration cannot be changed.

        Args:
            access, domain, buffer: as of `MemoryRegion.reregister`.

        Raises:
            NotSupportedError: always.
        """
        raise NotSupportedError(f"{self!r}: a dma-buf cannot be re-registered: register it anew")

    def _register_part(self, offset: int, length: int, access: Access) -> MemoryRegion:
        if self._readonly and access & Access.LOCAL_WRITE:
            raise TypeError(f"{self!r} is read-only, and {names_of(access)} lets the device write")
        return DmabufRegion(
            self.domain,
            self._descriptor,
            length,
            offset=self._offset + offset,
            access=access,
            iova=self.address + offset,
        )

    def _owner_of_memory(self) -> object:
        # The device keeps the pages. A GPU's allocator could give them to another tensor.
        return self._owner

    def _let_go(self) -> None:
        self._owner = None
        self._close_descriptor()

    def _close_descriptor(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def checked_part(
    fd: Any, length: Any, offset: Any, access: Any, iova: Any, call: str
) -> tuple[int, int, int, Access, int]:
    """Return the numbers that describe a part of a dma-buf and its access, after checking them.
    `call` is the function that was called, for messages.

    Raises:
        TypeError, ValueError: one has the wrong type, or is out of range, or they do not fit.
    """
    fd = whole_number(fd, "fd", 0, 2**31 - 1, call)
    length = whole_number(length, "length", 1, 2**63 - 1, call)
    offset = whole_number(offset, "offset", 0, 2**63 - 1, call)
    iova = offset if iova is None else whole_number(iova, "iova", 0, 2**64 - 1, call)
    access = _checked(access, call)
    if iova + length > 2**64:
        raise ValueError(f"{call}(): iova={iova:#x}: the region would end beyond the address space")
    if (iova - offset) % PAGESIZE:
        raise ValueError(
            f"{call}(): iova={iova:#x}: it lies {iova % PAGESIZE} bytes into a page, and "
            f"offset={offset} {offset % PAGESIZE}; they must be the same"
        )
    return fd, length, offset, access, iova


def _checked(access: Any, call: str) -> Access:
    if not isinstance(access, int) or isinstance(access, bool):
        expected = "flags such as Access.REMOTE_READ"
        raise wrong_type(access, "access", expected, call)
    flags = Access(whole_number(access, "access", 0, 2**31 - 1, call))
    if int(flags) & ~int(_PERMITTED):
        raise ValueError(
            f"{call}(): access={names_of(flags)}: for a dma-buf the kernel permits "
            f"{names_of(_PERMITTED)}"
        )
    return flags | Access.LOCAL_WRITE if flags & REMOTE_WRITING else flags


def _duplicate(fd: int) -> int:
    try:
        return os.dup(fd)
    except OSError as error:
        number = error.errno or 0
    raise VerbsCallError(number, "ibv_reg_dmabuf_mr", f"descriptor {fd}")
