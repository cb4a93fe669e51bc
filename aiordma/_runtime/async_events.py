"""Asynchronous events of a context that event loops share.

librdmacm opens each device once for the whole process: one context, one descriptor, and each event
of it can be taken once, by whichever loop wakes first. That one copies it to every hub of the
context, on the hub's own loop.
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
    """One hub's wish to hear the events of a context; `leave` ends it, in any thread."""

    def __init__(self, router: "AsyncEventRouter", loop: EventLoop, handler: Handler) -> None:
        self.router = router
        self.loop = loop
        self.handler = handler
        self.left: bool = False

    def tell(self, event: AsyncEvent) -> None:
        """Call the handler on its loop, in the order of the calls here."""
        self.loop.call_from_thread(lambda: None if self.left else self.handler(event))

    def leave(self) -> None:
        """Hear nothing any more; also not what is on its way. Idempotent."""
        self.left = True
        self.router.forget(self)


class AsyncEventRouter:
    """See the module. One for each context that anybody listens to; get it by `join_router`."""

    def __init__(self, context: Context) -> None:
        self._provider = context.provider
        self._pointer = context.pointer
        # Weakly, by age: a subscriber that was never closed is collected with its event loop.
        self._subscriptions: WeakValueDictionary[int, Subscription] = WeakValueDictionary()
        self._numbers = count()
        # Taking and telling are one step, so that every loop hears the same order.
        self._telling = Lock()

    def read(self) -> None:
        """Take the events that wait, and tell them. Called by whoever finds the descriptor
        readable; never blocks but for another thread that does the same.

        Raises:
            VerbsCallError: the device is gone, and there are no more events.
        """
        with self._telling:
            while (event := take_async_event(self._provider, self._pointer)) is not None:
                self._tell(event)

    def deliver(self, event: AsyncEvent) -> None:
        """Tell every subscriber."""
        with self._telling:
            self._tell(event)

    def _tell(self, event: AsyncEvent) -> None:
        for subscription in list(self._subscriptions.values()):
            subscription.tell(event)

    def add(self, subscription: Subscription) -> None:
        """Tell this one as well."""
        self._subscriptions[next(self._numbers)] = subscription

    def forget(self, subscription: Subscription) -> None:
        """Tell it nothing any more; the last one's router is forgotten too."""
        with _lock:
            for number, known in list(self._subscriptions.items()):
                if known is subscription:
                    del self._subscriptions[number]
            if not self._subscriptions:
                for key in [key for key, router in _routers.items() if router is self]:
                    del _routers[key]


_lock = Lock()
_routers: dict[tuple[int, int], AsyncEventRouter] = {}
"""By process, since a child inherits its parent's, and the context's address."""


def join_router(context: Context, loop: EventLoop, handler: Handler) -> Subscription:
    """Have every event of the context handled on the loop from now on, whoever reads it."""
    key = here.pid, int(ffi.cast("uintptr_t", context.pointer))
    with _lock:
        router = _routers.get(key)
        if router is None:
            router = _routers[key] = AsyncEventRouter(context)
        subscription = Subscription(router, loop, handler)
        router.add(subscription)
    return subscription
