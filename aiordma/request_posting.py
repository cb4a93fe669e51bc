"""From what was staged to a request: what every way to post has in common."""

from aiordma.drain import ClosedPort
from aiordma.opcodes import Operation
from aiordma.ranges import RemoteMemory
from aiordma.registration import Registration
from aiordma.request import WorkRequest
from aiordma.staging import Staged, Staging
from aiordma.verbs import MemorySlice, SendWork
from aiordma.windows import BoundWindow

__all__ = ("RequestPosting", "fill")


class RequestPosting(Registration):
    """Posts what was staged; nothing of a request that was refused is held."""

    _staging: Staging
    _plain: ClosedPort
    """Takes the plain requests, and answers None to all others."""

    def _post(
        self,
        operation: Operation,
        staged: Staged,
        remote: RemoteMemory | None,
        flags: int = 0,
        immediate: int = 0,
        *,
        credited: bool = False,
    ) -> WorkRequest:
        self._require_range(staged, remote, credited)
        name, opcode = operation
        try:
            request = self._endpoint.post_send(
                name,
                opcode,
                staged.sges,
                staged.count,
                staged.length,
                staged.held,
                flags=flags | staged.flags,
                remote=remote,
                immediate=immediate,
                credited=credited,
            )
        except BaseException:
            self._staging.abandon(staged)
            raise
        self._staging.posted(staged, request)
        return request

    def _post_work(
        self, work: SendWork, staged: Staged | None, *, credited: bool = False
    ) -> WorkRequest:
        if staged is not None:
            self._require_range(staged, work.remote, credited)
            fill(work, staged)
        try:
            (request,) = self._endpoint.post_sends([work], credited=credited)
        except BaseException:
            if staged is not None:
                self._staging.abandon(staged)
            raise
        if staged is not None:
            self._staging.posted(staged, request)
        return request

    def _post_bind(
        self, window: BoundWindow, memory: MemorySlice, access: int, flags: int, credited: bool
    ) -> WorkRequest:
        return self._endpoint.post_bind(window.window, memory, access, flags, credited=credited)

    def _require_range(
        self, staged: Staged, remote: RemoteMemory | None, credited: bool = False
    ) -> None:
        if remote is None:
            return
        try:
            if not isinstance(remote, RemoteMemory):
                raise TypeError(
                    f"{type(remote).__name__} is no RemoteMemory: a peer makes one with "
                    "region.remote(), and sends it packed"
                )
            if remote.length != staged.length:
                raise ValueError(
                    f"{staged.length} local bytes and {remote.length} remote ones: slice both "
                    "to the same length"
                )
        except BaseException:
            self._staging.abandon(staged)
            if credited:
                self._endpoint.send_credits.give()
            raise


def fill(work: SendWork, staged: Staged) -> None:
    """Write the local side into a request."""
    work.sges, work.count, work.length = staged.sges, staged.count, staged.length
    work.held = staged.held
    work.flags = int(work.flags) | staged.flags
