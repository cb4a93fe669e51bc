"""Regions of dma-bufs: memory of GPUs and other devices, without Python's buffer protocol."""

from typing import Any

from aiordma._base.arguments import resource, whole_number, wrong_type
from aiordma._base.enums import Access
from aiordma._base.errors import check_pointer, check_positive_errno, check_supported
from aiordma._base.interrupts import deferring
from aiordma._base.provider import Provider
from aiordma._base.ranges import RemoteMemory
from aiordma._native import ffi
from aiordma.verbs.device import ProtectionDomain
from aiordma.verbs.resource import Resource

__all__ = ("DmabufRegion",)


class DmabufRegion(Resource):
    """Memory of another device, registered by the descriptor of its dma-buf. The CPU need not be
    able to reach it.

    A peer reaches it with `remote()`. The raw post methods of `QueuePair` take it as a part. The
    kernel keeps the memory while it is registered. The descriptor may be closed.

    `address` is the address of its first byte in work requests and for peers: the iova.

    Args:
        domain: the protection domain.
        fd: the descriptor of the dma-buf, from the driver of the memory: for CUDA,
            cuMemGetHandleForAddressRange; for torch and others, their exporter.
        length: bytes to register.
        offset: where the region begins in the dma-buf, in bytes.
        access: the permitted access.
        iova: the region's `address`; commonly the address of the memory in the GPU's own space, so
            that its pointers are the addresses of work requests.

    Raises:
        TypeError, ValueError: an argument has the wrong type, or is out of range.
        NotSupportedError: the device or the installed rdma-core (34 is the first) cannot register
            dma-bufs, or the device cannot reach this one. (rxe and siw cannot.)
        VerbsCallError: the driver refused; for example, the descriptor is no dma-buf.
        ClosedError, ForkError: the domain is closed, or was opened by the parent of this process.

    See: man ibv_reg_mr, ibv_reg_dmabuf_mr.
    """

    _closing_rank = 3

    @deferring
    def __init__(
        self,
        domain: ProtectionDomain,
        fd: int,
        length: int,
        *,
        offset: int = 0,
        access: Access = Access.LOCAL_WRITE,
        iova: int = 0,
    ) -> None:
        call = "DmabufRegion"
        resource(domain, "domain", "a ProtectionDomain", call)
        fd = whole_number(fd, "fd", 0, 2**31 - 1, call)
        length = whole_number(length, "length", 1, 2**63 - 1, call)
        offset = whole_number(offset, "offset", 0, 2**63 - 1, call)
        iova = whole_number(iova, "iova", 0, 2**64 - 1, call)
        if not isinstance(access, int) or isinstance(access, bool):
            raise wrong_type(access, "access", "flags such as Access.REMOTE_READ", call)
        access = Access(whole_number(access, "access", 0, 2**31 - 1, call))
        if access & (Access.REMOTE_WRITE | Access.REMOTE_ATOMIC):
            access |= Access.LOCAL_WRITE
        register = domain.provider.reg_dmabuf_mr
        super().__init__(domain)
        self.domain = domain
        self.provider: Provider = domain.provider
        self.access: Access = access
        self.address: int = iova
        self.length: int = length
        try:
            self.pointer: Any = register(domain.pointer, offset, length, iova, fd, int(access))
            if self.pointer == ffi.NULL:
                check_supported(ffi.errno, "registering a dma-buf", domain.context.device_name)
            check_pointer(self.pointer, "ibv_reg_dmabuf_mr", f"descriptor {fd}")
        except BaseException:
            self._abandon()
            raise
        self.lkey: int = self.pointer.lkey
        self.rkey: int = self.pointer.rkey

    def __repr__(self) -> str:
        return f"<DmabufRegion of {self.length} bytes>"

    def __len__(self) -> int:
        return self.length

    def remote(self) -> RemoteMemory:
        """Return the description of the region that a peer needs for one-sided operations.

        Raises:
            ClosedError, ForkError: it is closed, or was registered by the parent of this process.
        """
        self._require_open()
        return RemoteMemory(self.address, self.length, self.rkey)

    def _destroy(self) -> None:
        check_positive_errno(self.provider.dereg_mr(self.pointer), "ibv_dereg_mr")
