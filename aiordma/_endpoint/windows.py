"""Memory windows of a connection: the memory that they are bound to, and until when."""

from aiordma._base.arguments import instance, wrong_type
from aiordma._base.enums import REMOTE_ACCESS, REMOTE_WRITING, Access, MemoryWindowType, names_of
from aiordma._base.errors import VerbsCallError
from aiordma._base.ranges import RemoteMemory
from aiordma._endpoint.domain_state import wrong_domain
from aiordma._endpoint.endpoint import Endpoint
from aiordma._native import WindowBase, ffi
from aiordma._requests.request import WorkRequest
from aiordma._runtime.teardown import Phase
from aiordma.verbs import MemoryWindow
from aiordma.verbs.memory import MemorySlice


class BoundWindow(WindowBase):
    """A memory window of a connection. `remote` is the range that a peer may access while the
    window is bound.

    While it is bound, the window holds its memory: the region cannot be closed. It releases the
    memory when a revoke has succeeded, when you report that the peer's SEND has invalidated it
    (`mark_invalidated`), or when it is closed. The connection's end closes it.
    """

    def __init__(self, endpoint: Endpoint, window: MemoryWindow) -> None:
        self._endpoint = endpoint
        self._window = window
        if window.kind is MemoryWindowType.TYPE_2:
            self._pointer = int(ffi.cast("uintptr_t", window.pointer))
        endpoint.pair.windows[id(self)] = self

    def __repr__(self) -> str:
        what = "not bound" if self._memory is None else f"of {self._memory!r}"
        return f"<BoundWindow {what}, rkey {self.rkey:#x}>"

    @property
    def is_bound(self) -> bool:
        """Whether the window is bound. An invalidation by the peer counts once you report it."""
        return self._memory is not None

    @property
    def remote(self) -> RemoteMemory:
        """The description of the bound memory for a peer.

        Raises:
            ValueError: the window is not bound.
            RdmaError: the connection has ended, and its windows with it.
        """
        memory = self._require_bound()
        return RemoteMemory(memory.address, memory.length, self.rkey)

    def _require_bound(self) -> MemorySlice:
        """Return the memory that the window is bound to.

        Raises:
            ValueError: the window is not bound.
            RdmaError: nor can it be: the connection has ended.
        """
        memory: MemorySlice | None = self._memory
        if memory is None:
            self._endpoint.require_usable()
            raise ValueError(f"{self!r}: bind it first")
        return memory

    def _require_valid(self) -> MemorySlice:
        """Return the memory of a bound window that no posted request invalidates: a device that
        finds nothing to invalidate breaks the connection.

        Raises:
            ValueError: the window is not bound, or will not be.
        """
        memory = self._require_bound()
        if self._invalidating:
            raise ValueError(f"{self!r}: its invalidation is posted already")
        return memory

    def _note_bind(self, request: WorkRequest, memory: MemorySlice, rkey: int) -> None:
        """Record a posted bind. If it fails, the window is unbound again."""
        self._bind_to(memory, rkey)
        self._last = request

        def ended(_: WorkRequest) -> None:
            if request._stored_error() is not None:
                self._let_go()
            elif not self._window.closed:
                self._window.rkey = rkey

        request.add_done_callback(ended)

    def _note_invalidate(self, request: WorkRequest) -> None:
        """Record a posted invalidate."""
        self._last = request
        self._invalidating = True

        def ended(_: WorkRequest) -> None:
            self._invalidating = False
            if request._stored_error() is None:
                self._let_go()

        request.add_done_callback(ended)

    def mark_invalidated(self) -> None:
        """Release the memory, after a message from the peer whose `invalidated` is this `rkey`.

        Raises: nothing.
        """
        self._let_go()

    def close(self) -> None:
        """Free the window, which ends its access. Idempotent.

        If a bind or an invalidate is in flight, the window is freed when it has completed, because
        a device that finds no window to bind breaks the connection.

        Raises:
            VerbsCallError: the driver refused. The window stays for the life of the process, and
                with it the connection, which ends.

        See: man ibv_dealloc_mw.
        """
        if self._window.closed or self._endpoint.teardown.phase is Phase.DESTROYING:
            return  # the connection's end frees its windows, in a thread perhaps
        if self._last is not None and not self._last.done():
            self._last.add_done_callback(lambda _: self.close())
            return
        self._end()

    def _end(self) -> None:
        """Free the window and release the memory, on the loop's thread. No bind is in flight, and
        no thread is freeing the windows.

        Raises:
            VerbsCallError: the driver refused.
        """
        try:
            self._free()
        except VerbsCallError as error:
            self._endpoint.fail(error)  # the window may still work: its queue pair ends
            raise
        self._endpoint.pair.windows.pop(id(self), None)
        self._let_go()

    def _free(self) -> None:
        """Free only the device's window. The connection's end calls this in a thread.

        Raises:
            VerbsCallError: the driver refused.
        """
        self._pointer = 0  # first: the end of a bind, on the loop's thread, writes the rkey there
        self._window.close()

    def _freed(self) -> None:
        """Release the memory of a freed window."""
        self._let_go()

    def __enter__(self) -> "BoundWindow":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_bindable(
    endpoint: Endpoint, window: BoundWindow, memory: MemorySlice, access: Access, call: str
) -> None:
    """Check a bind, including mistakes that a device would not refuse.

    Raises:
        as `check_window_memory`.
        ValueError: the window is bound, or belongs to another connection.
        ClosedError: the window is closed.
    """
    instance(window, "window", BoundWindow, call, "a BoundWindow of open_window()")
    window._window._require_open()
    if window._endpoint is not endpoint:
        raise ValueError(f"{call}(): window={window!r}: it belongs to another connection")
    if window.is_bound:
        raise ValueError(f"{call}(): window={window!r}: it is bound: revoke it first")
    check_window_memory(endpoint, memory, access, call)


def check_window_memory(endpoint: Endpoint, memory: MemorySlice, access: Access, call: str) -> None:
    """Check what a window of a connection will be bound to.

    Raises:
        ValueError: the memory is empty, or of another device or domain; or the access is not
            permitted by the region.
        TypeError: an argument has the wrong type.
        ClosedError: the region is closed.
    """
    expected = "a slice of registered memory, such as region[:]"
    instance(memory, "memory", MemorySlice, call, expected)
    if isinstance(access, bool) or not isinstance(access, int):
        raise wrong_type(access, "access", "Access flags", call)
    memory.region._require_open()
    if not memory.length:
        raise ValueError(f"{call}(): memory: no bytes: give at least one")
    if not access or int(access) & ~int(REMOTE_ACCESS):
        raise ValueError(
            f"{call}(): access={names_of(Access(access))}: a window gives REMOTE_READ, "
            "REMOTE_WRITE, REMOTE_ATOMIC"
        )
    given = memory.region.access
    if not given & Access.MW_BIND:
        raise ValueError(
            f"{call}(): memory: its region was registered with {names_of(given)}: expected "
            "Access.MW_BIND, to bind a window"
        )
    if access & REMOTE_WRITING and not given & Access.LOCAL_WRITE:
        raise ValueError(
            f"{call}(): memory: its region was registered with {names_of(given)}: expected "
            f"Access.LOCAL_WRITE, because access={names_of(Access(access))} lets the peer write"
        )
    if memory.region.domain is not endpoint.memory.domain:
        raise wrong_domain(memory.region, endpoint.memory.domain)
