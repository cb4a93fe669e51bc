"""Posting what memory windows permit, and its end."""

from aiordma.capabilities import require_windows
from aiordma.enums import Access, MemoryWindowType, WorkRequestOpcode
from aiordma.opcodes import send_flags
from aiordma.request import WorkRequest
from aiordma.request_posting import RequestPosting
from aiordma.verbs import MemorySlice, SendWork
from aiordma.windows import BoundWindow, check_bindable

__all__ = ("WindowPosting",)

_Op = WorkRequestOpcode


class WindowPosting(RequestPosting):
    """Binding and invalidating. `fence` and the errors are as Posting says."""

    def post_bind_window(
        self, window: BoundWindow, memory: MemorySlice, access: Access, *, fence: bool = False
    ) -> WorkRequest:
        """Post the binding of a window to registered memory, for `window.remote` to be given away
        (IBV_WR_BIND_MW; ibv_bind_mw for type 1).

        A peer may use the rkey once the request has succeeded. Until the window is revoked or
        closed, the memory stays registered.

        Args:
            window: from `open_window`, not bound.
            memory: of a region registered with Access.MW_BIND (and LOCAL_WRITE, if the window is
                to be written to).
            access: REMOTE_READ, REMOTE_WRITE, REMOTE_ATOMIC.
            fence: see the class.

        Raises:
            ValueError: it is bound, or the region's access does not permit it.
        """
        return self._bind(window, memory, access, fence)

    def _bind(
        self,
        window: BoundWindow,
        memory: MemorySlice,
        access: Access,
        fence: bool = False,
        *,
        credited: bool = False,
    ) -> WorkRequest:
        try:
            require_windows(self._endpoint)
            check_bindable(self._endpoint, window, memory, access)
        except BaseException:
            if credited:
                self._endpoint.send_credits.give()
            raise
        flags = send_flags(fence, False)
        if window.window.kind is MemoryWindowType.TYPE_1:
            request = self._post_bind(window, memory, int(access), flags, credited)
            window.posted(request, memory, window.window.rkey)
            return request
        rkey = window.window.next_rkey()
        work = SendWork(
            "BIND_MW",
            _Op.BIND_MW,
            flags=flags,
            held=(memory,),
            window=window.window,
            bound=memory,
            access=access,
            rkey=rkey,
        )
        request = self._post_work(work, None, credited=credited)
        window.posted(request, memory, rkey)
        return request

    def post_invalidate(self, window: BoundWindow, *, fence: bool = False) -> WorkRequest:
        """Post the end of what a window permits: a local invalidate (IBV_WR_LOCAL_INV), or the
        binding of a window of type 1 to nothing.

        Raises:
            ValueError: it is not bound (any more).
        """
        return self._invalidate(window, fence)

    def _invalidate(
        self, window: BoundWindow, fence: bool = False, *, credited: bool = False
    ) -> WorkRequest:
        try:
            require_windows(self._endpoint)
            memory = window.require_bound()
        except BaseException:
            if credited:
                self._endpoint.send_credits.give()
            raise
        if window.window.kind is MemoryWindowType.TYPE_1:
            request = self._post_bind(window, memory[:0], 0, send_flags(fence, False), credited)
        else:
            work = SendWork(
                "LOCAL_INV", _Op.LOCAL_INV, flags=send_flags(fence, False), immediate=window.rkey
            )
            request = self._post_work(work, None, credited=credited)
        window.revoking(request)
        return request
