"""The concurrent handshakes of a listener's `accept()`, and the bound of those of `serve()`: a peer
that does not finish its handshake does not delay other peers.

Each handshake of `accept` runs in a task of the listener, because it can outlast the call that
began it: that call may be cancelled, or return another peer. The next call returns a connection
that is established then. When the listener is closed, it ends all handshakes, and waits for their
end.
"""

import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from functools import partial

import anyio

from aiordma._base.errors import ClosedError, cause_text
from aiordma._base.fair_queue import FairQueue, source_of
from aiordma._base.opening import opens
from aiordma._base.origin import origin
from aiordma._base.socket_address import SocketAddress, address_text
from aiordma._connection.connection import Connection
from aiordma._connection.connection_request import ConnectionRequest
from aiordma._loop.event_loop import EventLoop, Timer, Waiter
from aiordma._loop.threads import Once, outwait

__all__ = ("Acceptance", "Handshakes", "ServedHandshakes")

logger: logging.Logger = logging.getLogger("aiordma")

LOOK_SECONDS = 0.005
SLOW_LOOKS = 20
"""A handshake counts as slow, so that `accept` begins another, after so many looks at it, each in a
later turn of the event loop and so many seconds later. Time alone would count the peers of a busy
loop as slow, which finish within a few of its turns, however long these take.

The peer counts as slow, so that it may give way to another, after so many looks at which the
handshake waited for the peer, and not for this side's worker threads. Each look comes after the
delivery of the pending CM events, which destroying calls of this side can hold up."""

MOST_HANDSHAKES = 128
"""The maximum number of handshakes in progress. To begin one more, that of a slow peer is ended."""


class _Waits:
    """Counts the looks at a handshake at which it waited for the peer."""

    def __init__(self, request: ConnectionRequest) -> None:
        self._request = request
        self._count = 0
        self._were_too_many = False

    def count(self) -> None:
        """Count a look. Call this once the pending CM events have been delivered."""
        self._count += self._request._waits_for_peer
        self._were_too_many = self._count >= SLOW_LOOKS

    @property
    def are_too_many(self) -> bool:
        """Whether the peer is slow. It was at the last look: its last event may be pending now."""
        return self._were_too_many and self._request._waits_for_peer


class ServedHandshakes:
    """The handshakes that `serve` has in progress, each in its own task. If there are too many, the
    oldest of a slow peer of the address with the most is ended.

    Args:
        after_events: calls a function once the pending CM events have been delivered.
    """

    def __init__(self, after_events: Callable[[Callable[[], None]], None]) -> None:
        self._after_events = after_events
        self._running: FairQueue[ConnectionRequest] = FairQueue()
        self._waits: dict[ConnectionRequest, _Waits] = {}
        self._ended: anyio.Event | None = None  # if a task waits

    def __len__(self) -> int:
        return len(self._running)

    async def room(self) -> None:
        """Wait until one more handshake may begin: there are few, or `begin` ends one."""
        while len(self._running) >= MOST_HANDSHAKES and self._victim() is None:
            self._ended = anyio.Event()
            with anyio.move_on_after(LOOK_SECONDS) as look:
                await self._ended.wait()
            if look.cancelled_caught:
                looked = anyio.Event()
                self._after_events(partial(self._look, looked))
                await looked.wait()

    def begin(self, request: ConnectionRequest) -> None:
        """Count a handshake, until `end`."""
        victim = self._victim() if len(self._running) >= MOST_HANDSHAKES else None
        if victim is not None:
            _log_victim(victim)
            self.end(victim)
            victim._abandon()
        self._running.append(request, source_of(request.peer_address))
        self._waits[request] = _Waits(request)

    def end(self, request: ConnectionRequest) -> None:
        """Count a handshake no longer. Idempotent."""
        if request in self._running:
            self._running.remove(request)
            del self._waits[request]
            if self._ended is not None:
                self._ended.set()

    def _look(self, looked: anyio.Event) -> None:
        for waits in self._waits.values():
            waits.count()
        looked.set()

    def _victim(self) -> ConnectionRequest | None:
        return self._running.greediest(lambda each: self._waits[each].are_too_many)


def _log_victim(request: ConnectionRequest) -> None:
    peer = address_text(request.peer_address)
    logger.info(
        "%s did not finish its handshake, and gave way to another peer", peer, extra={"peer": peer}
    )


class _Caller:
    """A call that waits for a connection."""

    def __init__(self, private_data: bytes, waiter: Waiter) -> None:
        self.private_data = private_data
        self.waiter = waiter
        self.origin = origin()
        self.result: Acceptance | None = None


class Acceptance:
    """The handshake of one peer, until its connection is returned or its error is raised."""

    def __init__(self, loop: EventLoop, request: ConnectionRequest, private_data: bytes) -> None:
        self.request = request
        self.private_data = private_data
        self.looks = 0
        self.waits = _Waits(request)
        self.is_adopted = False
        self.was_ended = False  # by the listener
        self.returned = Once(loop)
        self.connection: Connection | None = None
        self.error: Exception | None = None

    @property
    def peer_address(self) -> SocketAddress | None:
        """The peer's (host, port)."""
        return self.request.peer_address

    @property
    def is_slow(self) -> bool:
        """Whether another may begin beside it."""
        return self.looks >= SLOW_LOOKS

    @opens
    async def accept(self) -> Connection:
        """Wait until the connection is established, and return it. For an adopted handshake, once.

        Raises:
            RdmaConnectionError: the peer has withdrawn, or did not finish in time.

        Cancellation: the peer is disconnected, and nothing is left.
        """
        try:
            await self.returned.wait()
        except BaseException:
            self.request._abandon()
            await outwait(self.returned)
            if self.connection is not None:
                await self.connection.aclose()
            raise
        return self.take()

    def take(self) -> Connection:
        """Return the connection, or raise the error. Call this once."""
        connection, error = self.connection, self.error
        self.connection = self.error = None
        try:
            if error is not None:
                raise error
            if connection is None:
                raise ClosedError(f"accept {address_text(self.peer_address)}: it was cancelled")
            return connection
        finally:
            del error  # its traceback holds this frame


async def _accept(request: ConnectionRequest, private_data: bytes) -> Connection:
    return await request.accept(private_data=private_data)


class Handshakes:
    """See the module.

    Args:
        loop: the listener's event loop.
        requests: the requests that wait to be accepted.
        after_events: calls a function once the pending CM events have been delivered.
        on_leave: called when the listener ends a handshake.
        on_left: called once for each call of `on_leave`, when that handshake has released
            everything.
    """

    def __init__(
        self,
        loop: EventLoop,
        requests: FairQueue[ConnectionRequest],
        after_events: Callable[[Callable[[], None]], None],
        on_leave: Callable[[], None],
        on_left: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._requests = requests
        self._after_events = after_events
        self._on_leave = on_leave
        self._on_left = on_left
        self._running: FairQueue[Acceptance] = FairQueue()
        self._finished: deque[Acceptance] = deque()
        self._callers: deque[_Caller] = deque()
        self._is_closed = False
        self._timer: Timer | None = None
        self._counting = False  # once the pending CM events have been delivered
        self.takes_all = False
        """Whether the calls of `accept` take all peers, so that handshakes are begun for all that
        wait, as `serve` of a listener does."""
        self.establish: Callable[[ConnectionRequest, bytes], Awaitable[Connection]] = _accept
        """Answers a request, and returns the established connection."""

    def __len__(self) -> int:
        return len(self._running) + len(self._finished)

    async def accept(self, private_data: bytes) -> Connection | None:
        """Return the connection of the first peer that is established; None after `release`.

        Raises:
            RdmaConnectionError: as of ConnectionRequest.accept.

        Cancellation: handshakes in progress continue, for the next call.
        """
        self._end_others(private_data)
        caller = _Caller(private_data, self._loop.waiter())
        self._callers.append(caller)
        try:
            self.advance()
            await caller.waiter.wait()
        except BaseException:
            if caller in self._callers:
                self._callers.remove(caller)
            elif caller.result is not None:
                self._finished.appendleft(caller.result)
                self.advance()
                if self._is_closed:
                    self.close()  # it was not there to be closed
            raise
        return None if caller.result is None else caller.result.take()

    def advance(self) -> None:
        """Pass finished handshakes to waiting calls, and begin new ones. Call this after every
        change."""
        if self._finished:
            self._hand_over()
        while self._callers and self._requests and self._has_room():
            caller = self._next_caller()
            if caller is None:
                break
            self._begin(self._requests.popleft(), caller)
        if self._running:
            self._look_later()

    def release(self) -> None:
        """Let every waiting `accept` return None."""
        while self._callers:
            self._callers.popleft().waiter.wake()

    def close(self) -> None:
        """End every handshake, and close connections that no call has returned, in the
        background."""
        self._is_closed = True
        for handshake in [*self._running, *self._finished]:
            self._end(handshake)
        self.release()

    def adopt(self) -> list[Acceptance]:
        """Return the handshakes that earlier calls left, in progress or finished; none while a call
        waits. They then belong to the caller, which accepts each."""
        adopted = [] if self._callers else [*self._running, *self._finished]
        for handshake in adopted:
            handshake.is_adopted = True
            self._forget(handshake)
        return adopted

    # -- beginning handshakes -----------------------------------------------------------------

    def _next_caller(self) -> _Caller | None:
        """Return the call that the next handshake is for, if one may begin. For each call there is
        one handshake that is not slow, and one more for each slow handshake. So the number of
        handshakes doubles while all are slow. With `takes_all`, there is no such limit."""
        if self.takes_all and self._callers:
            return self._callers[0]
        wanted = Counter(caller.private_data for caller in self._callers)
        for handshake in self._running:
            if handshake.private_data in wanted:
                wanted[handshake.private_data] += 1 if handshake.is_slow else -1
        return next((each for each in self._callers if wanted[each.private_data] > 0), None)

    def _has_room(self) -> bool:
        return len(self._running) < MOST_HANDSHAKES or self._victim() is not None

    def _victim(self) -> Acceptance | None:
        return self._running.greediest(lambda each: each.waits.are_too_many)

    def _begin(self, request: ConnectionRequest, caller: _Caller) -> None:
        victim = self._victim() if len(self._running) >= MOST_HANDSHAKES else None
        if victim is not None:
            _log_victim(victim.request)
            self._end(victim)
        request._origin = caller.origin or request._origin
        handshake = Acceptance(self._loop, request, caller.private_data)
        self._running.append(handshake, source_of(request.peer_address))
        self._loop.spawn(partial(self._run, handshake), "aiordma: a handshake")

    def _look_later(self) -> None:
        """Look at the handshakes in progress, after a while, if it can matter: one of them is not
        slow yet, or a request and a call wait for room."""
        if self._timer is not None:
            return
        is_full = len(self._running) >= MOST_HANDSHAKES
        if (is_full and self._requests and self._callers) or any(
            not handshake.is_slow for handshake in self._running
        ):
            self._timer = self._loop.call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._timer = None
        for handshake in self._running:
            handshake.looks += 1
        if not self._counting:
            self._counting = True
            self._after_events(self._count_waits)
        self.advance()

    def _count_waits(self) -> None:
        self._counting = False
        for handshake in self._running:
            handshake.waits.count()

    # -- ending handshakes --------------------------------------------------------------------

    async def _run(self, handshake: Acceptance) -> None:
        if handshake.was_ended:
            return
        try:
            answer = self.establish(handshake.request, handshake.private_data)
            handshake.connection = await answer
        except Exception as error:
            handshake.error = error
        finally:
            handshake.returned.set()
            self._call_returned(handshake)

    def _call_returned(self, handshake: Acceptance) -> None:
        if handshake.was_ended:
            self._on_left()
        elif not handshake.is_adopted:
            self._forget(handshake)
            if handshake.connection is not None or handshake.error is not None:
                self._finished.append(handshake)
                self.advance()

    def _hand_over(self) -> None:
        for handshake in list(self._finished):
            data = handshake.private_data
            caller = next((each for each in self._callers if each.private_data == data), None)
            if caller is not None:
                self._finished.remove(handshake)
                self._callers.remove(caller)
                caller.result = handshake
                caller.waiter.wake()
            elif handshake.error is not None:
                self._finished.remove(handshake)
                peer, text = address_text(handshake.peer_address), cause_text(handshake.error)
                logger.info("%s was not accepted: %s", peer, text, extra={"peer": peer})

    def _end_others(self, private_data: bytes) -> None:
        """End the handshakes that no call can return, because a call returns only a peer that was
        sent the call's private data."""
        kept = {private_data, *(caller.private_data for caller in self._callers)}
        for handshake in [*self._running, *self._finished]:
            if handshake.private_data not in kept:
                self._end(handshake)

    def _forget(self, handshake: Acceptance) -> None:
        if handshake in self._running:
            self._running.remove(handshake)
        if handshake in self._finished:
            self._finished.remove(handshake)
        if not self._running and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self, handshake: Acceptance) -> None:
        if not handshake.was_ended:
            handshake.was_ended = True
            self._on_leave()
        request, connection = handshake.request, handshake.connection
        if not request.was_answered:
            request._start_rejecting(self._on_left)  # its task has not begun, and may never begin
        else:
            request._abandon()
            if self._loop.has_ended:
                self._on_left()  # no task continues, and the connection is closed
            elif connection is not None:
                self._loop.spawn(partial(self._close, connection), "aiordma: closing a connection")
        self._forget(handshake)

    async def _close(self, connection: Connection) -> None:
        try:
            await connection.aclose()
        finally:
            self._on_left()
