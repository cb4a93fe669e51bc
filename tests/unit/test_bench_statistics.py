"""The benchmark's numbers: percentiles, ratios, what a measurement holds."""

import io
from array import array
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from aiordma.bench.meter import Measurement, Meter
from aiordma.bench.statistics import percentile
from aiordma.bench.table import print_table
from aiordma.bench.timing import deadline, one_by_one, pipelined, timed_pipeline
from aiordma.bench.workload import OPERATIONS, Workload

numbers = st.lists(st.floats(0, 1e9), min_size=1, max_size=300)

Drive = Callable[[Callable[[], Awaitable[Any]], int, int, Meter], Awaitable[None]]
"""A loop that keeps a window of operations full."""


@given(numbers, st.floats(0.01, 100))
def test_a_percentile_is_the_smallest_sample_that_so_many_do_not_exceed(
    samples: list[float], percent: float
) -> None:
    ordered = sorted(samples)
    found = percentile(ordered, percent)
    # Counted, where percentile() computes a rank; the last digit of a float decides nothing.
    enough = percent * len(ordered) / 100 - 1e-6
    assert sum(each <= found for each in ordered) >= enough
    assert sum(each < found for each in ordered) < enough + 2e-6 or found == ordered[0]


class Operations:
    """Awaitables that know how many of them are under way."""

    def __init__(self) -> None:
        self.started = self.ended = self.most = 0

    def start(self) -> "Operations":
        self.started += 1
        self.most = max(self.most, self.started - self.ended)
        return self

    def __await__(self) -> Generator[Any, Any, None]:
        yield from anyio.lowlevel.checkpoint().__await__()
        self.ended += 1


@pytest.mark.anyio
async def test_one_by_one_each_is_awaited_before_the_next() -> None:
    operations, meter = Operations(), Meter("", 1)
    await one_by_one(operations.start, deadline(0.02), meter)
    assert operations.most == 1
    assert operations.started == operations.ended == len(meter.samples) > 1


@pytest.mark.anyio
@pytest.mark.parametrize("drive", [pipelined, timed_pipeline])
async def test_a_window_is_full_and_every_operation_awaited(drive: Drive) -> None:
    operations, meter = Operations(), Meter("", 1)
    await drive(operations.start, 8, deadline(0.02), meter)
    assert operations.most == 8
    assert operations.started == operations.ended
    assert operations.ended == (meter.count or len(meter.samples)) > 8


@given(
    st.sampled_from(OPERATIONS),
    st.integers(1, 1 << 30),
    st.integers(1, 4096),
    st.binary(max_size=9),
    st.booleans(),
    st.none() | st.integers(0, 4096),
)
def test_server_receives_the_workload(
    operation: str, size: int, depth: int, padding: bytes, both: bool, inline: int | None
) -> None:
    work = Workload(
        operation,
        size,
        depth,
        both and operation == "send",
        None if operation == "read" else inline,
    )
    assert len(work.pack()) <= 56  # the most private data of a connection request
    assert Workload.unpack(work.pack() + padding) == work


@given(st.binary(max_size=60))
def test_foreign_private_data_is_no_workload(data: bytes) -> None:
    try:
        Workload.unpack(data)
    except ValueError:
        return
    assert data.startswith(Workload.MAGIC)


@pytest.mark.parametrize(
    ("operation", "size", "depth"), [("dance", 1, 1), ("echo", 0, 1), ("echo", 1, 0)]
)
def test_no_such_workload(operation: str, size: int, depth: int) -> None:
    with pytest.raises(ValueError, match=r"none of|is not in"):
        Workload(operation, size, depth)


@pytest.mark.anyio
@pytest.mark.parametrize("drive", [one_by_one, timed_pipeline])
async def test_iterations_end_a_drive_exactly(drive: Any) -> None:
    operations, meter = Operations(), Meter("", 1, iterations=100)
    depth = () if drive is one_by_one else (8,)
    await drive(operations.start, *depth, 1 << 63, meter)
    assert len(meter.samples) == 100


@pytest.mark.parametrize("width", [20, 80])
def test_table_loses_no_digit_on_a_narrow_terminal(width: int) -> None:
    samples = array("Q", [123_456_700] * 10)
    row = Measurement("messages/65536/window16", 65536, 9_876_543, 1.0, 1000.0, 123_456, samples)
    file = io.StringIO()
    print_table(Console(file=file, width=width), "on 127.0.0.1", [row, ("echo/64", "refused")])
    printed = "".join(file.getvalue().split())
    for part in ("123457" * 4, "9,876,543", "647269", "101.3", "0.012", row.name, "echo/64"):
        assert part in printed
