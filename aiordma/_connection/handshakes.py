"""The concurrent handshakes of a listener: a peer that does not finish its handshake does not delay
other peers.

Each handshake runs in a task of the listener, because it can outlast the call that began it: that
call may be cancelled, or return another peer. The next call returns a connection that is
established then. When the listener is closed, it ends all handshakes, and waits for their end.

A task whose handshake has ended waits for the next one. So that one begins in the turn of the event
loop that has its request, without another task.
"""

import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

from aiordma._base.errors import cause_text
from aiordma._base.fair_queue import FairQueue
from aiordma._base.origin import origin
from aiordma._base.socket_address import address_text
from aiordma._connection.connection import Connection
from aiordma._connection.incoming import IncomingRequest
from aiordma._loop.event_loop import EventLoop, Timer, Waiter

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


MOST_IDLE = 16
"""Tasks that wait for their next handshake."""

Establish: TypeAlias = Callable[[IncomingRequest, bytes], Awaitable[Connection]]
"""Answers a request, with private data, and returns the established connection."""


class _Caller:
    """A call that waits for a connection, or takes all of them."""

    def __init__(self, private_data: bytes, waiter: Waiter, take: "Take | None" = None) -> None:
        self.private_data = private_data
        self.waiter = waiter
        self.take = take
        self.origin = origin()
        self.result: Acceptance | None = None


class Acceptance:
    """The handshake of one peer, until its connection is returned or its error is raised."""

    def __init__(self, request: IncomingRequest, private_data: bytes) -> None:
        self.request = request
        self.private_data = private_data
        self.looks = 0
        self.waits = 0  # looks at which it waited for the peer
        self.was_ended = False  # by the listener
        self.connection: Connection | None = None
        self.error: Exception | None = None

    @property
    def peer(self) -> str:
        """The peer's address, as in messages."""
        return address_text(self.request.peer_address)

    @property
    def is_slow(self) -> bool:
        """Whether another may begin beside it."""
        return self.looks >= SLOW_LOOKS

    @property
    def has_slow_peer(self) -> bool:
        """Whether it may give way to another peer. The peer's last event may be pending now: it was
        slow at the last look, and is waited for now."""
        return self.waits >= SLOW_LOOKS and self.request.waits_for_peer

    def take(self) -> Connection:
        """Return the connection, or raise the error. Call this once."""
        connection, error = self.connection, self.error
        self.connection = self.error = None
        try:
            if error is not None:
                raise error
            assert connection is not None
            return connection
        finally:
            del error  # its traceback holds this frame


Take: TypeAlias = Callable[[Acceptance], object]
"""Takes each handshake that has ended, in place of a call that waits for one."""


class Handshakes:
    """See the module.

    Args:
        loop: the listener's event loop.
        requests: the requests that wait to be accepted.
        establish: answers one of them.
        after_events: calls a function once the pending CM events have been delivered.
        on_leave: called when the listener ends a handshake.
        on_left: called once for each call of `on_leave`, when that handshake has released
            everything.
    """

    def __init__(
        self,
        loop: EventLoop,
        requests: FairQueue[IncomingRequest],
        establish: Establish,
        after_events: Callable[[Callable[[], None]], None],
        on_leave: Callable[[], None],
        on_left: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._requests = requests
        self._establish = establish
        self._after_events = after_events
        self._on_leave = on_leave
        self._on_left = on_left
        self._running: FairQueue[Acceptance] = FairQueue()
        self._finished: deque[Acceptance] = deque()
        self._callers: deque[_Caller] = deque()
        self._takers: list[_Caller] = []  # those callers that take all
        self._begun: deque[Acceptance] = deque()  # for the tasks
        self._idle: list[Waiter] = []  # of tasks
        self._is_closed = False
        self._timer: Timer | None = None
        self._counting = False  # once the pending CM events have been delivered

    async def accept(self, private_data: bytes, take: Take | None = None) -> Acceptance | None:
        """Return the first handshake that has ended, to be taken; None after `release`. With
        `take`, the handshakes of all peers that wait are begun: call it with each that has ended,
        and return only one for which it has raised an error.

        Cancellation: handshakes in progress continue, for the next call.
        """
        self._end_others(private_data)
        caller = _Caller(private_data, self._loop.waiter(), take)
        self._callers.append(caller)
        if take is not None:
            self._takers.append(caller)
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
        finally:
            if take is not None:
                self._takers.remove(caller)
        return caller.result

    def advance(self) -> None:
        """Pass finished handshakes to waiting calls, and begin new ones. Call this after every
        change."""
        if self._finished:
            self._hand_over()
        must_look = not self._takers
        while self._callers and self._requests:
            caller = self._next_caller()
            if caller is None or not self._make_room():
                must_look = True
                break
            self._begin(caller)
        if must_look:
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
        while self._idle:
            self._idle.pop().wake()
        self.release()

    # -- beginning handshakes -----------------------------------------------------------------

    def _next_caller(self) -> _Caller | None:
        """Return the call that the next handshake is for, if one may begin. For each call there is
        one handshake that is not slow, and one more for each slow handshake. So the number of
        handshakes doubles while all are slow. For one that takes all, there is no such limit."""
        taker = self._takers[0] if self._takers else None
        if taker is not None:
            for caller in self._callers:
                if caller.private_data:
                    break
            else:
                return taker
        wanted = Counter(caller.private_data for caller in self._callers)
        for handshake in self._running:
            if handshake.private_data in wanted:
                wanted[handshake.private_data] += 1 if handshake.is_slow else -1
        return next((each for each in self._callers if wanted[each.private_data] > 0), taker)

    def _make_room(self) -> bool:
        """Return whether one more handshake may begin. If there are too many, one of a slow peer is
        ended for it."""
        if len(self._running) < MOST_HANDSHAKES:
            return True
        victim = self._running.greediest(lambda each: each.has_slow_peer)
        if victim is None:
            return False
        peer = victim.peer
        text = "%s did not finish its handshake, and gave way to another peer"
        logger.info(text, peer, extra={"peer": peer})
        self._end(victim)
        return True

    def _begin(self, caller: _Caller) -> None:
        request, source = self._requests.popleft()
        request.origin = caller.origin or request.origin
        handshake = Acceptance(request, caller.private_data)
        self._running.append(handshake, source)
        self._begun.append(handshake)
        self._wake_task()

    def _wake_task(self) -> None:
        if self._idle:
            self._idle.pop().wake()
        else:
            self._loop.spawn(self._run, "aiordma: handshakes")

    def _look_later(self) -> None:
        """Look at the handshakes in progress, after a while, if it can matter: a request and a call
        wait for room, or for a handshake that is not slow yet."""
        count = len(self._running)
        if self._timer is not None or not count:
            return
        if count >= MOST_HANDSHAKES:
            matters = bool(self._requests and self._callers)
        else:
            matters = not self._takers and not all(each.is_slow for each in self._running)
        if matters:
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
            handshake.waits += handshake.request.waits_for_peer

    # -- ending handshakes --------------------------------------------------------------------

    async def _run(self) -> None:
        """Run one handshake, and then each for which `_wake_task` wakes this task."""
        while self._begun:
            handshake = self._begun.popleft()
            if not handshake.was_ended:
                try:
                    answer = self._establish(handshake.request, handshake.private_data)
                    handshake.connection = await answer
                except Exception as error:
                    handshake.error = error
                finally:
                    self._call_returned(handshake)
            del handshake  # it refers to what its connection was
            if self._is_closed or len(self._idle) == MOST_IDLE:
                return
            waiter = self._loop.waiter()
            self._idle.append(waiter)
            try:
                await waiter.wait()
            except BaseException:
                if waiter in self._idle:
                    self._idle.remove(waiter)
                elif self._begun:
                    self._wake_task()
                raise

    def _call_returned(self, handshake: Acceptance) -> None:
        if handshake.was_ended:
            self._on_left()
        else:
            self._forget(handshake)
            if handshake.connection is not None or handshake.error is not None:
                self._finished.append(handshake)
                self.advance()

    def _hand_over(self) -> None:
        for handshake in list(self._finished):
            if handshake not in self._finished:
                continue  # taken by an eager task of `take`
            for caller in self._callers:
                if caller.private_data == handshake.private_data:
                    self._finished.remove(handshake)
                    self._callers.remove(caller)
                    if caller.take is not None:
                        self._callers.append(caller)
                        try:
                            caller.take(handshake)
                            break
                        except Exception:
                            self._callers.remove(caller)  # it tries again, and raises the error
                    caller.result = handshake
                    caller.waiter.wake()
                    break
            else:
                if handshake.error is not None:
                    self._finished.remove(handshake)
                    peer, text = handshake.peer, cause_text(handshake.error)
                    logger.info("%s was not accepted: %s", peer, text, extra={"peer": peer})

    def _end_others(self, private_data: bytes) -> None:
        """End the handshakes that no call can return, because a call returns only a peer that was
        sent the call's private data."""
        if not self._running and not self._finished:
            return
        kept = {private_data, *(caller.private_data for caller in self._callers)}
        for handshake in [*self._running, *self._finished]:
            if handshake.private_data not in kept:
                self._end(handshake)

    def _forget(self, handshake: Acceptance) -> None:
        if handshake in self._running:
            self._running.remove(handshake)
        if handshake in self._finished:
            self._finished.remove(handshake)
        if self._timer is not None and not self._running:
            self._timer.cancel()
            self._timer = None

    def _end(self, handshake: Acceptance) -> None:
        if not handshake.was_ended:
            handshake.was_ended = True
            self._on_leave()
        request, connection = handshake.request, handshake.connection
        if not request.was_answered:
            request.start_rejecting(self._on_left)  # its task has not begun, and may never begin
        else:
            request.abandon()
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
