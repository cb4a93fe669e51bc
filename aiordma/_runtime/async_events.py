"""Asynchronous events of a context that several event loops share.

librdmacm opens each device once per process, so all loops share its context and descriptor, and
each event can be taken only once. The first loop that wakes takes the event, and copies it to every
hub of the context, on the hub's own loop.
"""

from collections.abc import Callable

from aiordma._base.process import here, reentrant_lock
from aiordma._base.weak_items import WeakItems
from aiordma._loop.event_loop import EventLoop
from aiordma._native import ffi
from aiordma.verbs import AsyncEvent, Context
from aiordma.verbs.async_event import take_async_event

Handler = Callable[[AsyncEvent], None]


class Subscription:
    """A hub's subscription to the events of a context. `leave` ends it, in any thread."""

    def __init__(self, router: "AsyncEventRouter", loop: EventLoop, handler: Handler) -> None:
        self.router = router
        self.loop = loop
        self.handler = handler
        self.left: bool = False

    def tell(self, event: AsyncEvent) -> None:
        """Schedule the handler on its loop. Handlers run in the order of these calls."""
        self.loop.call_from_thread(lambda: None if self.left else self.handler(event))

    def leave(self) -> None:
        """End the subscription, and drop the events that are already scheduled. Idempotent."""
        self.left = True
        self.router.forget(self)


class AsyncEventRouter:
    """Copies the events of a context to all subscriptions. `join_router` returns the context's
    router."""

    def __init__(self, context: Context, key: "_Key") -> None:
        self._provider = context.provider
        self._pointer = context.pointer
        self._key = key
        # Weakly: a subscription that never ended is collected with its event loop.
        self._subscriptions: WeakItems[Subscription] = WeakItems()
        # Held while events are taken and copied, so that every loop gets the same order.
        self._delivering = reentrant_lock()
        self._is_reading = False

    def read(self) -> None:
        """Take the pending events, and copy them to all subscriptions. Every hub calls this when
        the descriptor is readable. It waits only for another thread that does the same. In a forked
        child it takes nothing: the events are the parent's.

        Raises:
            VerbsCallError: the device was removed, and there are no more events.
        """
        with self._delivering:
            if self._is_reading or self._key[0] != here.pid:
                return  # in a finalizer, within a call that takes what is pending
            self._is_reading = True
            try:
                while (event := take_async_event(self._provider, self._pointer)) is not None:
                    self._copy(event)
            finally:
                self._is_reading = False

    def deliver(self, event: AsyncEvent) -> None:
        """Copy an event to all subscriptions."""
        with self._delivering:
            self._copy(event)

    def _copy(self, event: AsyncEvent) -> None:
        for subscription in self._subscriptions.alive():
            subscription.tell(event)

    def add(self, subscription: Subscription) -> None:
        """Add a subscription."""
        self._subscriptions.add(subscription)

    def forget(self, subscription: Subscription) -> None:
        """Remove a subscription. The last one also removes the router."""
        with _lock:
            self._subscriptions.discard(subscription)
            if not self._subscriptions.alive() and _routers.get(self._key) is self:
                del _routers[self._key]


_Key = tuple[int, int]
"""The process, because a forked child inherits its parent's routers, and the context's address."""

_lock = reentrant_lock()
_routers: dict[_Key, AsyncEventRouter] = {}


def join_router(context: Context, loop: EventLoop, handler: Handler) -> Subscription:
    """Call the handler on the loop for every event of the context, in whichever loop it is
    taken."""
    key = here.pid, int(ffi.cast("uintptr_t", context.pointer))
    with _lock:
        router = _routers.get(key)
        if router is None:
            router = AsyncEventRouter(context, key)
        subscription = Subscription(router, loop, handler)
        router.add(subscription)
        _routers[key] = router  # only now: a finalizer may have removed the last one before
    return subscription
