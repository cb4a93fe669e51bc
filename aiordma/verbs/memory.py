"""Registered memory: memory regions of Python buffers, and their slices (man ibv_reg_mr)."""

import errno as errno_module
import logging
import os
import time
from collections.abc import Callable, Iterable
from functools import cache, partial
from mmap import PAGESIZE
from typing import Any, TypeAlias

from aiordma._base.arguments import Buffer, member, shown, whole_number, wrong_type
from aiordma._base.call_all import call_all
from aiordma._base.calls import UNSUPPORTED, check_pointer, check_positive_errno, check_supported
from aiordma._base.enums import REMOTE_ACCESS, REMOTE_WRITING, Access, MemoryAdvice, names_of
from aiordma._base.errors import BusyError, ClosedError, NotSupportedError, VerbsCallError
from aiordma._base.ranges import RemoteMemory, resolve_slice
from aiordma._native import Part, RegionBase, ffi, given, leak, lib
from aiordma.verbs.buffers import address_of, registrable_view
from aiordma.verbs.capabilities import OnDemandPaging
from aiordma.verbs.device import ProtectionDomain
from aiordma.verbs.foreign_memory import RegistrableMemory
from aiordma.verbs.resource import Resource, is_busy

__all__ = (
    "LocalMemory",
    "MemoryRegion",
    "MemorySlice",
    "checked_access",
    "gather",
    "retire_all",
    "retire_or_log",
)

logger: logging.Logger = logging.getLogger("aiordma")

LARGE = 64 << 20
"""Bytes from which on the pages of new memory are faulted in by several threads."""

_LOCAL_WRITE, _ZERO_BASED = int(Access.LOCAL_WRITE), int(Access.ZERO_BASED)
_REMOTE_ACCESS, _REMOTE_WRITING = int(REMOTE_ACCESS), int(REMOTE_WRITING)
_NOT_EVERY_DEVICE = int(Access.ON_DEMAND | Access.HUGETLB | Access.MW_BIND)
"""Numbers, because operations of an IntFlag take long."""
_access_of = cache(Access)
_ON_DEMAND = int(Access.ON_DEMAND)
_OPTIONAL = lib.IBV_ACCESS_OPTIONAL_RANGE
_BYTES = "its bytes are its view, and bytes(...) copies them"
_SIW = 0x626D74
"""The vendor_id of siw. Its kernel module accepts an iova and ignores it, and deregisters memory
without waiting for the packet that it is placing there."""
_UNCHANGED = (lib.IBV_REREG_MR_ERR_INPUT, lib.IBV_REREG_MR_ERR_DONT_FORK_NEW)
"""Results of ibv_rereg_mr after which the region is valid as it was."""
_RXE_IS_BOUND = errno_module.EINVAL
"""What rxe's ibv_dereg_mr returns, in place of EBUSY, while a window is bound to the region."""
_LONGEST_PASS = 0.05
"""Seconds that siw's receive path certainly has left a packet after. Only for kernels that refuse
`membarrier`."""


@given("memory_slice")
class MemorySlice(Part):
    """A contiguous part of a memory region: the local memory of a work request.

    Slicing checks the bounds, and does not clamp them. `view` is the memory itself, `bytes(part)` a
    copy of it. A part of a `DmabufRegion` has neither: they raise NotSupportedError.
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
            IndexError: the slice is out of bounds.
        """
        offset, length = resolve_slice(key, self.length, "a memory slice", _BYTES)
        return MemorySlice(self.region, self.address - self.region.address + offset, length)

    def __bytes__(self) -> bytes:
        self.region._require_open()
        return self.view.tobytes()

    @property
    def view(self) -> memoryview:
        """The memory itself. While the device owns it, its contents may change at any time.

        Raises: as `MemoryRegion.view`.
        """
        offset = self.address - self.region.address
        return self.region.view[offset : offset + self.length]

    @property
    def _is_accessible(self) -> bool:
        """Whether the processor accesses the memory. (It does not access a dma-buf.)"""
        return bool(self.region._start)

    def _register_again(self, access: Access) -> "MemoryRegion":
        """Register this part once more, as a region of its own. Raises the errors of the region's
        constructor."""
        offset = self.address - self.region.address
        return self.region._register_part(offset, self.length, access)

    def remote(self) -> RemoteMemory:
        """Return the description of this part that a peer needs for one-sided operations.

        Raises:
            ValueError: the region was registered without remote access.
        """
        if not self.region._access & _REMOTE_ACCESS:
            raise ValueError(
                "this memory was registered without remote access: "
                "register(buffer, Access.REMOTE_READ | Access.REMOTE_WRITE)"
            )
        return RemoteMemory(self.address, self.length, self.region.rkey)

    def advise(self, advice: MemoryAdvice, *, flush: bool = False) -> None:
        """Advise the device to page this part in, so that a later access does not fault. It is for
        regions with on-demand paging (Access.ON_DEMAND). It guarantees nothing. The software device
        checks the arguments, and does nothing else.

        Args:
            advice: what to do.
            flush: return only after the device has the pages' translations.

        Raises:
            TypeError, ValueError: `advice` is no MemoryAdvice; the part has 4 GiB or more.
            NotSupportedError: the device or its library does not support this.
            VerbsCallError: the driver refused; EFAULT: the memory or its key is not valid; EPERM:
                the region is not writable, or of another domain.
            ClosedError, ForkError: the region is closed, or was registered by the parent of this
                process.

        See: man ibv_advise_mr.
        """
        region = self.region
        region._require_open()
        advice = member(advice, "advice", MemoryAdvice, "advise")
        flags = lib.IB_UVERBS_ADVISE_MR_FLAG_FLUSH if flush else 0
        domain = region.domain
        error = lib.aiordma_advise_mr(domain.pointer, advice, flags, gather([self], "advise"), 1)
        check_supported(error, f"advice {advice.name}", domain.context.device_name)
        check_positive_errno(error, "ibv_advise_mr", advice.name)

    def _hold(self) -> None:
        """Count one more work request that uses this memory.

        Raises:
            ClosedError: the region was closed after the slice was checked.
        """
        if not self.region._usable:
            self.region._require_open()
        self.region._users += 1

    def _release(self) -> None:
        """Count one work request less. The last one closes a retired region. A refusal of the
        driver is logged."""
        self.region._users -= 1
        if self.region._retired and not self.region._users:
            retire_or_log(self.region)


class MemoryRegion(RegionBase, Resource):
    """A Python buffer that is registered with a device.

    `bytes(region)` is a copy of its contents.

    The buffer stays exported while it is registered, so that it cannot be resized or freed.

    `address` is the address of its first byte in work requests and for peers: the memory's own
    address, or the iova.

    Args:
        domain: the protection domain.
        buffer: bytearray, memoryview, mmap, array, numpy array, bytes, ...: contiguous, not empty.
            Also an array with `__array_interface__`, or a tensor with DLPack, in the memory of the
            CPU (torch, jax): it is registered in its place, and kept, but nothing keeps it from
            moving its memory. So do not resize it while it is registered.
        access: the permitted access. None: LOCAL_WRITE if the buffer is writable, else only local
            reads. LOCAL_WRITE is added if a remote permission requires it. ZERO_BASED means
            iova=0. A device that does not support RELAXED_ORDERING ignores it.
        iova: the region's `address` (man ibv_reg_mr_iova). Its offset in a page must be that of
            the buffer; an mmap begins on a page. None: the address of the buffer.

    Raises:
        TypeError: the object has no buffer, and describes no plain memory either; or the buffer
            is read-only and the access permits writing.
        ValueError: the buffer is empty or not contiguous, the iova does not fit, or HUGETLB is
            given without ON_DEMAND.
        NotSupportedError: the device does not support on-demand paging, memory windows, or iovas;
            or the memory is a GPU's: `Connection.register` and `Domain.register` take that.
        VerbsCallError: the driver refused; the message names the limit.
    """

    _closing_rank = 3
    _closes_at_once = True

    def __init__(
        self,
        domain: ProtectionDomain,
        buffer: RegistrableMemory,
        access: Access | None = None,
        *,
        iova: int | None = None,
    ) -> None:
        self._begin(domain, buffer, access, iova, "MemoryRegion")

    @classmethod
    def _registered_by(
        cls,
        call: str,
        domain: ProtectionDomain,
        buffer: RegistrableMemory,
        access: Access | None,
    ) -> "MemoryRegion":
        """Return a region as the constructor does, for a call whose errors name itself."""
        region = cls.__new__(cls)
        region._begin(domain, buffer, access, None, call)
        return region

    def _begin(
        self,
        domain: ProtectionDomain,
        buffer: RegistrableMemory,
        access: Access | None,
        iova: int | None,
        call: str,
    ) -> None:
        """Do what the constructor does. `call` is the function that was called, for messages."""
        if not hasattr(domain, "pointer"):
            raise wrong_type(domain, "domain", "a ProtectionDomain", call)
        view = registrable_view(buffer, call)
        access = checked_access(domain, buffer, view.nbytes, view.readonly, access, call)
        if iova is not None:
            iova = whole_number(iova, "iova", -(2**64), 2**64, call)
        self._view: memoryview = view
        start = address_of(view)
        self._enter(domain, access, start, len(view), start, lambda: self._register(iova))

    def _enter(
        self,
        domain: ProtectionDomain,
        access: Access,
        address: int,
        length: int,
        start: int,
        register: Callable[[], Any],
    ) -> None:
        """Become a child of the domain, and register. Arguments are the attributes' values, and the
        function that returns the struct ibv_mr."""
        Resource.__init__(self, domain)
        try:
            self.domain: ProtectionDomain = domain
            self.access: Access = access
            self._access: int = int(access)
            self._writable: bool = self._access & _LOCAL_WRITE != 0
            self._users: int = 0  # posted requests that use a part of it
            self._retired: bool = False
            self._outwaits: bool = (
                self._access & _REMOTE_WRITING != 0 and domain.context.query().vendor_id == _SIW
            )
            """Whether deregistering has to wait until the device has placed what it was placing."""
            self._uncertain: memoryview | None = None
            """The new memory of a re-registration that has failed half way: the device may access
            it, besides the old one."""
            self._on_close: Callable[[], object] = lambda: None
            """Called when the region closes, to remove it from a list of regions."""
            self._start: int = start
            self.address: int = address
            self.length: int = length
            self.pointer: Any = register()
            self.lkey: int = self.pointer.lkey
            self.rkey: int = self.pointer.rkey
            self._mr: int = int(ffi.cast("uintptr_t", self.pointer))
        except BaseException:
            self._give_up()
            raise
        self._usable: bool = True

    def _register(self, iova: int | None) -> Any:
        provider, pointer, length = self.domain.provider, self.domain.pointer, self.length
        start = ffi.cast("void *", self.address)
        access = self._access
        if length >= LARGE and access & _LOCAL_WRITE and not access & _ON_DEMAND:
            lib.aiordma_populate(start, length, len(os.sched_getaffinity(0)))
        arguments: tuple[int, ...]
        if access & _ZERO_BASED:
            if iova:
                raise ValueError(f"MemoryRegion(): iova={iova:#x}: ZERO_BASED means iova=0")
            # No driver supports the flag; an iova of 0 has the same effect (man ibv_reg_mr).
            iova, access = 0, access & ~_ZERO_BASED
        if iova is not None:
            _check_iova(self.domain, self.address, length, iova)
            self.address = iova
        if access & _OPTIONAL:
            # Older kernels refuse optional flags. This call removes those that are not supported.
            # ibv_reg_mr is a macro that calls ibv_reg_mr_iova2.
            slot, call, arguments = "reg_mr_iova2", "ibv_reg_mr", (length, self.address, access)
        elif iova is not None:
            slot, call, arguments = "reg_mr_iova", "ibv_reg_mr_iova", (length, iova, access)
        else:
            slot, call, arguments = "reg_mr", "ibv_reg_mr", (length, access)
        return check_pointer(getattr(provider, slot)(pointer, start, *arguments), call)

    def _register_part(self, offset: int, length: int, access: Access) -> "MemoryRegion":
        """Register a part once more, as a region of its own."""
        return MemoryRegion(self.domain, self.view[offset : offset + length], access)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.length} bytes>"

    def __len__(self) -> int:
        return self.length

    @property
    def view(self) -> memoryview:
        """The memory itself. While the device owns it, its contents may change at any time.

        Raises:
            NotSupportedError: it is a `DmabufRegion`, whose memory the processor does not access.
        """
        return self._view

    def __getitem__(self, key: slice) -> MemorySlice:
        """Return a part of the region.

        Raises:
            IndexError: the slice is out of bounds.
        """
        self._require_open()
        return MemorySlice(self, *resolve_slice(key, self.length, "a memory region", _BYTES))

    def __bytes__(self) -> bytes:
        self._require_open()
        return self.view.tobytes()

    def remote(self) -> RemoteMemory:
        """Return the description of the whole region for a peer. See `MemorySlice.remote`.

        Raises:
            as `MemorySlice.remote`.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.
        """
        return self[:].remote()

    def _require_open(self) -> None:
        super()._require_open()
        if self._uncertain is not None:
            raise ClosedError(
                f"{self!r} can only be closed now: re-registering it failed, and it is not known "
                "what the device accesses"
            )

    def reregister(
        self,
        access: Access | None = None,
        *,
        domain: ProtectionDomain | None = None,
        buffer: RegistrableMemory | None = None,
    ) -> None:
        """Change the access, the protection domain or the memory. This costs less than registering
        again. Existing slices and RemoteMemory of the region become invalid.

        Args:
            access, buffer: as in the constructor; None: no change.
            domain: another domain of the same context; None: no change.

        Raises:
            BusyError: posted requests, bound windows or grants still use the region; await or end
                them first, and repeat the call. The region is unchanged.
            ValueError, TypeError: as in the constructor; or there is nothing to change, the domain
                is of another context, or the region is ZERO_BASED.
            NotSupportedError: the device or its library does not support this; the region is
                unchanged. (On Linux 6.1, rxe and siw do not.)
            VerbsCallError: the driver refused. The text says whether the region is unchanged, or
                can only be closed. In that case, the old and the new memory are kept until then.
            ClosedError, ForkError: it or the domain is closed, or was opened by the parent of this
                process.

        See: man ibv_rereg_mr.
        """
        self._require_open()
        if self._users:
            raise BusyError(self._in_use)
        if access is None and domain is None and buffer is None:
            raise ValueError("reregister(): nothing to change: give access, domain or buffer")
        home = self.domain if domain is None else domain
        if not hasattr(home, "pointer"):
            raise wrong_type(domain, "domain", "a ProtectionDomain", "reregister")
        if home.context is not self.domain.context:
            raise ValueError("reregister(): domain: it is of another opened device")
        view = self.view if buffer is None else registrable_view(buffer, "reregister")
        wanted = self.access if access is None else access
        given = view if buffer is None else buffer
        wanted = checked_access(home, given, view.nbytes, view.readonly, wanted, "reregister")
        if (wanted | self.access) & Access.ZERO_BASED:
            raise ValueError("reregister(): a ZERO_BASED region cannot be changed: register anew")
        flags = 0
        flags |= lib.IBV_REREG_MR_CHANGE_ACCESS if access is not None else 0
        flags |= lib.IBV_REREG_MR_CHANGE_PD if domain is not None else 0
        flags |= lib.IBV_REREG_MR_CHANGE_TRANSLATION if buffer is not None else 0
        start = address_of(view)
        address = self.address if buffer is None else start
        for used in (self, home):
            used._require_open()  # after the arguments' checks, which may run the program's code
        before = self._parents
        arguments = (
            self.pointer,
            flags,
            home.pointer,
            ffi.cast("void *", address if buffer is not None else 0),
            len(view) if buffer is not None else 0,
            int(wanted) if access is not None else 0,
        )
        if home is not self.domain:
            self._move(self.domain, home)  # it closes before both, whatever the driver answers
        self._usable, self._uncertain = False, view
        result = home.provider.rereg_mr(*arguments)
        # With DO_FORK_OLD the change is done, but the old memory is still marked for forks.
        if result not in (0, lib.IBV_REREG_MR_ERR_DO_FORK_OLD):
            error = ffi.errno
            is_unchanged = result in _UNCHANGED or error in UNSUPPORTED
            if not is_unchanged:
                hint = "The region can only be closed now"
                check_positive_errno(error or -1, "ibv_rereg_mr", hint)
            self._usable, self._uncertain = True, None
            if home is not self.domain:
                self._move(*before)
            check_supported(error, "re-registering memory", home.context.device_name)
            try:
                check_positive_errno(error or -1, "ibv_rereg_mr", "The region is unchanged")
            except VerbsCallError as refusal:
                raise self._bound_or(refusal) from None
        if home is not self.domain:
            self._move(home)
        self.domain, self.access, self._view = home, wanted, view
        self._access = int(wanted)
        self._writable = self._access & _LOCAL_WRITE != 0
        self._start, self.address, self.length = start, address, len(view)
        self.lkey, self.rkey = self.pointer.lkey, self.pointer.rkey
        self._usable, self._uncertain = True, None

    def close(self) -> None:
        """Deregister the memory. Its rkeys are then invalid, and no byte of a peer's arrives in the
        memory any more. Idempotent. (On siw, a region with REMOTE_WRITE takes up to some
        hundredths of a second.)

        Raises:
            BusyError: posted requests, bound windows or grants still use the region; await or end
                them first, and close it again. The region stays open.
            VerbsCallError: the driver refused. The memory stays registered for the life of the
                process, because the device may still access it, and every further close raises
                this error.

        See: man ibv_dereg_mr.
        """
        super().close()

    _can_be_in_use = True

    def _require_closable(self) -> None:
        if self._users:
            raise BusyError(self._in_use)

    @property
    def _in_use(self) -> str:
        return (
            f"{self!r} is in use by {self._users} posted work requests, bound windows or grants: "
            "await or end them first"
        )

    def _retire(self) -> None:
        """Close the region now, or when the last posted request that uses it has completed."""
        self._retired = True
        if not self._users:
            self.close()

    def _disown(self) -> None:
        if self._users:
            # The region is collected together with the requests that use it, and their queue pair,
            # in any order. The memory must outlive all of them.
            leak(self._owner_of_memory())
            self._users = 0
        super()._disown()

    def _owner_of_memory(self) -> object:
        """Return what has to live as long as the device uses the memory."""
        return self._view if self._uncertain is None else (self._view, self._uncertain)

    def _destroy(self) -> None:
        self._usable = False
        try:
            self._require_closable()  # again: another thread can have posted a request
            self._deregister()
        except (BusyError, VerbsCallError) as refusal:
            self._usable = is_busy(refusal) and self._uncertain is None
            raise
        self._on_close()
        if self._outwaits:
            _outwait_receiving()
        self._let_go()

    def _deregister(self) -> None:
        try:
            check_positive_errno(self.domain.provider.dereg_mr(self.pointer), "ibv_dereg_mr")
        except VerbsCallError as refusal:
            raise self._bound_or(refusal, _RXE_IS_BOUND) from None

    def _bound_or(self, error: VerbsCallError, also: int = errno_module.EBUSY) -> Exception:
        """Return the error for a refusal of the driver. EBUSY, or `also`, means a bound window if
        the region permits windows."""
        if not self.access & Access.MW_BIND or error.errno not in (errno_module.EBUSY, also):
            return error
        return BusyError(
            f"{self!r} is in use: {error}: a memory window is bound to it: close or invalidate the "
            "window, then repeat the call"
        )

    def _let_go(self) -> None:
        """Release the memory, which is deregistered."""
        try:
            self._view.release()
            if self._uncertain is not None:
                self._uncertain.release()
        except BufferError:
            return  # another view of it exists: the export ends with that view


def retire_or_log(region: MemoryRegion) -> None:
    """Close a region, or let its last request close it. A refusal of the driver is logged once, not
    raised."""
    was_refused = region._refusal is not None
    try:
        region._retire()
    except Exception as error:
        if not was_refused:
            logger.error(
                "%r could not be deregistered, and stays registered: %s",
                region,
                error,
                exc_info=not isinstance(error, VerbsCallError | BusyError),
            )


def retire_all(
    regions: Iterable[MemoryRegion],
    retire: Callable[[MemoryRegion], object] = MemoryRegion._retire,
) -> None:
    """Close regions, and those in use when their last request has completed. On siw, the wait for
    what the device was placing is one for all that are closed. `retire` closes one of them:
    `retire_or_log`, if no caller can handle a refusal."""
    regions = list(regions)
    waiting = [region for region in regions if region._outwaits and not region._users]

    def outwait() -> None:
        for region in waiting:
            region._outwaits = True  # the driver may have refused: it closes again later
        if waiting:
            _outwait_receiving()

    for region in waiting:
        region._outwaits = False
    call_all([*[partial(retire, region) for region in reversed(regions)], outwait])


def _outwait_receiving() -> None:
    """Wait until siw has left every packet that it was placing when its memory was deregistered.

    siw checks for each piece of a packet whether its memory is registered, but deregistering does
    not wait for the copy of a piece. siw copies with preemption disabled, and membarrier waits for
    such sections on all CPUs.
    """
    if lib.aiordma_outwait_receiving():
        time.sleep(_LONGEST_PASS)


LocalMemory: TypeAlias = Buffer | MemoryRegion | MemorySlice
"""Local memory of a work request: an object with a buffer, or registered memory.

For type checkers, numpy arrays have a buffer from Python 3.12 on; before, pass `array.data`.
"""


def checked_access(
    domain: ProtectionDomain,
    memory: RegistrableMemory,
    length: int,
    readonly: bool,
    access: Access | None,
    call: str,
) -> Access:
    """Return the access to register memory with: the argument, or the default for None.

    Args:
        domain: where it is registered.
        memory: the object, for messages.
        length: its length in bytes.
        readonly: whether it is read-only.
        access: the argument.
        call: the function that was called, for messages.

    Raises:
        TypeError: `access` is no Access, or permits writing to memory that is read-only.
        ValueError: the memory is empty, or HUGETLB is given without ON_DEMAND.
        NotSupportedError: the device does not support the access.
    """
    if not length:
        raise ValueError(f"{call}(): buffer: an empty buffer cannot be registered")
    if access is None:
        return _access_of(0 if readonly else _LOCAL_WRITE)
    if isinstance(access, bool) or not isinstance(access, int):
        flags = "flags such as Access.REMOTE_READ | Access.REMOTE_WRITE"
        raise wrong_type(access, "access", flags, call)
    number = whole_number(access, "access", 0, 2**31 - 1, call)
    if number & _REMOTE_WRITING:
        number |= _LOCAL_WRITE
    access = _access_of(number)
    if readonly and number & _LOCAL_WRITE:
        raise TypeError(
            f"{call}(): buffer={shown(memory)}: {type(memory).__name__} is read-only, and "
            f"access={names_of(access)} lets the device write to it: register a bytearray, or "
            "another writable buffer"
        )
    if number & _NOT_EVERY_DEVICE:
        device, name = domain.context.query(), domain.context.device_name
        if access & Access.HUGETLB and not access & Access.ON_DEMAND:
            raise ValueError(f"{call}(): access={names_of(access)}: HUGETLB goes with ON_DEMAND")
        if access & Access.ON_DEMAND and not device.odp.general & OnDemandPaging.SUPPORT:
            raise NotSupportedError(f"ON_DEMAND: {name} has no on-demand paging (odp)")
        if access & Access.MW_BIND and not device.max_mw:
            raise NotSupportedError(f"MW_BIND: {name} has no memory windows (max_mw)")
    return access


def _check_iova(domain: ProtectionDomain, address: int, length: int, iova: int) -> None:
    if not 0 <= iova < 2**64 - length:
        raise ValueError(
            f"MemoryRegion(): iova={iova:#x}: the region would end beyond the address space"
        )
    if (iova - address) % PAGESIZE:
        raise ValueError(
            f"MemoryRegion(): iova={iova:#x}: it lies {iova % PAGESIZE} bytes into a page, and the "
            f"buffer {address % PAGESIZE}; they must be the same (an mmap begins with a page)"
        )
    if domain.context.query().vendor_id == _SIW:
        raise NotSupportedError(f"iova: siw, the driver of {domain.context.device_name}, has none")


def gather(parts: Iterable[MemorySlice], call: str = "") -> bytes:
    """Return the slices as an array of struct ibv_sge, for the post functions.

    Raises:
        TypeError: a part is not a slice of registered memory; `call` is the function's name.
        ValueError: a slice is 4 GiB or longer, which a work request cannot express.
    """
    parts = list(parts)
    for part in parts:
        if not isinstance(part, Part):
            raise wrong_type(part, "parts", "slices of registered memory, region[:]", call)
    if any(not part._sge for part in parts):
        raise ValueError("4 GiB or more in one part: a work request's part has a 32-bit length")
    return b"".join([part._sge for part in parts])
