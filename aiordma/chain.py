"""Chains: requests collected, posted with one call and one doorbell, told of one by one or at
once."""

from collections.abc import Iterable
from types import TracebackType
from typing import Self

from aiordma.drain import ChainPort
from aiordma.endpoint import Endpoint
from aiordma.errors import NotSupportedError, RdmaError
from aiordma.opcodes import READ, Operation
from aiordma.posting import Posting
from aiordma.ranges import RemoteMemory
from aiordma.request import WorkRequest
from aiordma.request_posting import fill
from aiordma.staging import Buffer, Staged, Staging
from aiordma.verbs import MemorySlice, SendWork
from aiordma.windows import BoundWindow

__all__ = ("Chain",)

_READ = int(READ[1])


class Chain(Posting):
    """What `connection.chain()` gives: its `post_*` collect, and the end of the `with` block posts.

    The requests that they return can be awaited after the block. They take their slots, and hold
    their memory, from the beginning; plain bytes that are short enough to go inline are copied. If
    the block raises, nothing is posted, and each of them ends with an RdmaError that says so. If
    the device refuses one, those before it are posted, and the block raises PartialPostError.
    """

    _plain: ChainPort

    def __init__(self, endpoint: Endpoint, staging: Staging, last_tells: bool) -> None:
        self._endpoint = endpoint
        self._staging = staging
        self._last_tells = last_tells
        self._plain = ChainPort(endpoint.port)
        self._works: list[SendWork] = []  # of those requests that the port did not take
        self._alive: list[Staged] = []
        self._entered = False

    def require_usable(self) -> None:
        """As the endpoint's, which is asked where the port does not know it to be so."""
        if not self._plain.usable:
            self._endpoint.require_usable()

    def __repr__(self) -> str:
        return f"<Chain of {self._plain.count} on {self._endpoint!r}>"

    @property
    def requests(self) -> list[WorkRequest]:
        """In order; each time another list."""
        return self._plain.requests()

    def __enter__(self) -> Self:
        if self._entered:
            raise ValueError("this chain is over: make another one")
        self._entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._plain.over:
            return
        self._plain.over = True
        if not self._plain.count:
            return
        if error is not None:
            self._give_up(error)
            return
        try:
            self.require_usable()
        except BaseException as ended:
            self._give_up(ended)
            raise
        if len(self._works) == self._plain.count:  # none is plain
            self._endpoint.post_prepared(self._works, self.requests, last_tells=self._last_tells)
        else:
            self._endpoint.post_collected(self._plain, self._works, last_tells=self._last_tells)

    def _give_up(self, cause: BaseException) -> None:
        reason = RdmaError("the chain that it was part of was not posted")
        reason.__cause__ = cause
        for request in self.requests:
            request.fail(reason)

    def post_recvv(self, parts: Iterable[Buffer]) -> WorkRequest:
        """Receives are not part of a chain: their queue is another one.

        Raises:
            NotSupportedError: always.
        """
        raise NotSupportedError("a chain is of the send queue: post receives by themselves")

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
        name, opcode = operation
        work = SendWork(name, opcode, flags=flags, remote=remote, immediate=immediate)
        return self._post_work(work, staged)

    def _post_work(
        self, work: SendWork, staged: Staged | None, *, credited: bool = False
    ) -> WorkRequest:
        if staged is not None:
            self._require_range(staged, work.remote)
            staged.own()
            fill(work, staged)
        try:
            if self._plain.over:
                raise ValueError("this chain is over: make another one")
            if self._last_tells and work.opcode == _READ and not self._endpoint.hub.keeps_order:
                raise NotSupportedError(
                    f"a READ in a chain with last_tells: {self._endpoint.hub.context.device_name} "
                    "may end what is behind it first, so that nobody would tell of its own end"
                )
            request = self._endpoint.prepare(work)
        except BaseException:
            if staged is not None:
                self._staging.abandon(staged)
            raise
        self._works.append(work)
        self._plain.add(request)
        if staged is not None:
            self._alive.append(staged)  # what inline parts point into, until they are posted
            self._staging.posted(staged, request)
        return request

    def _post_bind(
        self, window: BoundWindow, memory: MemorySlice, access: int, flags: int, credited: bool
    ) -> WorkRequest:
        raise NotSupportedError("windows of type 1 are bound by a call of their own, not a chain")
