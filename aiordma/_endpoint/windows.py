"""Memory windows in use: what is bound, what the peer may be given, and until when."""

import logging

from aiordma._base.arguments import instance, wrong_type
from aiordma._base.enums import Access, names_of
from aiordma._base.errors import VerbsCallError
from aiordma._base.interrupts import deferring
from aiordma._base.ranges import RemoteMemory
from aiordma._endpoint.endpoint import Endpoint
from aiordma._requests.request import WorkRequest
from aiordma.verbs import MemorySlice, MemoryWindow

__all__ = ("BoundWindow", "check_bindable")

logger: logging.Logger = logging.getLogger("aiordma")

_REMOTE = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC


class BoundWindow:
    """A memory window of a connection: `remote` is what a peer may use while it is bound.

    While it is bound it holds its memory: the region cannot be closed. It lets go when revoking it
    has succeeded, when you report that the peer's SEND has invalidated it (`mark_invalidated`), or
    as it is closed, which the connection's end does at the latest.
    """

    def __init__(self, endpoint: Endpoint, window: MemoryWindow) -> None:
        self._endpoint = endpoint
        self._window = window
        self.rkey: int = 0
        self._memory: MemorySlice | None = None
        self._last: WorkRequest | None = None
        endpoint.windows[id(self)] = self

    def __repr__(self) -> str:
        what = "not bound" if self._memory is None else f"of {self._memory!r}"
        return f"<BoundWindow {what}, rkey {self.rkey:#x}>"

    @property
    def is_bound(self) -> bool:
        """Whether it is bound, as far as is known here."""
        return self._memory is not None

    @property
    def remote(self) -> RemoteMemory:
        """Describe it to a peer.

        Raises:
            ValueError: it is not bound.
        """
        memory = self._require_bound()
        return RemoteMemory(memory.address, memory.length, self.rkey)

    def _require_bound(self) -> MemorySlice:
        """Return what it is bound to.

        Raises:
            ValueError: nothing.
        """
        if self._memory is None:
            raise ValueError(f"{self!r}: bind it first")
        return self._memory

    def _note_bind(self, request: WorkRequest, memory: MemorySlice, rkey: int) -> None:
        """Take note of a posted bind; if it fails, the window is as before."""
        memory._hold()
        self._memory, self.rkey, self._last = memory, rkey, request

        def ended(_: WorkRequest) -> None:
            if request.exception() is not None:
                self._let_go()
            elif not self._window.closed:
                self._window.rkey = rkey

        request.add_done_callback(ended)

    def _note_invalidate(self, request: WorkRequest) -> None:
        """Take note of a posted invalidate."""
        self._last = request

        def ended(_: WorkRequest) -> None:
            if request.exception() is None:
                self._let_go()

        request.add_done_callback(ended)

    def mark_invalidated(self) -> None:
        """Release the memory, after a message of the peer whose `invalidated` is our `rkey`.

        Raises: nothing.
        """
        self._let_go()

    def _let_go(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory._release()

    @deferring
    def close(self) -> None:
        """Free the window, which ends what it permits. Idempotent.

        While a bind or an invalidate of it is in flight, it is freed when that has ended: a device
        that finds no window to bind breaks the connection.

        Raises: nothing. If the driver refuses, that is logged.

        See: man ibv_dealloc_mw.
        """
        if self._endpoint.windows_go:
            return  # the connection's end, in a thread: it lets go of the memory afterwards
        if self._last is not None and not self._last.done():
            self._last.add_done_callback(lambda _: self.close())
            return
        self._endpoint.windows.pop(id(self), None)
        self._free()
        self._let_go()

    def _free(self) -> None:
        """Free the device's window only; for the connection's end, in a thread."""
        try:
            self._window.close()
        except VerbsCallError as error:
            logger.warning("%r: %s", self, error)

    def __enter__(self) -> "BoundWindow":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_bindable(
    endpoint: Endpoint, window: BoundWindow, memory: MemorySlice, access: Access, call: str
) -> None:
    """Refuse what the device would refuse, or permit by mistake.

    Raises:
        ValueError: it is bound already, or the region's access does not cover it.
        TypeError: no slice of registered memory.
        ClosedError: the window, or the region.
    """
    instance(window, "window", BoundWindow, call, "a BoundWindow of open_window()")
    window._window._require_open()
    expected = "a slice of registered memory, such as region[:]"
    instance(memory, "memory", MemorySlice, call, expected)
    if isinstance(access, bool) or not isinstance(access, int):
        raise wrong_type(access, "access", "Access flags", call)
    memory.region._require_open()
    if window._endpoint is not endpoint:
        raise ValueError(f"{window!r} belongs to another connection")
    if not memory.length:
        raise ValueError("a window of no bytes: bind it to at least one")
    if window.is_bound:
        raise ValueError(f"{window!r} is bound: revoke it first")
    if not access or int(access) & ~int(_REMOTE):
        raise ValueError(
            f"{call}(): access={names_of(Access(access))}: a window gives REMOTE_READ, "
            "REMOTE_WRITE, REMOTE_ATOMIC"
        )
    given = memory.region.access
    if not given & Access.MW_BIND:
        raise ValueError(
            f"the region was registered with {names_of(given)}: binding a window takes "
            "Access.MW_BIND"
        )
    if access & (Access.REMOTE_WRITE | Access.REMOTE_ATOMIC) and not given & Access.LOCAL_WRITE:
        raise ValueError(
            f"the region was registered with {names_of(given)}: a window that is written to takes "
            "Access.LOCAL_WRITE"
        )
    if memory.region.domain is not window._window.domain:
        raise ValueError("the window and the memory belong to different devices or event loops")
