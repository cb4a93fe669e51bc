"""What the device may still use, because the driver refuses to destroy a queue pair or a shared
receive queue: the memory of its requests, and its entries of a completion queue."""

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress

from aiordma._base.errors import BusyError, VerbsCallError, detached
from aiordma._base.process import reentrant_lock
from aiordma._endpoint.domain_state import DomainState
from aiordma._loop.ending import repeated
from aiordma._loop.event_loop import EventLoop
from aiordma._native import leak
from aiordma._requests.pool import BufferPool
from aiordma._requests.request import WorkRequest, fail_all
from aiordma._runtime.reactor import Reactor
from aiordma.verbs import MemoryRegion, MemorySlice, Resource

__all__ = ("Outliving",)

logger: logging.Logger = logging.getLogger("aiordma")


class Outliving:
    """See the module. Each endpoint and each shared receive queue has one.

    Usually the driver destroys the object, and this does nothing. If it refuses, the requests still
    end, with an error, but their memory is kept until the driver has destroyed the object. Closing
    the owner again tries that again, and so do the end of its protection domain and of the device.

    `_release` is the one step that releases what is kept. Each thing is forgotten only after its
    release, so the step can be repeated, in any thread.

    Args:
        loop, reactor, domain: the owner's; None: the domain is the loop's own.
        pool: that of the blocks that its requests use.
    """

    def __init__(
        self, loop: EventLoop, reactor: Reactor, domain: DomainState | None, pool: BufferPool
    ) -> None:
        self._loop = loop
        self._reactor = reactor
        self._domain = domain
        self._pool = pool
        self._raw: Resource | None = None
        self._refusal: BaseException | None = None
        self._kept: dict[object, Callable[[], object]] = {}
        """What releases each thing that is kept: call it until it raises no MemoryError."""
        self._lock = reentrant_lock()  # of `_release`
        self._is_releasing = False

    @property
    def exists(self) -> bool:
        """Whether there is an object in the device."""
        return self._raw is not None and not self._raw._is_gone

    @property
    def is_left(self) -> bool:
        """Whether the object, or what is kept because of it, exists."""
        return self.exists or bool(self._kept)

    def watch(self, raw: Resource) -> None:
        """Begin with a new object of the device, before its first request."""
        self._raw = raw

    def attempt(self) -> None:
        """Try to destroy the object, in a worker thread, and keep the driver's refusal."""
        assert self._raw is not None
        try:
            self._raw.close()  # which waits for another thread's attempt
        except BaseException as error:
            self._refusal = detached(error)
            raise
        is_closing = self._domain is not None and self._domain.life.is_closing
        if is_closing or self._reactor.ended or self._loop.has_ended:
            repeated(self._release)()

    def fail(
        self, requests: Iterable[WorkRequest], explain: Callable[[WorkRequest], Exception]
    ) -> None:
        """End requests without completions, after an attempt to destroy the object. If this raises
        MemoryError, call it again."""
        requests = list(requests)
        if self.exists:
            leak(self)  # the requests hold their owner, and with it the object
            for slab in self._pool.leased_slabs():
                self._hold(slab)  # a request holds its block, which the end of the pool ignores
            for request in requests:
                self._kept[request] = request._drop
                request._keep_memory()
        fail_all(requests, explain)

    def _hold(self, slab: MemorySlice) -> None:
        if self._kept.get(slab.region, _nothing) is not _nothing:
            return
        release = _Hold(slab.region).release
        self._kept[slab.region] = _nothing
        slab._hold()
        self._kept[slab.region] = release  # which takes no memory: the region is held once

    def once_destroyed(self, function: Callable[[], object]) -> None:
        """Call a function on the loop's thread: now, or when the object is destroyed."""
        if self.exists:
            self._kept[function] = function
        else:
            function()

    def settle(self) -> None:
        """Release everything if the object is destroyed. Otherwise leave it to a later attempt.
        Called on the loop's thread, after an attempt. Idempotent."""
        if not self.exists:
            self._release()

    def _release(self) -> None:
        """Release everything that is kept, in any thread. If this raises MemoryError, the rest is
        still kept: call it again. Other errors are logged, as those of a completed request."""
        interrupt: BaseException | None = None
        try:
            with self._lock:
                if self._is_releasing:
                    return  # a release runs code of the program's, which has called this
                self._is_releasing = True
                try:
                    while self._kept:
                        last = next(reversed(self._kept))
                        try:
                            self._kept[last]()
                        except MemoryError:
                            raise
                        except Exception:
                            with suppress(MemoryError):
                                logger.exception("releasing what a queue had kept failed")
                        except BaseException as error:  # raised again behind the last one
                            interrupt = error
                        del self._kept[last]
                finally:
                    self._is_releasing = False
            if interrupt is not None:
                raise interrupt
        finally:
            del interrupt  # its traceback holds this frame

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

    def check(self) -> None:
        """Raise the driver's refusal if the object still exists, after an attempt.

        Raises:
            VerbsCallError: the driver refuses to destroy the object.
            BusyError: another thread is destroying it.
        """
        if not self.exists:
            return
        error = self._refusal
        if isinstance(error, VerbsCallError) and error.errno is not None:
            hint = "It still exists, and its memory stays registered: call aclose() again"
            raise VerbsCallError(error.errno, error.call, hint)
        raise detached(error or BusyError("its queue was not destroyed: call aclose() again"))


class _Hold:
    """A hold of a slab."""

    def __init__(self, region: MemoryRegion) -> None:
        self._region = region
        self._is_released = False

    def release(self) -> None:
        """Give the hold back once, and close the region if it was the last one of a retired slab.
        If this raises MemoryError, call it again."""
        if not self._is_released:
            self._region._users -= 1
            self._is_released = True
        if self._region._retired and not self._region._users:
            self._region.close()


def _nothing() -> None:
    """Release nothing: the entry of a slab that is not held yet."""
