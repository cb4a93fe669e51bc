"""Chains: requests collected, posted with one call and one doorbell, told of one by one or at
once."""

from collections.abc import Iterable
from types import TracebackType
from typing import Self

from aiordma._base.enums import Access, WorkRequestOpcode
from aiordma._base.errors import NotSupportedError, RdmaError
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
from aiordma._requests.credits import Slot
from aiordma._requests.request import WorkRequest, fail_all
from aiordma._requests.select import ChainPort, plain_calls
from aiordma.verbs import LocalMemory, MemorySlice, MemoryWindow, SendWork

__all__ = ("Chain",)

_READ = int(WorkRequestOpcode.RDMA_READ)


class _Collected:
    """The sink of a chain: keeps requests in their order, until they are posted together."""

    def __init__(self, endpoint: Endpoint, signal_last_only: bool) -> None:
        self._endpoint = endpoint
        self._signal_last_only = signal_last_only
        self.port = ChainPort(endpoint.port)
        self._works: list[SendWork] = []  # of those requests that the port did not take
        self._staged: list[Staged] = []

    def require_usable(self) -> None:
        """As the endpoint's, which is asked where the port does not know it to be so."""
        if not self.port.usable:
            self._endpoint.require_usable()

    def submit(
        self, work: SendWork, staged: Staged | None, slot: Slot | None = None
    ) -> WorkRequest:
        """Keep it, with a slot of its own."""
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
        request = self._endpoint.sends.prepare(work)
        self._works.append(work)
        self.port.add(request)
        if staged is not None:
            self._staged.append(staged)  # what inline parts point into, until they are posted
        return request

    def bind(
        self,
        window: MemoryWindow,
        memory: MemorySlice,
        access: int,
        flags: int,
        slot: Slot | None = None,
    ) -> WorkRequest:
        """Refuse it."""
        raise NotSupportedError("windows of type 1 are bound by a call of their own, not a chain")

    def post(self) -> None:
        """Post all of them."""
        if len(self._works) == self.port.count:  # none is plain
            requests = self.port.requests()
            self._endpoint.sends.post_prepared(
                self._works, requests, signal_last_only=self._signal_last_only
            )
        else:
            self._endpoint.sends.post_collected(
                self.port, self._works, signal_last_only=self._signal_last_only
            )

    def give_up(self, cause: BaseException) -> None:
        """End all of them without having posted any."""
        reason = RdmaError("the chain that it was part of was not posted")
        reason.__cause__ = cause
        requests = self.port.requests()
        try:
            fail_all(requests, lambda _: reason)
        finally:
            for request in requests:
                request.exception()  # retrieved: its cause is raised


class Chain:
    """What `connection.chain()` gives: its `post_*` collect, and the end of the `with` block posts.

    Each `post_*` takes the arguments of the connection's method of that name. The requests that
    they return can be awaited after the block. They take their slots, and hold their memory, from
    the beginning; plain bytes that are short enough to go inline are copied. If the block raises,
    nothing is posted, and each of them ends with an RdmaError that says so.

    Raises:
        PartialPostError: at the end of the block: the device refused a request; those before it are
            posted.
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
        self._plain = self._sink.port
        self._posts = Posts(endpoint, staging, self._sink)
        self._entered = False
        self._sink.require_usable()

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
            self._sink.give_up(error)
            return
        try:
            self._sink.require_usable()
        except BaseException as ended:
            self._sink.give_up(ended)
            raise
        self._sink.post()

    # -- what it collects ---------------------------------------------------------------------

    @plain_calls("send")
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

        Raises: as `Connection.post_send`.
        """
        if immediate is None and invalidate is None and not fence and not solicited:
            request = self._plain.send(data)
            if request is not None:
                return request
        flags = send_flags(fence, solicited)
        work = message_work(self._endpoint, "post_send", immediate, invalidate, flags)
        return self._posts.post(work, self._staging.source, [data], "post_send(): data")

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

        Raises: as `Connection.post_sendv`.
        """
        given = several(parts, "post_sendv")
        flags = send_flags(fence, solicited)
        work = message_work(self._endpoint, "post_sendv", immediate, invalidate, flags)
        return self._posts.post(work, self._staging.source, given, f"post_sendv(): {PARTS}")

    @plain_calls("read")
    def post_read(
        self, remote: RemoteMemory, local: LocalMemory, *, fence: bool = False
    ) -> WorkRequest:
        """Collect an RDMA READ. See `Connection.post_read`.

        Raises:
            as `Connection.post_read`.
            NotSupportedError: `signal_last_only`, and the device does not keep the order of READs.
        """
        if not fence:
            request = self._plain.read(remote, local)
            if request is not None:
                return request
        work = read_work(self._endpoint, "post_read", remote, 1, send_flags(fence))
        return self._posts.post(work, self._staging.target, [local], "post_read(): local")

    def post_readv(
        self, remote: RemoteMemory, parts: Iterable[LocalMemory], *, fence: bool = False
    ) -> WorkRequest:
        """Collect a READ scattered over several local buffers. See `Connection.post_readv`.

        Raises: as `Chain.post_read`.
        """
        given = several(parts, "post_readv")
        work = read_work(self._endpoint, "post_readv", remote, len(given), send_flags(fence))
        return self._posts.post(work, self._staging.target, given, f"post_readv(): {PARTS}")

    @plain_calls("write")
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

        Raises: as `Connection.post_write`.
        """
        if immediate is None and not fence and not solicited:
            request = self._plain.write(local, remote)
            if request is not None:
                return request
        flags = send_flags(fence, solicited)
        work = write_work(self._endpoint, "post_write", remote, immediate, flags)
        return self._posts.post(work, self._staging.source, [local], "post_write(): local")

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

        Raises: as `Connection.post_writev`.
        """
        given = several(parts, "post_writev")
        flags = send_flags(fence, solicited)
        work = write_work(self._endpoint, "post_writev", remote, immediate, flags)
        return self._posts.post(work, self._staging.source, given, f"post_writev(): {PARTS}")

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

        Raises: as `Connection.post_compare_swap`.
        """
        call, flags = "post_compare_swap", send_flags(fence)
        work = compare_swap_work(self._endpoint, call, remote, compare, swap, flags)
        return self._posts.post(work, self._staging.target, [local], f"{call}(): local")

    def post_fetch_add(
        self, local: LocalMemory, remote: RemoteMemory, add: int, *, fence: bool = False
    ) -> WorkRequest:
        """Collect a fetch and add. See `Connection.post_fetch_add`.

        Raises: as `Connection.post_fetch_add`.
        """
        call = "post_fetch_add"
        work = fetch_add_work(self._endpoint, call, remote, add, send_flags(fence))
        return self._posts.post(work, self._staging.target, [local], f"{call}(): local")

    def post_bind_window(
        self, window: BoundWindow, memory: MemorySlice, access: Access, *, fence: bool = False
    ) -> WorkRequest:
        """Collect the binding of a window of type 2. See `Connection.post_bind_window`.

        Raises:
            as `Connection.post_bind_window`.
            NotSupportedError: the window is of type 1, which a call of its own binds.
        """
        return self._posts.bind(window, memory, access, "post_bind_window", fence)

    def post_invalidate(self, window: BoundWindow, *, fence: bool = False) -> WorkRequest:
        """Collect the end of what a window of type 2 permits. See `Connection.post_invalidate`.

        Raises:
            as `Connection.post_invalidate`.
            NotSupportedError: the window is of type 1.
        """
        return self._posts.invalidate(window, "post_invalidate", fence)
