"""Registered memory: anything with a buffer, pinned, and its slices (man ibv_reg_mr)."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from mmap import PAGESIZE
from pickle import PickleBuffer
from typing import Any, TypeAlias

from aiordma._base.arguments import Buffer, shown, whole_number, wrong_type
from aiordma._base.device_enums import OnDemandPaging
from aiordma._base.enums import Access, names_of
from aiordma._base.errors import (
    BusyError,
    NotSupportedError,
    check_pointer,
    check_positive_errno,
    check_supported,
)
from aiordma._base.ranges import RemoteMemory, resolve_slice
from aiordma._native import Part, RegionBase, ffi, lib
from aiordma.verbs.device import ProtectionDomain
from aiordma.verbs.resource import Resource

__all__ = (
    "LocalMemory",
    "MemoryRegion",
    "MemorySlice",
    "address_of",
    "blank_bytes",
    "flat_view",
    "gather",
)

_OUTLIVING: list[memoryview] = []
"""Memory that the device may touch and nobody else can reach any more."""
_REMOTE = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
_NEED_LOCAL_WRITE = Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
_NOT_EVERY_DEVICE = Access.ON_DEMAND | Access.HUGETLB | Access.MW_BIND
_OPTIONAL = lib.IBV_ACCESS_OPTIONAL_RANGE
_BYTES = "its bytes are its view, and bytes(...) copies them"
_SIW = 0x626D74
"""The vendor_id of siw, whose kernel module takes an iova and ignores it."""


class MemorySlice(Part):
    """A contiguous part of a memory region: what a work request reads or writes locally.

    Slicing is bounds-checked: nothing is clamped. `view` is the memory itself, `bytes(part)` a
    copy of it.
    """

    __slots__ = ()

    region: "MemoryRegion"

    def __init__(self, region: "MemoryRegion", offset: int, length: int) -> None:
        super().__init__(region, region.address + offset, length, region.lkey)

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
        offset, length = resolve_slice(key, self.length, "a memory slice", _BYTES)
        return MemorySlice(self.region, self.address - self.region.address + offset, length)

    def __bytes__(self) -> bytes:
        self.region.require_open()
        return self.copy(self.length)

    @property
    def view(self) -> memoryview:
        """The bytes themselves. While the device owns them they may change at any time."""
        offset = self.address - self.region.address
        return self.region.view[offset : offset + self.length]

    def copy(self, length: int) -> bytes:
        """Return its first bytes."""
        offset = self.address - self.region.address
        return self.region.view[offset : offset + length].tobytes()

    def remote(self) -> RemoteMemory:
        """Describe this part to a peer, which may then aim one-sided operations at it.

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
        """Count one more work request that owns this memory.

        Raises:
            ClosedError: the region was closed since the slice was checked.
        """
        if not self.region.usable:
            self.region.require_open()
        self.region.users += 1

    def release(self) -> None:
        """Count one fewer; the last one of a retired region closes it."""
        self.region.users -= 1
        if self.region.retired and not self.region.users:
            self.region.close()


class MemoryRegion(RegionBase, Resource):
    """A Python buffer that a device may read and write.

    `bytes(region)` copies what is in it.

    The buffer stays exported while it is registered: a bytearray cannot be resized, nor can any
    buffer be freed, under the device. `users` counts the posted requests that own a part of it.

    `address` is what work requests and peers call its first byte: the memory's own address, or the
    iova.

    Args:
        domain: where it is registered.
        buffer: bytearray, memoryview, mmap, array, numpy array, bytes, ...: contiguous, not empty.
        access: what is permitted. None: LOCAL_WRITE if the buffer is writable, else nothing but
            reading. LOCAL_WRITE is added where a remote permission requires it. ZERO_BASED means
            iova=0. A device that knows no RELAXED_ORDERING keeps the order.
        iova: the `address` that it shall have (man ibv_reg_mr_iova). It must lie as far into a
            page as the buffer does: an mmap begins with a page.

    Raises:
        TypeError: no buffer, or a read-only one where the access means writing.
        ValueError: empty or not contiguous, an iova that does not fit, HUGETLB without ON_DEMAND.
        NotSupportedError: the device has no on-demand paging, memory windows, or iovas.
        VerbsCallError: the driver refused; the message names the limit.
    """

    closing_rank = 3

    def __init__(
        self,
        domain: ProtectionDomain,
        buffer: Buffer,
        access: Access | None = None,
        *,
        iova: int | None = None,
    ) -> None:
        if not hasattr(domain, "pointer"):
            raise wrong_type(domain, "domain", "a ProtectionDomain")
        view = flat_view(buffer)
        access = _checked_access(domain, buffer, view, access)
        if iova is not None:
            iova = whole_number(iova, "iova", -(2**64), 2**64)
        Resource.__init__(self, domain)
        self.domain: ProtectionDomain = domain
        self.access: Access = access
        self.writable: bool = bool(access & Access.LOCAL_WRITE)
        self.view: memoryview = view
        self.users: int = 0
        self.retired: bool = False
        self.forget: Callable[[], object] = lambda: None
        """Called as it closes: for whoever keeps a list of regions."""
        self.address: int = address_of(view)
        self.length: int = len(view)
        try:
            self.pointer: Any = self._register(iova)
        except BaseException:
            self._abandon()
            raise
        self.lkey: int = self.pointer.lkey
        self.rkey: int = self.pointer.rkey
        self.usable: bool = True

    def _register(self, iova: int | None) -> Any:
        provider, pointer, length = self.domain.provider, self.domain.pointer, self.length
        start = ffi.cast("void *", self.address)
        access = int(self.access)
        if self.access & Access.ZERO_BASED:
            if iova:
                raise ValueError(f"iova={iova:#x}: ZERO_BASED means iova=0")
            # No driver knows the flag; an iova of 0 is the same (man ibv_reg_mr).
            iova, access = 0, access & ~Access.ZERO_BASED
        if iova is not None:
            _check_iova(self.domain, self.address, length, iova)
            self.address = iova
        if access & _OPTIONAL:
            # An older kernel refuses these: this call leaves out what it does not know.
            return check_pointer(
                provider.reg_mr_iova2(pointer, start, length, self.address, access),
                "ibv_reg_mr",  # which is a macro that calls this
            )
        if iova is not None:
            return check_pointer(
                provider.reg_mr_iova(pointer, start, length, iova, access), "ibv_reg_mr_iova"
            )
        return check_pointer(provider.reg_mr(pointer, start, length, access), "ibv_reg_mr")

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
        return MemorySlice(self, *resolve_slice(key, self.length, "a memory region", _BYTES))

    def __bytes__(self) -> bytes:
        self.require_open()
        return self.view.tobytes()

    def remote(self) -> RemoteMemory:
        """Describe the whole region to a peer. See `MemorySlice.remote`.

        Raises:
            as `MemorySlice.remote`.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.
        """
        return self[:].remote()

    def reregister(
        self,
        access: Access | None = None,
        *,
        domain: ProtectionDomain | None = None,
        buffer: Buffer | None = None,
    ) -> None:
        """Change what is permitted, the protection domain or the memory, which costs less than to
        register anew. Slices and RemoteMemory made before are void.

        Args:
            access, buffer: as in the constructor; None changes nothing.
            domain: another one of the same opened device; None changes nothing.

        Raises:
            BusyError: posted requests still own it; await them first.
            ValueError, TypeError: as in the constructor; or nothing to change, a domain of another
                opened device, a ZERO_BASED region.
            NotSupportedError: the device or its library does not support it; the region is as it
                was. (Neither rxe nor siw does with Linux 6.1.)
            VerbsCallError: the driver refused. The region can only be closed.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man ibv_rereg_mr.
        """
        self.require_open()
        if self.users:
            raise BusyError(f"{self.users} posted work requests still own it: await them first")
        if access is None and domain is None and buffer is None:
            raise ValueError("nothing to change: give access, domain or buffer")
        home = self.domain if domain is None else domain
        if not hasattr(home, "pointer"):
            raise wrong_type(domain, "domain", "a ProtectionDomain", "reregister")
        if home.context is not self.domain.context:
            raise ValueError("the domain is of another opened device")
        view = self.view if buffer is None else flat_view(buffer)
        wanted = self.access if access is None else access
        wanted = _checked_access(home, view if buffer is None else buffer, view, wanted)
        if (wanted | self.access) & Access.ZERO_BASED:
            raise ValueError("a ZERO_BASED region cannot be changed: register anew")
        flags = 0
        flags |= lib.IBV_REREG_MR_CHANGE_ACCESS if access is not None else 0
        flags |= lib.IBV_REREG_MR_CHANGE_PD if domain is not None else 0
        flags |= lib.IBV_REREG_MR_CHANGE_TRANSLATION if buffer is not None else 0
        address = self.address if buffer is None else address_of(view)
        self.usable = False
        result = home.provider.rereg_mr(
            self.pointer,
            flags,
            home.pointer,
            ffi.cast("void *", address if buffer is not None else 0),
            len(view) if buffer is not None else 0,
            int(wanted) if access is not None else 0,
        )
        # With DO_FORK_OLD all is done but for the old memory's mark, which only forks look at.
        if result not in (0, lib.IBV_REREG_MR_ERR_DO_FORK_OLD):
            check_supported(ffi.errno, "re-registering memory", home.context.device_name)
            check_positive_errno(-1, "ibv_rereg_mr", "the region can only be closed now")
        if home is not self.domain:
            self._move(home)
        self.domain, self.access, self.view = home, wanted, view
        self.usable, self.writable = True, bool(wanted & Access.LOCAL_WRITE)
        self.address, self.length = address, len(view)
        self.lkey, self.rkey = self.pointer.lkey, self.pointer.rkey

    def close(self) -> None:
        """Deregister the memory, after which no rkey reaches it. Idempotent.

        Raises:
            BusyError: posted requests still own it; await them first.
            VerbsCallError: the driver refused. The region counts as closed all the same.

        See: man ibv_dereg_mr.
        """
        if self._closed:
            return
        if self.users:
            raise BusyError(f"{self.users} posted work requests still own it: await them first")
        self.usable = False
        Resource.close(self)

    def retire(self) -> None:
        """Close it now, or, where posted requests still own it, when the last one has ended."""
        self.retired = True
        if not self.users:
            self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self.users and not self.is_left_to_owner():
            # Collected together with the requests that own it, and their queue pair: which of
            # them goes first is up to the collector. The bytes must outlive them all.
            _OUTLIVING.append(self.view)
            self.users = 0
        Resource.__del__(self)

    def _destroy(self) -> None:
        self.forget()
        check_positive_errno(self.domain.provider.dereg_mr(self.pointer), "ibv_dereg_mr")
        with suppress(BufferError):  # someone else looks at it: the export ends with their view
            self.view.release()


LocalMemory: TypeAlias = Buffer | MemoryRegion | MemorySlice
"""What a work request reads or writes on this side: any object with a buffer, or registered memory.

Type checkers know that numpy's arrays have a buffer from Python 3.12 on; below, `array.data` is it.
"""


def _checked_access(
    domain: ProtectionDomain, buffer: Buffer, view: memoryview, access: Access | None
) -> Access:
    """Return the access that is registered, or refuse it, or the buffer."""
    if not view.nbytes:
        raise ValueError("an empty buffer cannot be registered")
    if access is None:
        return Access(0) if view.readonly else Access.LOCAL_WRITE
    if isinstance(access, bool) or not isinstance(access, int):
        raise wrong_type(access, "access", "flags such as Access.REMOTE_READ | Access.REMOTE_WRITE")
    access = Access(whole_number(access, "access", 0, 2**32 - 1))
    if access & _NEED_LOCAL_WRITE:
        access |= Access.LOCAL_WRITE
    if view.readonly and access & Access.LOCAL_WRITE:
        raise TypeError(
            f"{type(buffer).__name__} is read-only, and {names_of(access)} lets the device write "
            "to it: register a bytearray, or another writable buffer"
        )
    if access & _NOT_EVERY_DEVICE:
        device, name = domain.context.query(), domain.context.device_name
        if access & Access.HUGETLB and not access & Access.ON_DEMAND:
            raise ValueError("HUGETLB goes with ON_DEMAND")
        if access & Access.ON_DEMAND and not device.odp.general & OnDemandPaging.SUPPORT:
            raise NotSupportedError(f"ON_DEMAND: {name} has no on-demand paging (odp)")
        if access & Access.MW_BIND and not device.max_mw:
            raise NotSupportedError(f"MW_BIND: {name} has no memory windows (max_mw)")
    return access


def _check_iova(domain: ProtectionDomain, address: int, length: int, iova: int) -> None:
    if not 0 <= iova < 2**64 - length:
        raise ValueError(f"iova={iova:#x}: the region would end beyond the address space")
    if (iova - address) % PAGESIZE:
        raise ValueError(
            f"iova={iova:#x}: it lies {iova % PAGESIZE} bytes into a page, and the buffer "
            f"{address % PAGESIZE}; they must be the same (an mmap begins with a page)"
        )
    if domain.context.query().vendor_id == _SIW:
        raise NotSupportedError(f"iova: siw, the driver of {domain.context.device_name}, has none")


def flat_view(buffer: Buffer, where: str = "buffer", place: int = 0) -> memoryview:
    """Return a view of an object's memory as bytes, whatever it is made of.

    Args:
        buffer: the object.
        where: the parameter that it is, for messages, with a {} for its place among several.
        place: that place.

    Raises:
        TypeError: it has no buffer.
        ValueError: its memory is not in one piece.
    """
    try:
        if isinstance(buffer, memoryview):
            return _flat_memoryview(buffer)
        # Unlike memoryview.cast this knows no types: arrays of structures and of foreign byte
        # order are bytes as well.
        return PickleBuffer(buffer).raw()
    except TypeError:
        raise TypeError(
            f"{where.format(place)}={shown(buffer)}: {type(buffer).__name__} has no buffer: give "
            "bytes, bytearray, memoryview, mmap, a numpy array, registered memory, or anything "
            "else with the buffer protocol"
        ) from None
    except BufferError:
        raise ValueError(
            f"{where.format(place)}: the buffer is not contiguous: copy it, or register its base"
        ) from None


def _flat_memoryview(view: memoryview) -> memoryview:
    """`flat_view` of a memoryview, without an export of it that lasts: CPython's garbage collector
    crashes where one is part of a cycle, such as any traceback can make (memory_clear releases
    what the exports still need, up to 3.12). A cast is a view of what the memoryview is of.

    Raises:
        BufferError: its memory is not in one piece, or its base's is not.
    """
    try:
        return view.cast("B")
    except (TypeError, ValueError):
        pass  # of structures, of foreign byte order, in Fortran's order, or empty
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
    """Return new bytes of many zeros, and a writable buffer on their memory, to be filled before
    anybody else sees them. Their memory is not touched, so that this takes no time; the buffer
    keeps them.
    """
    made = bytes(length)
    return made, ffi.buffer(ffi.from_buffer("char[]", made), length)


def address_of(view: memoryview) -> int:
    """Return where a view's memory begins; it stays there for as long as the view is kept.

    The view alone keeps it: a lasting export of cffi's, of a memoryview, crashes the garbage
    collector of CPython 3.11 when both are part of one cycle, such as any traceback can make.
    """
    with ffi.from_buffer(view) as exported:
        return int(ffi.cast("uintptr_t", exported))


def gather(parts: Iterable[MemorySlice], call: str = "") -> bytes:
    """Join slices into an array of struct ibv_sge, as the post functions take it.

    Raises:
        TypeError: a part is no slice of registered memory; `call` is the function's name.
        ValueError: a slice is longer than a work request can say (4 GiB).
    """
    parts = list(parts)
    for part in parts:
        if not isinstance(part, Part):
            raise wrong_type(part, "parts", "slices of registered memory, region[:]", call)
    if any(not part.sge for part in parts):
        raise ValueError("4 GiB or more in one part: a work request's part has a 32-bit length")
    return b"".join([part.sge for part in parts])
