"""What an endpoint's end frees besides its queue: its memory windows and its memory regions, and
other objects that the driver has refused to destroy before."""

from collections.abc import Iterable
from contextlib import ExitStack

from aiordma._base.errors import BusyError, VerbsCallError, detached
from aiordma._base.process import reentrant_lock
from aiordma.verbs import MemoryRegion, Resource
from aiordma.verbs.memory import retire_all

__all__ = ("Remains",)

_DEREGISTER = "ibv_dereg_mr"


class Remains:
    """See the module. Each endpoint and each shared receive queue has one.

    It keeps what the driver refuses to free, until a later attempt.
    """

    def __init__(self) -> None:
        self._objects: dict[int, Resource] = {}
        self._regions: dict[int, MemoryRegion] = {}
        self._refusal: BaseException | None = None  # of the last attempt
        # One attempt at a time: on siw, one waits for what the device was placing, after all
        # regions are deregistered.
        self._lock = reentrant_lock()

    def add(self, regions: Iterable[MemoryRegion] = (), objects: Iterable[Resource] = ()) -> None:
        """Free these in the next attempt: regions, and before them objects such as windows. If this
        raises MemoryError, call it again."""
        for raw in objects:
            self._objects[id(raw)] = raw
        for region in regions:
            self._regions[id(region)] = region

    @property
    def is_left(self) -> bool:
        """Whether any of them exists, except for regions that requests still use: these close with
        the last request."""
        return any(not raw._is_gone for raw in list(self._objects.values())) or any(
            not (region._is_gone or region._users) for region in list(self._regions.values())
        )

    @property
    def is_due(self) -> bool:
        """Whether any is left, and the last attempt did not ask the driver, because a request used
        the region then."""
        return self._refusal is None and self.is_left

    def attempt(self) -> None:
        """Free the windows and other objects, then the regions, in a worker thread, and keep the
        driver's refusal. A region that a request uses closes with the last one."""
        with self._lock:
            objects = [each for each in list(self._objects.values()) if not each._is_gone]
            regions = [each for each in list(self._regions.values()) if not each._is_gone]
            try:
                with ExitStack() as last_first:
                    last_first.callback(self._forget_destroyed)
                    for region in regions:
                        if region._closed:
                            last_first.callback(region.close)  # waits for another thread's
                    last_first.callback(retire_all, [r for r in regions if not r._closed])
                    # First: a region is not deregistered while a window is bound to it.
                    for raw in objects:
                        last_first.callback(raw.close)
            except BaseException as error:
                self._refusal = detached(error)
                raise
            self._refusal = None

    def _forget_destroyed(self) -> None:
        for kept in (self._objects, self._regions):
            for key in [key for key, raw in list(kept.items()) if raw._is_gone]:
                kept.pop(key, None)

    def check(self) -> None:
        """Raise the driver's refusal if any is left, after an attempt.

        Raises:
            VerbsCallError: the driver refuses to free it.
            BusyError: a memory window of another owner is bound to a region, or another thread is
                freeing it.
        """
        if not self.is_left:
            return
        error = self._refusal
        if isinstance(error, VerbsCallError) and error.errno is not None:
            what = "The memory stays registered" if error.call == _DEREGISTER else "It still exists"
            raise VerbsCallError(error.errno, error.call, f"{what}: call aclose() again")
        raise detached(error or BusyError("its memory was not deregistered: call aclose() again"))
