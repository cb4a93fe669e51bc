"""Chains: requests that are collected, and posted with one call and one doorbell. Either each
request is signaled, or only the last."""

from collections.abc import Iterable
from types import TracebackType
from typing import Self

from aiordma._base.enums import Access, WorkRequestOpcode
from aiordma._base.errors import NotPostedError, NotSupportedError
from aiordma._base.process import never_pickled
from aiordma._base.ranges import RemoteMemory
from aiordma._connection.posts import Posts
from aiordma._connection.works import (
    compare_swap_work,
    fetch_add_work,
    message_work,
    read_work,
    send_flags,
    write_work,
)
from aiordma._endpoint.endpoint import Endpoint
from aiordma._endpoint.staging import PARTS, Staged, Staging, several
from aiordma._endpoint.windows import BoundWindow
from aiordma._loop.event_loop import protected
from aiordma._native import ChainPort, calls_port, end_chain
from aiordma._requests.credits import Slot
from aiordma._requests.request import WorkRequest, fail_all
from aiordma.verbs import LocalMemory, MemorySlice, MemoryWindow, SendWork

__all__ = ("Chain",)

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
        request = self._endpoint.work.sends.prepare(work)
        self._works.append(work)
        self.port.add(request)
        return request

    def bind(
        self,
        window: MemoryWindow,
        memory: MemorySlice,
        access: int,
        flags: int,
        slot: Slot | None = None,
    ) -> WorkRequest:
        """Raise NotSupportedError."""
        raise NotSupportedError("windows of type 1 are bound by a call of their own, not a chain")

    def post(self, requests: list[WorkRequest]) -> None:
        """Post all requests: those of `port.requests`."""
        if len(self._works) == len(requests):  # no request is plain
            self._endpoint.work.sends.post_prepared(
                self._works, requests, signal_last_only=self._signal_last_only
            )
        else:
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


class Chain:
    """Collects requests in a `with` block, and posts them at its end. Made by `Connection.chain`.

    Each `post_*` method takes the arguments of the connection's method of the same name. It returns
    a request that can be awaited after the block. The request takes its slot, and holds its memory,
    as soon as it is added. Bytes that are short enough to go inline are copied then. If the block
    raises, nothing is posted, and each request fails with a NotPostedError.

    Raises:
        PartialPostError: at the end of the block: the device refused a request; the requests before
            it are posted.
        ClosedError, DisconnectedError, DeviceEventError, WorkCompletionError: at the end of the
            block: the connection has ended; nothing was posted.
        VerbsCallError: at the end of the block: the device refused the call.
        ValueError: the chain is entered, or a request added, after its end.

    See: man ibv_post_send.
    """

    def __init__(self, endpoint: Endpoint, staging: Staging, signal_last_only: bool) -> None:
        self._endpoint = endpoint
        self._staging = staging
        self._sink = _Collected(endpoint, signal_last_only)
        self._port = self._sink.port
        self._posts = Posts(endpoint, staging, self._sink)
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

    # -- collecting requests ------------------------------------------------------------------

    @calls_port("send")
    def post_send(
        self,
        data: LocalMemory,
        *,
        immediate: int | None = None,
        invalidate: int | None = None,
        fence: bool = False,
        solicited: bool = False,
    ) -> WorkRequest:
        """Collect a message. See `Connection.post_send`.

        Args: as `Connection.post_send`.

        Raises: as `Connection.post_send`.
        """
        flags = send_flags(fence, solicited)
        work = message_work(self._endpoint, "post_send", immediate, invalidate, flags)
        return self._posts.post(work, self._staging.source, [data], "post_send(): data")

    @calls_port("sendv")
    def post_sendv(
        self,
        parts: Iterable[LocalMemory],
        *,
        immediate: int | None = None,
        invalidate: int | None = None,
        fence: bool = False,
        solicited: bool = False,
    ) -> WorkRequest:
        """Collect a message gathered from several buffers. See `Connection.post_sendv`.

        Args: as `Connection.post_sendv`.

        Raises: as `Connection.post_sendv`.
        """
        given = several(parts, "post_sendv")
        flags = send_flags(fence, solicited)
        work = message_work(self._endpoint, "post_sendv", immediate, invalidate, flags)
        return self._posts.post(work, self._staging.source, given, f"post_sendv(): {PARTS}")

    @calls_port("read")
    def post_read(
        self, remote: RemoteMemory, local: LocalMemory, *, fence: bool = False
    ) -> WorkRequest:
        """Collect an RDMA READ. See `Connection.post_read`.

        Args: as `Connection.post_read`.

        Raises:
            as `Connection.post_read`.
            NotSupportedError: the chain has `signal_last_only`, and the device may complete later
                requests before a READ.
        """
        work = read_work(self._endpoint, "post_read", remote, 1, send_flags(fence))
        return self._posts.post(work, self._staging.target, [local], "post_read(): local")

    @calls_port("readv")
    def post_readv(
        self, remote: RemoteMemory, parts: Iterable[LocalMemory], *, fence: bool = False
    ) -> WorkRequest:
        """Collect a READ scattered over several local buffers. See `Connection.post_readv`.

        Args: as `Connection.post_readv`.

        Raises: as `Chain.post_read`.
        """
        given = several(parts, "post_readv")
        work = read_work(self._endpoint, "post_readv", remote, len(given), send_flags(fence))
        return self._posts.post(work, self._staging.target, given, f"post_readv(): {PARTS}")

    @calls_port("write")
    def post_write(
        self,
        local: LocalMemory,
        remote: RemoteMemory,
        *,
        immediate: int | None = None,
        fence: bool = False,
        solicited: bool = False,
    ) -> WorkRequest:
        """Collect an RDMA WRITE. See `Connection.post_write`.

        Args: as `Connection.post_write`.

        Raises: as `Connection.post_write`.
        """
        flags = send_flags(fence, solicited)
        work = write_work(self._endpoint, "post_write", remote, immediate, flags)
        return self._posts.post(work, self._staging.source, [local], "post_write(): local")

    @calls_port("writev")
    def post_writev(
        self,
        parts: Iterable[LocalMemory],
        remote: RemoteMemory,
        *,
        immediate: int | None = None,
        fence: bool = False,
        solicited: bool = False,
    ) -> WorkRequest:
        """Collect a WRITE gathered from several local buffers. See `Connection.post_writev`.

        Args: as `Connection.post_writev`.

        Raises: as `Connection.post_writev`.
        """
        given = several(parts, "post_writev")
        flags = send_flags(fence, solicited)
        work = write_work(self._endpoint, "post_writev", remote, immediate, flags)
        return self._posts.post(work, self._staging.source, given, f"post_writev(): {PARTS}")

    @calls_port("compare_swap")
    def post_compare_swap(
        self,
        local: LocalMemory,
        remote: RemoteMemory,
        compare: int,
        swap: int,
        *,
        fence: bool = False,
    ) -> WorkRequest:
        """Collect a compare and swap. See `Connection.post_compare_swap`.

        Args: as `Connection.post_compare_swap`.

        Raises: as `Connection.post_compare_swap`.
        """
        call, flags = "post_compare_swap", send_flags(fence)
        work = compare_swap_work(self._endpoint, call, remote, compare, swap, flags)
        return self._posts.post(work, self._staging.target, [local], f"{call}(): local")

    @calls_port("fetch_add")
    def post_fetch_add(
        self, local: LocalMemory, remote: RemoteMemory, add: int, *, fence: bool = False
    ) -> WorkRequest:
        """Collect a fetch and add. See `Connection.post_fetch_add`.

        Args: as `Connection.post_fetch_add`.

        Raises: as `Connection.post_fetch_add`.
        """
        call = "post_fetch_add"
        work = fetch_add_work(self._endpoint, call, remote, add, send_flags(fence))
        return self._posts.post(work, self._staging.target, [local], f"{call}(): local")

    @calls_port("bind")
    def post_bind_window(
        self, window: BoundWindow, memory: MemorySlice, access: Access, *, fence: bool = False
    ) -> WorkRequest:
        """Collect the binding of a window of type 2. See `Connection.post_bind_window`.

        Args: as `Connection.post_bind_window`.

        Raises:
            as `Connection.post_bind_window`.
            NotSupportedError: the window is of type 1, which cannot be bound in a chain.
        """
        return self._posts.bind(window, memory, access, "post_bind_window", fence)

    @calls_port("local_invalidate")
    def post_invalidate(self, window: BoundWindow, *, fence: bool = False) -> WorkRequest:
        """Collect the invalidation of a window of type 2. See `Connection.post_invalidate`.

        Args: as `Connection.post_invalidate`.

        Raises:
            as `Connection.post_invalidate`.
            NotSupportedError: the window is of type 1.
        """
        return self._posts.invalidate(window, "post_invalidate", fence)
