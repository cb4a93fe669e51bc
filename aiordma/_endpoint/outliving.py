"""What the device may still use, because the driver refuses to destroy a queue pair or a shared
receive queue: the memory of its requests, and its entries of a completion queue."""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from aiordma._base.errors import BusyError, VerbsCallError, detached
from aiordma._endpoint.domain_state import DomainState
from aiordma._loop.event_loop import EventLoop
from aiordma._requests.pool import BufferPool
from aiordma._requests.request import WorkRequest, fail_all
from aiordma._runtime.reactor import Reactor
from aiordma.verbs import Resource
from aiordma.verbs.memory import OUTLIVING

__all__ = ("Outliving",)


_TURN_SECONDS = 0.01
_TURNS = 2000
"""How often an attempt looks whether another thread's has ended. rxe can take 12 s."""


class Outliving:
    """See the module. Each endpoint and each shared receive queue has one.

    Usually the driver destroys the object, and this does nothing. If it refuses, the requests still
    end, with an error, but their memory is kept until the driver has destroyed the object. Closing
    the owner again tries that again, and so do the end of its protection domain and of the device.

    Args:
        loop, reactor, domain: the owner's; None: the domain is the loop's own.
        pool: that of the blocks that its requests use.
    """

    def __init__(
        self, loop: EventLoop, reactor: Reactor, domain: DomainState | None, pool: BufferPool
    ) -> None:
        self.exists: bool = False
        """Whether there is an object in the device."""
        self._loop = loop
        self._reactor = reactor
        self._domain = domain
        self._pool = pool
        self._refusal: BaseException | None = None
        self._requests: dict[WorkRequest, None] = {}
        self._later: list[Callable[[], object]] = []
        self._is_left = False

    def _may_release(self) -> bool:
        """Whether nothing on the loop's thread uses the memory's pool any more, so that memory may
        be released in another thread."""
        is_closing = self._domain is not None and self._domain.life.is_closing
        return is_closing or self._reactor.ended or self._loop.has_ended

    def watch(self, raw: Resource) -> None:
        """Begin with a new object of the device."""
        self.exists = True
        raw._on_destroyed = self._destroyed

    def attempt(self, destroy: Callable[[], object]) -> None:
        """Call the function that destroys the object, in a worker thread, and keep its error."""
        self._refusal = None
        try:
            destroy()
            for _ in range(_TURNS):
                if not self.exists:
                    return
                time.sleep(_TURN_SECONDS)  # another thread is destroying it, and may be refused
                destroy()
            raise BusyError("another thread has been destroying this object for long")
        except BaseException as error:
            self._refusal = detached(error)
            raise

    def _destroyed(self) -> None:
        """Release everything, in any thread, if the owner has left it here."""
        self.exists = False
        if not self._is_left:
            return  # the owner is waiting for its own attempt, and calls `settle`
        if self._may_release():
            self._release()
        else:
            self._loop.call_from_thread(self._release)

    def fail(
        self, requests: Iterable[WorkRequest], explain: Callable[[WorkRequest], Exception]
    ) -> None:
        """End requests without completions, after an attempt to destroy the object."""
        requests = list(requests)
        if self.exists:
            OUTLIVING[self] = self  # the requests hold their owner, and with it the object
            for slab in self._pool.leased_slabs():
                slab._hold()  # a request holds its block, which the end of the pool ignores
                self._later.append(slab._release)
            for request in requests:
                self._requests[request] = None
                request._keep_memory()
        fail_all(requests, explain)

    def once_destroyed(self, function: Callable[[], object]) -> None:
        """Call a function on the loop's thread: now, or when the object is destroyed."""
        if self.exists:
            self._later.append(function)
        else:
            function()

    def settle(self) -> None:
        """Release everything if the object is destroyed. Otherwise leave it to a later attempt.
        Called on the loop's thread, after an attempt. Idempotent."""
        self._is_left = True
        if not self.exists:
            self._release()

    def _release(self) -> None:
        # Two threads may do this at the same time: each takes something else.
        with suppress(KeyError):
            while True:
                self._requests.popitem()[0]._drop()
        with suppress(IndexError):
            while True:
                self._later.pop()()
        OUTLIVING.pop(self, None)

    @property
    def why(self) -> str:
        """The reason that a request ends with, while the object exists; else ""."""
        if not self.exists:
            return ""
        error = self._refusal
        text = error.strerror if isinstance(error, VerbsCallError) else error
        return (
            f"the driver refused to destroy its queue ({text}): the device may still access its "
            "memory, which stays registered until aclose(), called again, succeeds"
        )

    async def check(self, destroy: Callable[[], object], *, again: bool) -> None:
        """Raise the driver's refusal if the object still exists.

        Args:
            destroy: makes an `attempt`, and destroys what the object was created on.
            again: whether to call `destroy` before.

        Raises:
            VerbsCallError: the driver refuses to destroy the object.
            BusyError: another thread is destroying it.
        """
        if again and self.exists:
            self._is_left = self._may_release()
            await self._reactor.destroy_again(destroy, self.settle)
        error = self._refusal
        if self.exists and error is not None:
            if isinstance(error, VerbsCallError) and error.errno is not None:
                hint = "It still exists, and its memory stays registered: call aclose() again"
                raise VerbsCallError(error.errno, error.call, hint)
            raise detached(error)
