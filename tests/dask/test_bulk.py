"""Memory for bulk is used again once nothing refers to it, and not before."""

import gc
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from aiordma.integrations.dask.bulk import SHORTEST, BulkMemory

SIZE = 4 * SHORTEST


def address(memory: memoryview) -> int:
    return int(numpy.frombuffer(memory, "u1").__array_interface__["data"][0])


def test_memory_that_was_dropped_is_used_again_for_a_similar_length() -> None:
    bulk = BulkMemory(2 * SIZE)
    place = address(bulk.take(SIZE))
    for size in (SIZE, SIZE - SIZE // 8, SIZE):
        again = bulk.take(size)
        assert (address(again), again.nbytes, again.readonly) == (place, size, False)
        del again
    for size in (SIZE // 2, SIZE + 1):
        assert address(bulk.take(size)) != place


@pytest.mark.parametrize(
    "made",
    [
        lambda memory: memory[5:9],
        lambda memory: numpy.frombuffer(memory, "u1")[7:],
        lambda memory: numpy.asarray(memory)[1:].view("i1"),
        lambda memory: numpy.asarray(memory.obj)[3:],
        lambda memory: memory.obj[3:][4:],
        lambda memory: numpy.ndarray((2, 4), "f8", memory)[1],
    ],
)
def test_memory_is_not_used_again_while_anything_is_made_of_it(
    made: Callable[[memoryview], Any],
) -> None:
    bulk = BulkMemory(2 * SIZE)
    memory = bulk.take(SIZE)
    place, left = address(memory), made(memory)
    del memory
    gc.collect()
    assert address(bulk.take(SIZE)) != place
    del left
    found = {address(each) for each in [bulk.take(SIZE), bulk.take(SIZE)]}
    assert place in found


def test_what_is_kept_without_use_has_a_bound() -> None:
    bulk = BulkMemory(2 * SIZE)
    taken = [bulk.take(SIZE) for _ in range(5)]
    taken.clear()
    assert sum(map(len, bulk._free)) == 2 * SIZE
    del taken
    huge = bulk.take(3 * SIZE)
    del huge
    assert not bulk._free


def test_short_memory_is_left_to_malloc() -> None:
    bulk = BulkMemory(2 * SIZE)
    memory = bulk.take(SHORTEST - 1)
    assert memory.nbytes == SHORTEST - 1
    assert not memory.readonly
    del memory
    assert not bulk._free
