"""The registration cache while the garbage collector ends arrays and runs finalizers."""

from typing import Any

import numpy

from aiordma.types import RegistrationCache
from tests.unit.child import run_child

COLLECTED = """
import gc, numpy
from aiordma._requests.registrations import RegistrationCache

class Region:
    _usable, _users, _outwaits = True, 0, False
    _refusal, _is_gone = None, True

    def __init__(self, array):
        self._view = memoryview(array)
        self.length = array.nbytes

    @property
    def view(self):
        return self._view

    def __getitem__(self, _):
        return self

    def _retire(self):
        self._usable = False

def fill(cache, arrays):
    for array in arrays:
        cache._keep(Region(array)).drop()

def evict(cache):
    cache.max_bytes = 64 * 12

gc.collect()
gc.freeze()
gc.disable()
for call in (evict, RegistrationCache._release_idle, RegistrationCache.clear):
    for allocations in range(60):
        cache = RegistrationCache()
        kept, gone = ([numpy.zeros(64, numpy.uint8) for _ in range(10)] for _ in range(2))
        fill(cache, gone + kept)
        gone.append(gone)
        tuples = gone = None
        tuples = [(allocations, i) for i in range(3000)]  # more than Python keeps for new ones
        gc.set_threshold(gc.get_count()[0] + allocations, 1000, 1000)
        gc.enable()
        call(cache)
        gc.disable()
        gc.collect()
        assert len(cache) == (10 if call is evict else 0), (call, allocations, cache)
"""


def test_arrays_may_end_while_registrations_are_removed() -> None:
    run_child(COLLECTED)


def test_finalizer_that_clears_the_cache_leaves_what_is_being_lent() -> None:
    class Region:
        """A region whose slice allocates, so that a finalizer of the program runs."""

        _usable, _users, _outwaits, length = True, 0, False, 64
        _refusal, _is_gone = None, True

        def __init__(self, array: Any) -> None:
            self._view = self.view = memoryview(array)

        def __getitem__(self, _: slice) -> "Region":
            cache.clear()
            return self

        def _retire(self) -> None:
            self._usable = False

    cache: Any = RegistrationCache()
    array: Any = numpy.zeros(64, numpy.uint8)
    region = Region(array)
    cache._keep(region).drop()
    lent = cache._find(memoryview(array))
    assert lent is not None
    assert region._usable
    lent.drop()
    cache.clear()
    assert not region._usable
