"""Chains: requests that are collected, and posted with one call and one doorbell. Either each
request is signaled, or only the last."""

from types import TracebackType
from typing import Self

from aiordma._base.enums import WorkRequestOpcode
from aiordma._base.errors import NotPostedError, NotSupportedError
from aiordma._base.process import never_pickled
from aiordma._connection.general_path import GeneralPath
from aiordma._connection.posting import Posting
from aiordma._endpoint.endpoint import Endpoint
from aiordma._endpoint.staging import Staged, Staging
from aiordma._loop.event_loop import protected
from aiordma._native import ChainPort, end_chain
from aiordma._requests.credits import Slot
from aiordma._requests.request import WorkRequest, fail_all
from aiordma.verbs import SendWork

_READ = int(WorkRequestOpcode.RDMA_READ)


class _Collected:
    """The sink of a chain: keeps requests in order until they are posted together."""

    def __init__(self, endpoint: Endpoint, signal_last_only: bool) -> None:
        self._endpoint = endpoint
        self._signal_last_only = signal_last_only
        self.port = ChainPort(endpoint.work.port)
        self.port.signal_last_only = signal_last_only
        self._works: list[SendWork] = []  # of the requests that are not plain
        self._staged: list[Staged] = []

    def require_usable(self) -> None:
        """Do nothing if the port is usable. Otherwise raise as `Endpoint.require_usable`."""
        if not self.port.usable:
            self._endpoint.require_usable()

    def submit(
        self, work: SendWork, staged: Staged | None, slot: Slot | None = None
    ) -> WorkRequest:
        """Add a request, which takes a slot of its own."""
        if self.port.over:
            raise ValueError("this chain is over: make another one")
        if self._signal_last_only and work.opcode == _READ and not self._endpoint.hub.keeps_order:
            raise NotSupportedError(
                "a READ in a chain with signal_last_only: "
                f"{self._endpoint.hub.context.device_name} may complete the requests behind it "
                "first, so that the last completion would not include it"
            )
        if staged is not None:
            staged.own()
            work.sges = staged.sges
            self._staged.append(staged)  # holds the inline bytes until they are posted
        request = self._endpoint.work.sends.prepare(work, self.port)
        self._works.append(work)
        self.port.add(request)
        return request

    def post(self, requests: list[WorkRequest]) -> None:
        """Post all requests: those of `port.requests`."""
        self._endpoint.work.sends.post_collected(
            self.port, self._works, requests, signal_last_only=self._signal_last_only
        )

    def raise_refused(self) -> None:
        """Raise the error of the engine's post at the end of the block."""
        error, self.port.error = self.port.error, 0
        self._endpoint.work.sends.chain_posted(
            error, self.port.posted, self.port.requests(), self._signal_last_only
        )

    def give_up(self, cause: BaseException) -> None:
        """Fail all requests that are not posted with a NotPostedError."""
        requests = [request for request in self.port.requests() if not request.wr_id]
        # Only the class: the text of the program's own errors is made by the program's code.
        kind = type(cause).__name__
        reason = NotPostedError(f"its chain was not posted, because the block raised {kind}")
        reason.__cause__ = cause
        try:
            fail_all(requests, lambda _: reason)
        finally:
            for request in requests:
                request.exception()  # marks it as retrieved: the caller raises the cause


class Chain(Posting):
    """Collects requests in a `with` block, and posts them at its end. Made by `Connection.chain`.

    Each `post_*` method is the connection's method of the same name. It returns a request that can
    be awaited after the block. The request takes its slot, and holds its memory, as soon as it is
    added. Bytes that are short enough to go inline are copied then. If the block
    raises, nothing is posted, and each request fails with a NotPostedError.

    Raises:
        PartialPostError: at the end of the block: the device refused a request; the requests before
            it are posted.
        QueueFullError: (of a `post_*` method) `max_send_wr` requests are in flight, those of this
            chain included; this one is not added.
        ClosedError, DisconnectedError, DeviceEventError, WorkCompletionError: at the end of the
            block: the connection has ended; nothing was posted.
        VerbsCallError: at the end of the block: the device refused the call.
        ValueError: the chain is entered, or a request added, after its end.
        NotSupportedError: (of a `post_*` method) a window of type 1; or a READ with
            `signal_last_only`, and the device may complete later requests before it.

    See: man ibv_post_send.
    """

    def __init__(self, endpoint: Endpoint, staging: Staging, signal_last_only: bool) -> None:
        self._endpoint = endpoint
        self._staging = staging
        self._sink = _Collected(endpoint, signal_last_only)
        self._port = self._sink.port
        self._general = GeneralPath(endpoint, staging, self._sink)
        self._entered = False
        self._sink.require_usable()

    __reduce__ = never_pickled

    def __repr__(self) -> str:
        return f"<Chain of {self._port.count} on {self._endpoint!r}>"

    @property
    def requests(self) -> list[WorkRequest]:
        """The requests in order; a new list each time."""
        return self._port.requests()

    def __enter__(self) -> Self:
        if self._entered:
            raise ValueError("this chain is over: make another one")
        self._entered = True
        return self

    @protected
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if end_chain(self, kind, error, trace):
            return  # all requests are plain, and are posted
        if self._port.error:
            self._sink.raise_refused()
        if self._port.over:
            return
        try:
            self._port.over = True
            if not self._port.count:
                return
            if error is None:
                self._sink.require_usable()
                self._sink.post(self._port.requests())
        except BaseException as ended:
            self._sink.give_up(ended)
            raise
        if error is not None:
            self._sink.give_up(error)
