"""From what a call asks for to a request: the way of everything that is not plain.

A plain request (one part, registered or short enough to go inline, with nothing beside it) is
posted by the endpoint's port with one call of C. All others come here: their buffers are staged,
they get a slot, and go to a sink, which is the send queue or a chain.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Protocol

from aiordma._base.arguments import instance
from aiordma._base.enums import Access, MemoryWindowType, WorkRequestOpcode
from aiordma._connection.works import send_flags
from aiordma._endpoint.capabilities import require_windows
from aiordma._endpoint.endpoint import Endpoint
from aiordma._endpoint.staging import Staged, Staging
from aiordma._endpoint.windows import BoundWindow, check_bindable
from aiordma._requests.credits import Slot
from aiordma._requests.pool import Lease
from aiordma._requests.request import WorkRequest
from aiordma.verbs import LocalMemory, MemorySlice, MemoryWindow, SendWork, WorkCompletion

__all__ = ("Posts", "Sink", "Stage")

_BIND = int(WorkRequestOpcode.BIND_MW)
_INVALIDATE = int(WorkRequestOpcode.LOCAL_INV)

Stage = Callable[[Iterable[LocalMemory], str], Staged]
"""`Staging.source` or `Staging.target`."""


class Sink(Protocol):
    """Where requests go. Of a request that was refused nothing is held."""

    def submit(
        self, work: SendWork, staged: Staged | None, slot: Slot | None = None
    ) -> WorkRequest:
        """Post it, or keep it to be posted. Without a slot it takes one, if one is free."""

    def bind(
        self,
        window: MemoryWindow,
        memory: MemorySlice,
        access: int,
        flags: int,
        slot: Slot | None = None,
    ) -> WorkRequest:
        """Bind a window of type 1, which is a call of its own in C."""


class Posts:
    """See the module. Its errors are those of `Connection.post_send`.

    Args:
        endpoint: whose requests they are.
        staging: what prepares their buffers.
        sink: where they go.
    """

    def __init__(self, endpoint: Endpoint, staging: Staging, sink: Sink) -> None:
        self._endpoint = endpoint
        self._staging = staging
        self._sink = sink

    def post(
        self,
        work: SendWork,
        stage: Stage,
        parts: Iterable[LocalMemory],
        where: str,
        slot: Slot | None = None,
    ) -> WorkRequest:
        """Post at once.

        Args:
            work: what is asked for, but for its memory.
            stage: what prepares the parts.
            parts: the local memory.
            where: the call and its parameter, for messages (see `Staging.source`).
            slot: of `sends.slots.take()`; None: one is taken, if one is free.
        """
        return self._submit(work, stage(parts, where), slot)

    async def run(
        self, work: SendWork, stage: Stage, parts: list[LocalMemory], where: str
    ) -> WorkCompletion:
        """Post when a slot is free, and wait for the end. Arguments as of `post`.

        Cancellation: what is posted goes on, and holds its memory until it ends.
        """
        # The slot first: who waits for one holds no memory, and what is checked now is posted now.
        with await self._endpoint.sends.slots.take() as slot:
            staged = await self._staging.prepare(stage, parts, where)
            request = self._submit(work, staged, slot)
        return await request

    def _submit(self, work: SendWork, staged: Staged, slot: Slot | None = None) -> WorkRequest:
        try:
            if work.remote is not None and work.remote.length != staged.length:
                raise ValueError(
                    f"{staged.length} local bytes and {work.remote.length} remote ones: slice both "
                    "to the same length"
                )
            work.sges, work.count, work.length = staged.sges, staged.count, staged.length
            work.held, work.flags = [*work.held, *staged.held], int(work.flags) | staged.flags
            request = self._sink.submit(work, staged, slot)
        except BaseException:
            self._staging.abandon(staged)
            raise
        self._staging.posted(staged, request)
        return request

    async def run_atomic(self, work: SendWork) -> int:
        """Post an atomic when a slot is free, and return what the peer's memory was.

        Cancellation: it may still happen.
        """
        with await self._endpoint.sends.slots.take() as slot:
            # The request gives the block back as it ends: it is read just before that.
            landing = _Landing(self._endpoint.hub.pool.lease(8))
            work.sges, work.count, work.length = landing.lease.memory._sge, 1, 8
            work.held = (landing,)
            try:
                request = self._sink.submit(work, None, slot)
            except BaseException:
                landing.lease.release()
                raise
        await request
        return landing.value

    # -- memory windows -----------------------------------------------------------------------

    def bind(
        self,
        window: BoundWindow,
        memory: MemorySlice,
        access: Access,
        call: str,
        fence: bool = False,
        slot: Slot | None = None,
    ) -> WorkRequest:
        """Post the binding of a window; see `Connection.post_bind_window`."""
        self._endpoint.require_usable()
        require_windows(self._endpoint)
        check_bindable(self._endpoint, window, memory, access, call)
        flags, target = send_flags(fence), window._window
        if target.kind is MemoryWindowType.TYPE_1:
            request = self._sink.bind(target, memory, int(access), flags, slot)
            window._note_bind(request, memory, target.rkey)
            return request
        rkey = target.next_rkey()
        work = SendWork(
            "BIND_MW",
            _BIND,
            flags=flags,
            held=(memory,),
            window=target,
            bound=memory,
            access=access,
            rkey=rkey,
        )
        request = self._sink.submit(work, None, slot)
        window._note_bind(request, memory, rkey)
        return request

    def invalidate(
        self, window: BoundWindow, call: str, fence: bool = False, slot: Slot | None = None
    ) -> WorkRequest:
        """Post the end of what a window permits; see `Connection.post_invalidate`."""
        instance(window, "window", BoundWindow, call)
        self._endpoint.require_usable()
        require_windows(self._endpoint)
        memory, flags = window._require_bound(), send_flags(fence)
        if window._window.kind is MemoryWindowType.TYPE_1:
            request = self._sink.bind(window._window, memory[:0], 0, flags, slot)
        else:
            work = SendWork("LOCAL_INV", _INVALIDATE, flags=flags, immediate=window.rkey)
            request = self._sink.submit(work, None, slot)
        window._note_invalidate(request)
        return request


class _Landing:
    """Where an atomic's old value arrives; read as the request lets go of it."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.value = 0

    def _hold(self) -> None:
        """A lease is held from the start."""

    def _release(self) -> None:
        """Read, then give the block back."""
        self.value = int.from_bytes(self.lease.memory.view[:8], sys.byteorder)
        self.lease.release()
