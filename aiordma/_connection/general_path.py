"""The general path of a post: stages a request's buffers, takes a slot, and submits the request.

The endpoint's port posts most requests in one C call (docs/design.md). The requests that it cannot
handle take the path in this module: for instance, those with a buffer to be registered, and those
that wait for a slot. The path ends at a sink, which is the send queue or a chain.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Protocol

from aiordma._base.arguments import instance
from aiordma._base.enums import Access, MemoryWindowType, WorkRequestOpcode
from aiordma._base.errors import NotSupportedError
from aiordma._connection.operations import send_flags
from aiordma._endpoint.capabilities import require_windows
from aiordma._endpoint.endpoint import Endpoint
from aiordma._endpoint.staging import Staged, Staging, call_of
from aiordma._endpoint.windows import BoundWindow, check_bindable
from aiordma._loop.event_loop import protected
from aiordma._requests.credits import Slot
from aiordma._requests.pool import Lease
from aiordma._requests.request import WorkRequest
from aiordma.verbs import LocalMemory, MemoryWindow, SendWork
from aiordma.verbs.completion import WorkCompletion
from aiordma.verbs.memory import MemorySlice

_BIND = int(WorkRequestOpcode.BIND_MW)
_INVALIDATE = int(WorkRequestOpcode.LOCAL_INV)

Stage = Callable[[Iterable[LocalMemory], str], Staged]
"""`Staging.source` or `Staging.target`."""


class Sink(Protocol):
    """Posts or collects requests. It holds nothing of a request that it refuses."""

    def submit(
        self, work: SendWork, staged: Staged | None, slot: Slot | None = None
    ) -> WorkRequest:
        """Post the request, or keep it to be posted. Without a slot, take one if one is free."""


class GeneralPath:
    """See the module. The errors are the same as those of `Connection.post_send`.

    Args:
        endpoint: the endpoint that the requests belong to.
        staging: prepares their buffers.
        sink: posts or collects them.
    """

    def __init__(self, endpoint: Endpoint, staging: Staging, sink: Sink) -> None:
        self._endpoint = endpoint
        self._staging = staging
        self._sink = sink

    @protected
    def post(
        self,
        work: SendWork,
        stage: Stage,
        parts: Iterable[LocalMemory],
        where: str,
        slot: Slot | None = None,
    ) -> WorkRequest:
        """Post a request at once.

        Args:
            work: the operation, without its local memory.
            stage: prepares the parts.
            parts: the local memory.
            where: the call and its parameter, for messages (see `Staging.source`).
            slot: a slot from `sends.slots.take()`; None: take one if one is free.
        """
        return self._submit(work, stage(parts, where), where, slot)

    async def run(
        self, work: SendWork, stage: Stage, parts: list[LocalMemory], where: str
    ) -> WorkCompletion:
        """Post a request when a slot is free, and wait for its completion. Arguments as of `post`.

        Cancellation: a posted request stays in flight, and holds its memory until it completes.
        """
        return await (await self.post_when_free(work, stage, parts, where))

    @protected
    async def post_when_free(
        self, work: SendWork, stage: Stage, parts: list[LocalMemory], where: str
    ) -> WorkRequest:
        """Post a request when a slot is free. Arguments as of `post`."""
        # Take the slot before staging: a task that waits for a slot holds no memory, and the
        # buffers are posted right after they are checked.
        with await self._endpoint.work.sends.slots.take() as slot:
            staged = await self._staging.prepare(stage, parts, where)
            return self._submit(work, staged, where, slot)

    def _submit(
        self, work: SendWork, staged: Staged, where: str, slot: Slot | None = None
    ) -> WorkRequest:
        try:
            if work.remote is not None and work.remote.length != staged.length:
                raise ValueError(
                    f"{where.partition('[')[0]} has {staged.length} bytes, and remote "
                    f"{work.remote.length}: slice both to the same length"
                )
            if work.remote is None and staged.length > self._endpoint.work.port.max_sent:
                raise ValueError(
                    f"{call_of(where)}(): a message of {staged.length} bytes: the receives of "
                    f"{self._endpoint.name} have {self._endpoint.work.port.max_sent}; set a larger "
                    "receive_size= there, or let the peer READ the data"
                )
            work.sges, work.count, work.length = staged.sges, staged.count, staged.length
            work.held, work.flags = [*work.held, *staged.held], int(work.flags) | staged.flags
            return self._sink.submit(work, staged, slot)
        except BaseException:
            self._staging.abandon(staged)
            raise

    @protected
    def receive(
        self, parts: list[LocalMemory], where: str, header: Lease | None = None
    ) -> WorkRequest:
        """Post a receive of the parts, with memory of the caller's before them for a header."""
        staged = self._staging.receive(parts, where)
        sges, count, length = staged.sges, staged.count, staged.length
        if header is not None:
            memory = header.memory
            sges, count, length = memory._sge + sges, 1 + count, memory.length + length
        try:
            return self._endpoint.work.receives.submit(sges, count, length, staged.held)
        except BaseException:
            self._staging.abandon(staged)
            raise

    async def run_atomic(self, work: SendWork) -> int:
        """Post an atomic when a slot is free, and return the previous value of the peer's memory.

        Cancellation: a posted atomic may still be carried out.
        """
        request, landing = await self._post_atomic_when_free(work)
        await request
        return landing.value

    @protected
    async def _post_atomic_when_free(self, work: SendWork) -> "tuple[WorkRequest, _Landing]":
        with await self._endpoint.work.sends.slots.take() as slot:
            # The request releases `landing` when it completes, which reads the value.
            landing = _Landing(self._endpoint.memory.pool.lease(8))
            work.sges, work.count, work.length = landing.lease.memory._sge, 1, 8
            work.held = (landing,)
            try:
                return self._sink.submit(work, None, slot), landing
            except BaseException:
                landing.lease.release()
                raise

    # -- memory windows -----------------------------------------------------------------------

    @protected
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
            request = self._bind_type_1(target, memory, int(access), flags, slot)
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

    def _bind_type_1(
        self, window: MemoryWindow, memory: MemorySlice, access: int, flags: int, slot: Slot | None
    ) -> WorkRequest:
        sends = self._endpoint.work.sends
        if self._sink is not sends:
            raise NotSupportedError(
                "windows of type 1 are bound by a call of their own, not a chain"
            )
        return sends.bind(window, memory, access, flags, slot)

    async def bind_or_close(
        self, window: BoundWindow, memory: MemorySlice, access: Access, call: str
    ) -> BoundWindow:
        """Bind a new window when a slot is free, wait for it, and return the window.

        Cancellation: the window is closed; a posted bind may still be carried out.
        """
        try:
            with await self._endpoint.work.sends.slots.take() as slot:
                request = self.bind(window, memory, access, call, slot=slot)
            await request
        except BaseException:
            window.close()
            raise
        return window

    @protected
    def invalidate(
        self, window: BoundWindow, call: str, fence: bool = False, slot: Slot | None = None
    ) -> WorkRequest:
        """Post the invalidation of a window; see `Connection.post_invalidate`."""
        instance(window, "window", BoundWindow, call)
        self._endpoint.require_usable()
        require_windows(self._endpoint)
        if window._endpoint is not self._endpoint:
            raise ValueError(f"{call}(): window={window!r}: it belongs to another connection")
        memory, flags = window._require_valid(), send_flags(fence)
        if window._window.kind is MemoryWindowType.TYPE_1:
            request = self._bind_type_1(window._window, memory[:0], 0, flags, slot)
        else:
            work = SendWork("LOCAL_INV", _INVALIDATE, flags=flags, immediate=window.rkey)
            request = self._sink.submit(work, None, slot)
        window._note_invalidate(request)
        return request

    async def invalidate_when_free(self, window: BoundWindow, call: str) -> WorkRequest:
        """Post the invalidation of a window when a slot is free."""
        with await self._endpoint.work.sends.slots.take() as slot:
            return self.invalidate(window, call, slot=slot)


class _Landing:
    """The block that receives the previous value of an atomic. Releasing it reads the value."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.value = 0

    def _hold(self) -> None:
        """Do nothing: the lease is held from the start."""

    def _release(self) -> None:
        """Read the value, then release the block."""
        self.value = int.from_bytes(self.lease.memory.view[:8], sys.byteorder)
        self.lease.release()
