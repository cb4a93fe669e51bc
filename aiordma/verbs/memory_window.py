"""Memory windows: posted requests grant and revoke remote access (man ibv_alloc_mw)."""

from typing import Any

from aiordma._base.arguments import member, resource, whole_number
from aiordma._base.calls import check_pointer, check_positive_errno
from aiordma._base.enums import MemoryWindowType
from aiordma._base.errors import NotSupportedError
from aiordma._native import lib
from aiordma.verbs.device import ProtectionDomain
from aiordma.verbs.resource import Resource

__all__ = ("MemoryWindow",)


class MemoryWindow(Resource):
    """A memory window, unbound at first. Binding it (`Connection.post_bind_window`) gives its rkey
    access to a part of a region that was registered with Access.MW_BIND.

    A window of type 1 is bound by a separate call, and unbound by binding zero bytes. A window of
    type 2 is bound and invalidated by work requests, and by a peer's SEND with invalidate.

    Args:
        domain: the protection domain.
        kind: the type of the window.

    Raises:
        TypeError, ValueError: an argument has the wrong type.
        NotSupportedError: the device does not support memory windows.
        VerbsCallError: the driver refused.
        ClosedError, ForkError: the domain is closed, or was opened by the parent of this process.

    See: man ibv_alloc_mw.
    """

    _closing_rank = 2

    def __init__(
        self, domain: ProtectionDomain, kind: MemoryWindowType = MemoryWindowType.TYPE_2
    ) -> None:
        resource(domain, "domain", "a ProtectionDomain", "MemoryWindow")
        kind = member(kind, "kind", MemoryWindowType, "MemoryWindow")
        if not domain.context.query().max_mw:
            raise NotSupportedError(f"{domain.context.device_name} has no memory windows (max_mw)")
        super().__init__(domain)
        try:
            self.domain = domain
            self.kind = kind
            pointer = lib.aiordma_alloc_window(domain.pointer, kind)
            self.pointer: Any = check_pointer(pointer, "ibv_alloc_mw")
        except BaseException:
            self._give_up()
            raise

    def __repr__(self) -> str:
        return f"<MemoryWindow of {self.kind.name} on {self.domain.context.device_name}>"

    @property
    def rkey(self) -> int:
        """The window's rkey. Every bind changes it. What you set is a number of 32 bits."""
        self._require_open()
        return int(self.pointer.rkey)

    @rkey.setter
    def rkey(self, value: int) -> None:
        value = whole_number(value, "rkey", 0, 2**32 - 1)
        self._require_open()
        self.pointer.rkey = value

    def next_rkey(self) -> int:
        """Return the next rkey of a window of type 2: the low 8 bits are incremented.

        Raises:
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man ibv_inc_rkey.
        """
        rkey = self.rkey
        return rkey & ~0xFF | (rkey + 1) & 0xFF

    def _destroy(self) -> None:
        check_positive_errno(lib.aiordma_dealloc_window(self.pointer), "ibv_dealloc_mw")
