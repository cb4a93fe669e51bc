"""Asynchronous events of a context that several event loops share.

librdmacm opens each device once per process, so all loops share its context and descriptor, and
each event can be taken only once. The first loop that wakes takes the event, and copies it to every
hub of the context, on the hub's own loop.
"""

from collections.abc import Callable
from itertools import count
from threading import Lock
from weakref import WeakValueDictionary

from aiordma._base.process import here
from aiordma._loop.event_loop import EventLoop
from aiordma._native import ffi
from aiordma.verbs import AsyncEvent, Context
from aiordma.verbs.async_event import take_async_event

__all__ = ("AsyncEventRouter", "Subscription", "join_router")

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

    def __init__(self, context: Context) -> None:
        self._provider = context.provider
        self._pointer = context.pointer
        # Weak references, in order of age: a subscription that never ended is collected with its
        # event loop.
        self._subscriptions: WeakValueDictionary[int, Subscription] = WeakValueDictionary()
        self._numbers = count()
        # Held while events are taken and copied, so that every loop gets the same order.
        self._delivering = Lock()

    def read(self) -> None:
        """Take the pending events, and copy them to all subscriptions. Every hub calls this when
        the descriptor is readable. It waits only for another thread that does the same.

        Raises:
            VerbsCallError: the device was removed, and there are no more events.
        """
        with self._delivering:
            while (event := take_async_event(self._provider, self._pointer)) is not None:
                self._copy(event)

    def deliver(self, event: AsyncEvent) -> None:
        """Copy an event to all subscriptions."""
        with self._delivering:
            self._copy(event)

    def _copy(self, event: AsyncEvent) -> None:
        for subscription in list(self._subscriptions.values()):
            subscription.tell(event)

    def add(self, subscription: Subscription) -> None:
        """Add a subscription."""
        self._subscriptions[next(self._numbers)] = subscription

    def forget(self, subscription: Subscription) -> None:
        """Remove a subscription. The last one also removes the router."""
        with _lock:
            for number, known in list(self._subscriptions.items()):
                if known is subscription:
                    del self._subscriptions[number]
            if not self._subscriptions:
                for key in [key for key, router in _routers.items() if router is self]:
                    del _routers[key]


_lock = Lock()
_routers: dict[tuple[int, int], AsyncEventRouter] = {}
"""The routers by process, because a forked child inherits its parent's, and by the context's
address."""


def join_router(context: Context, loop: EventLoop, handler: Handler) -> Subscription:
    """Call the handler on the loop for every event of the context, in whichever loop it is
    taken."""
    key = here.pid, int(ffi.cast("uintptr_t", context.pointer))
    with _lock:
        router = _routers.get(key)
        if router is None:
            router = _routers[key] = AsyncEventRouter(context)
        subscription = Subscription(router, loop, handler)
        router.add(subscription)
    return subscription
