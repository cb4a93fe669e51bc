"""Registered memory: anything with a buffer, pinned, and its slices (man ibv_reg_mr)."""

import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from pickle import PickleBuffer
from typing import Any

from aiordma._native import ffi
from aiordma.enums import Access
from aiordma.errors import BusyError, check_pointer, check_positive_errno
from aiordma.ranges import RemoteMemory, resolve_slice
from aiordma.verbs.device import ProtectionDomain
from aiordma.verbs.resource import Resource

__all__ = ("MemoryRegion", "MemorySlice", "address_of", "flat_view", "gather")

_SGE = struct.Struct("=QII")  # struct ibv_sge: address, length, lkey
_OUTLIVING: list[memoryview] = []
"""Memory that the device may touch and nobody else can reach any more."""
_REMOTE = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
_NEED_LOCAL_WRITE = Access.REMOTE_WRITE | Access.REMOTE_ATOMIC


class MemorySlice:
    """A contiguous part of a memory region: what a work request reads or writes locally.

    Slicing is bounds-checked: nothing is clamped. `view` is the memory itself.
    """

    __slots__ = ("address", "length", "region", "sge")

    def __init__(self, region: "MemoryRegion", offset: int, length: int) -> None:
        self.region = region
        self.address = region.address + offset
        self.length = length
        # Made once, posted many times. A length of 2**32 or more has no place in a work request.
        self.sge = _SGE.pack(self.address, length, region.lkey) if length < 2**32 else b""

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        offset = self.address - self.region.address
        return f"<MemorySlice [{offset}:{offset + self.length}] of {self.region!r}>"

    def __getitem__(self, key: slice) -> "MemorySlice":
        """Return a part of this part.

        Raises:
            IndexError: the slice lies outside.
        """
        offset, length = resolve_slice(key, self.length, "a memory slice")
        return MemorySlice(self.region, self.address - self.region.address + offset, length)

    @property
    def view(self) -> memoryview:
        """The bytes themselves. While the device owns them they may change at any time."""
        offset = self.address - self.region.address
        return self.region.view[offset : offset + self.length]

    def remote(self) -> RemoteMemory:
        """Describe this part to a peer, who may then aim one-sided operations at it.

        Raises:
            ValueError: the region was registered without any remote access.
        """
        if not self.region.access & _REMOTE:
            raise ValueError(
                "this memory was registered without remote access: "
                "register(buffer, Access.REMOTE_READ | Access.REMOTE_WRITE)"
            )
        return RemoteMemory(self.address, self.length, self.region.rkey)

    def hold(self) -> None:
        """Count one more work request that owns this memory."""
        self.region.users += 1

    def release(self) -> None:
        """Count one fewer; the last one of a retired region closes it."""
        self.region.users -= 1
        if self.region.retired and not self.region.users:
            self.region.close()


class MemoryRegion(Resource):
    """A Python buffer that a device may read and write.

    The buffer stays exported while it is registered: a bytearray cannot be resized, nor can any
    buffer be freed, under the device. `users` counts the posted requests that own a part of it.

    Args:
        domain: where it is registered.
        buffer: bytearray, memoryview, mmap, array, numpy array, bytes, ...: contiguous, not empty.
        access: what is permitted. None: LOCAL_WRITE if the buffer is writable, else nothing but
            reading. LOCAL_WRITE is added where a remote permission requires it.

    Raises:
        TypeError: no buffer, or a read-only one where the access means writing.
        ValueError: empty or not contiguous.
        VerbsCallError: the driver refused; the message names the limit.
    """

    closing_rank = 3

    def __init__(self, domain: ProtectionDomain, buffer: Any, access: Access | None = None) -> None:
        view = flat_view(buffer)
        if not view.nbytes:
            raise ValueError("an empty buffer cannot be registered")
        if access is None:
            access = Access(0) if view.readonly else Access.LOCAL_WRITE
        elif access & _NEED_LOCAL_WRITE:
            access |= Access.LOCAL_WRITE
        if view.readonly and access & Access.LOCAL_WRITE:
            raise TypeError(
                f"{type(buffer).__name__} is read-only, and {access!r} lets the device write to it"
            )
        super().__init__(domain)
        self.domain = domain
        self.access = access
        self.view = view
        self.users = 0
        self.retired = False
        self.forget: Callable[[], object] = lambda: None
        """Called as it closes: for whoever keeps a list of regions."""
        self.address = address_of(view)
        self.length = len(view)
        start = ffi.cast("void *", self.address)
        try:
            self.pointer = check_pointer(
                domain.provider.reg_mr(domain.pointer, start, self.length, access), "ibv_reg_mr"
            )
        except BaseException:
            self._abandon()
            raise
        self.lkey: int = self.pointer.lkey
        self.rkey: int = self.pointer.rkey

    def __repr__(self) -> str:
        return f"<MemoryRegion of {self.length} bytes>"

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, key: slice) -> MemorySlice:
        """Return a part of the region.

        Raises:
            IndexError: the slice lies outside.
        """
        self.require_open()
        return MemorySlice(self, *resolve_slice(key, self.length, "a memory region"))

    def remote(self) -> RemoteMemory:
        """Describe the whole region to a peer. See `MemorySlice.remote`."""
        return self[:].remote()

    def close(self) -> None:
        """Deregister the memory, after which no rkey reaches it. Idempotent.

        Raises:
            BusyError: posted requests still own it; await them first.
        """
        if self._closed:
            return
        if self.users:
            raise BusyError(f"{self.users} posted work requests still own it: await them first")
        super().close()

    def retire(self) -> None:
        """Close it now, or, where posted requests still own it, when the last one has ended."""
        self.retired = True
        if not self.users:
            self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self.users:
            # Collected together with the requests that own it, and their queue pair: which of
            # them goes first is up to the collector. The bytes must outlive them all.
            _OUTLIVING.append(self.view)
            self.users = 0
        super().__del__()

    def _destroy(self) -> None:
        self.forget()
        check_positive_errno(self.domain.provider.dereg_mr(self.pointer), "ibv_dereg_mr")
        with suppress(BufferError):  # someone else looks at it: the export ends with their view
            self.view.release()


def flat_view(buffer: Any) -> memoryview:
    """Return a view of an object's memory as bytes, whatever it is made of.

    Raises:
        TypeError: it has no buffer.
        ValueError: its memory is not in one piece.
    """
    try:
        # Unlike memoryview.cast this knows no types: arrays of structures and of foreign byte
        # order are bytes as well.
        return PickleBuffer(buffer).raw()
    except TypeError:
        raise TypeError(
            f"{type(buffer).__name__} has no buffer: give bytes, bytearray, memoryview, mmap, a "
            "numpy array, registered memory, or anything else with the buffer protocol"
        ) from None
    except BufferError:
        raise ValueError("the buffer is not contiguous: copy it, or register its base") from None


def address_of(view: memoryview) -> int:
    """Return where a view's memory begins; it stays there for as long as the view is kept.

    The view alone keeps it: a lasting export of cffi's, of a memoryview, crashes the garbage
    collector of CPython 3.11 when both are part of one cycle, such as any traceback can make.
    """
    with ffi.from_buffer(view) as exported:
        return int(ffi.cast("uintptr_t", exported))


def gather(parts: Iterable[MemorySlice]) -> bytes:
    """Join slices into an array of struct ibv_sge, as the post functions take it.

    Raises:
        ValueError: a slice is longer than a work request can say (4 GiB).
    """
    parts = list(parts)
    if any(not part.sge for part in parts):
        raise ValueError("4 GiB or more in one part: a work request's part has a 32-bit length")
    return b"".join([part.sge for part in parts])
