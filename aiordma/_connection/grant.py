"""Grants: a peer's access to a part of memory, which ends at a known moment.

While the access is open, the device executes the peer's requests without the program. So the end
has to come from the device: `Grant` waits for the driver's call that ends the access, and only then
reports the end. Two objects of the device can give access:

- A memory window of type 2, bound to the connection's queue pair, where the device has windows. It
  is freed at the end (ibv_dealloc_mw), not invalidated by a work request: a peer that acknowledges
  nothing can hold up the send queue, but not this call.
- A registration that exists for the grant alone. It is deregistered at the end (ibv_dereg_mr).
  Without windows it gives the access, and of a dma-buf, to which the kernel lets no window be
  bound. Otherwise it has none by itself, and the window is bound to it, unless the caller's region
  permits binding and the device checks the bounds of windows.

The end runs in callbacks, not in a task. So no cancellation stops it half way.
"""

import math
from collections.abc import Callable

from anyio.abc import AsyncResource

from aiordma._base.arguments import Buffer, instance, seconds, shown, wrong_type
from aiordma._base.enums import (
    REMOTE_ACCESS,
    REMOTE_WRITING,
    Access,
    MemoryWindowType,
    QueuePairType,
    names_of,
)
from aiordma._base.errors import VerbsCallError, detached
from aiordma._base.ranges import RemoteMemory
from aiordma._connection.counter import Counter
from aiordma._connection.general_path import GeneralPath
from aiordma._endpoint.domain_state import kept_open, start_deregistering, wrong_domain
from aiordma._endpoint.endpoint import Endpoint
from aiordma._endpoint.registration import make_in_thread
from aiordma._endpoint.staging import THREAD_LIMIT
from aiordma._endpoint.windows import BoundWindow
from aiordma._loop.event_loop import Timer
from aiordma._loop.threads import Once, outwait
from aiordma._runtime.teardown import Phase
from aiordma.verbs import LocalMemory, MemoryWindow
from aiordma.verbs.buffers import flat_view
from aiordma.verbs.memory import MemoryRegion, MemorySlice

_RXE = 0xFFFFFF
"""The vendor_id of rxe, which checks an access through a window against the bounds of the region,
not of the window."""


class Grant(AsyncResource):
    """Access of a connection's peer to a part of memory, made by `Connection.grant`.

    `remote` is the description for the peer. After the end of the block, or when `aclose` or
    `ended` has returned, no byte of the peer's arrives in the memory.
    """

    def __init__(
        self, endpoint: Endpoint, memory: LocalMemory, length: int, access: Access
    ) -> None:
        self._endpoint = endpoint
        self._memory = memory
        self._length = length
        self._remote: RemoteMemory
        self._access = access
        self._held: MemorySlice | None = None
        self._own: MemoryRegion | None = None
        self._window: BoundWindow | None = None
        self._timer: Timer | None = None
        self._ending = False
        self._expired = False
        self._error: Exception | None = None
        self._leave: Callable[[], object] = lambda: None
        self._ended = Once(endpoint.loop)

    def __repr__(self) -> str:
        state = "ended" if self._ended.is_set() else "ending" if self._ending else "active"
        return f"<Grant of {names_of(self._access)} on {self._memory!r}: {state}>"

    @property
    def remote(self) -> RemoteMemory:
        """The description of the memory for the peer. It is of no use after the end."""
        return self._remote

    @property
    def access(self) -> Access:
        """The access that the peer has."""
        return self._access

    @property
    def is_active(self) -> bool:
        """Whether the access has not begun to end."""
        return not self._ending

    @property
    def expired(self) -> bool:
        """Whether `expires` ended the access."""
        return self._expired

    # -- the beginning --------------------------------------------------------------------------

    async def _open(
        self, path: GeneralPath, expires: float | None, leave: Callable[[], object]
    ) -> None:
        """Give the access. If this fails or is cancelled, or the loop ends meanwhile, nothing is
        left. `leave` is called when the memory is released, and may be called before: it permits
        the reactor and the domain to close."""
        endpoint, self._leave = self._endpoint, leave
        has_windows = (
            bool(endpoint.hub.attributes.max_mw) and endpoint.pair.service is QueuePairType.RC
        )
        if isinstance(self._memory, MemorySlice):
            self._memory._hold()  # a closed region raises here
            self._held = self._memory
            has_windows &= self._memory._is_accessible
        try:
            part = self._held if has_windows and self._is_bindable() else None
            if part is None:
                self._own = await self._register(Access.MW_BIND if has_windows else self._access)
                part = self._own[:]
            # From now on also the endpoint's end ends this: after the loop's end, no task does.
            endpoint.teardown.on_ended.append(self._start_ending)
            if has_windows:
                raw = MemoryWindow(endpoint.memory.domain, MemoryWindowType.TYPE_2)
                window = BoundWindow(endpoint, raw)
                # If this fails, the peer does not know the rkey.
                self._window = await path.bind_or_close(window, part, self._access, "grant")
                self._remote = self._window.remote
            else:
                self._remote = part.remote()
            endpoint.require_usable()
        except BaseException:
            self._start_ending()
            await outwait(self._ended)
            raise
        if expires is not None:
            self._timer = endpoint.loop.call_later(expires, self._expire)

    def _is_bindable(self) -> bool:
        """Whether a window on the caller's region gives the access, to the granted part only."""
        if self._held is None or self._endpoint.hub.attributes.vendor_id == _RXE:
            return False
        given = self._held.region.access
        return bool(given & Access.MW_BIND) and (
            not self._access & REMOTE_WRITING or bool(given & Access.LOCAL_WRITE)
        )

    async def _register(self, access: Access) -> MemoryRegion:
        """Register the memory for this grant."""
        endpoint = self._endpoint
        if self._access & REMOTE_WRITING:
            access |= Access.LOCAL_WRITE
        held, buffer = self._held, self._memory

        def register() -> MemoryRegion:
            if held is not None:
                return held._register_again(access)
            assert not isinstance(buffer, MemoryRegion | MemorySlice)
            return MemoryRegion._registered_by("grant", endpoint.memory.domain, buffer, access)

        def make() -> MemoryRegion:
            return endpoint.memory.pool.registrations._register(register)

        if self._length > THREAD_LIMIT:
            region = await make_in_thread(endpoint, make, MemoryRegion.close, self._start_ending)
        else:
            region = make()
        # The end of the grant takes it from this list. So only one of the two ends closes it.
        endpoint.memory.adopt(region)
        return region

    # -- the end --------------------------------------------------------------------------------

    def _expire(self) -> None:
        if not self._ending:
            self._expired = True
            self._start_ending()

    def _start_ending(self) -> None:
        """End the access in the background, and then set `_ended`. Idempotent."""
        if self._ending:
            return
        self._ending = True
        endpoint, window = self._endpoint, self._window
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not endpoint.teardown.has_ended and self._start_ending in endpoint.teardown.on_ended:
            endpoint.teardown.on_ended.remove(self._start_ending)
        if window is None or endpoint.teardown.has_ended:
            self._deregister()  # the end of a queue pair frees its windows
        elif endpoint.teardown.phase is Phase.DESTROYING:
            endpoint.teardown.on_ended.append(self._deregister)  # a thread is freeing them
        else:
            try:
                window._end()
            except VerbsCallError as error:
                # The window may still work. The end of the queue pair, which follows, ends its
                # access.
                self._error = detached(error)
                endpoint.teardown.on_ended.append(self._deregister)
                return
            self._deregister()

    def _deregister(self) -> None:
        endpoint, region = self._endpoint, self._own
        if region is None:
            self._finish(None)
            return
        if endpoint.memory.regions.pop(id(region), None) is None:
            self._finish(None)  # the connection's end has deregistered it, or does it
        elif region._users:
            region._retire()  # the bind was cancelled, and is still in flight
            self._finish(None)
        else:
            blocks = endpoint.hub.blocks or region.length > THREAD_LIMIT
            loop, domain = endpoint.loop, endpoint.memory.state
            start_deregistering(loop, domain, region.close, self._finish, blocks=blocks)

    def _finish(self, error: BaseException | None) -> None:
        if isinstance(error, Exception):
            self._error = self._error or detached(error)
            self._endpoint.fail(error)
        held, self._held = self._held, None
        if held is not None:
            held._release()
        self._leave()
        self._ended.set()

    async def until(self, counter: Counter, count: int) -> None:
        """Wait until the peer has notified so often, as `Counter.wait` does. If the wait does not
        come about, because it was cancelled, timed out or failed, the access ends first: the peer
        writes nothing more into memory that the program goes on to use.

        Args:
            counter: a counter of this connection.
            count: as of `Counter.wait`.

        Raises:
            as `Counter.wait`.
            TypeError, ValueError: `counter` is no Counter, or of another connection; nothing was
                done.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child;
                nothing was done.

        Cancellation: the access ends, and the call returns once it has ended.
        """
        instance(counter, "counter", Counter, "until")
        if counter._endpoint is not self._endpoint:
            raise ValueError(f"until(): counter={counter!r}: it is of another connection")
        self._endpoint.require_same_process()
        self._endpoint.require_own_loop()
        try:
            await counter.wait(count)
        except BaseException:
            self._start_ending()
            await outwait(self._ended)
            raise

    async def ended(self) -> None:
        """Wait until the access has ended: by the end of the block, by `expires`, or by the end of
        the connection.

        Raises:
            VerbsCallError: the driver refused to end the access. The connection is ended for that.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: has no effect on the grant.
        """
        self._endpoint.require_same_process()
        if not self._ended.is_set():
            self._endpoint.require_own_loop()
        await self._ended.wait()
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise detached(self._error)

    async def aclose(self) -> None:
        """End the access, and wait until it has ended. Idempotent.

        The peer's requests that the device has executed before remain executed. A later request of
        the peer's fails, and ends the connection, as RDMA requires: so let the peer report first
        that it is done, if the connection is to continue.

        Raises:
            VerbsCallError: the driver refused to end the access. The connection is ended for that.
            EventLoopError: called outside of its event loop; nothing was done.

        Cancellation: the access still ends, and the call returns once it has ended.

        See: man ibv_dealloc_mw, ibv_dereg_mr.
        """
        if self._endpoint.is_inherited:
            return  # the grant belongs to the parent process
        if not self._ended.is_set():
            self._endpoint.require_own_loop()
        self._start_ending()
        await outwait(self._ended)
        self._raise_error()


def _size_of(memory: Buffer) -> tuple[int, bool]:
    """Return the length of a buffer, and whether it is read-only. No view of it remains: it would
    keep the buffer's size as long as a traceback of the caller exists."""
    view = flat_view(memory, "grant(): memory")
    return view.nbytes, view.readonly


async def open_grant(
    endpoint: Endpoint,
    path: GeneralPath,
    memory: LocalMemory,
    access: Access,
    expires: float | None,
) -> Grant:
    """Give the peer access. See `Connection.grant`."""
    if isinstance(access, bool) or not isinstance(access, int):
        raise wrong_type(access, "access", "Access flags", "grant")
    if not access or int(access) & ~int(REMOTE_ACCESS):
        raise ValueError(
            f"grant(): access={names_of(Access(access))}: a grant gives REMOTE_READ, "
            "REMOTE_WRITE, REMOTE_ATOMIC"
        )
    if expires is not None:
        expires = seconds(expires, "expires", "grant")
        if expires <= 0:
            raise ValueError(f"grant(): expires={expires}: expected more than 0 seconds, or None")
        if expires == math.inf:
            expires = None
    endpoint.require_sendable()
    if isinstance(memory, MemoryRegion):
        memory = memory[:]
    if isinstance(memory, MemorySlice):
        memory.region._require_open()
        length = memory.length
        if memory.region.domain is not endpoint.memory.domain:
            raise wrong_domain(memory.region, endpoint.memory.domain)
        readonly = memory._is_accessible and memory.region.view.readonly
    else:
        length, readonly = _size_of(memory)
    if not length:
        raise ValueError("grant(): memory: no bytes: give at least one")
    if readonly and access & REMOTE_WRITING:
        raise TypeError(
            f"grant(): memory={shown(memory)}: it is read-only, and "
            f"access={names_of(Access(access))} lets the peer write to it: give a bytearray, or "
            "another writable buffer"
        )
    grant = Grant(endpoint, memory, length, Access(access))
    # A domain cannot be freed while a grant that fails still holds memory in it.
    with kept_open(endpoint.memory.state) as leave:
        await grant._open(path, expires, leave)
    return grant
