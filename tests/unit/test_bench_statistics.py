"""The benchmark's numbers: percentiles, ratios, what a measurement holds."""

import io
import json
import time
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
from tests.bench.rows import ratio

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


@pytest.mark.parametrize(
    ("percent", "value"), [(50, 500), (90, 900), (99, 990), (99.9, 999), (100, 1000), (0.05, 1)]
)
def test_the_percentiles_of_a_thousand(percent: float, value: int) -> None:
    assert percentile(range(1, 1001), percent) == value


@pytest.mark.parametrize("percent", [0, -1, 100.1])
def test_no_such_percentage(percent: float) -> None:
    with pytest.raises(ValueError, match="percent="):
        percentile([1.0], percent)


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        percentile([], 50)
    meter = Meter("nothing", 1)
    with meter:
        pass
    with pytest.raises(TimeoutError, match="not one operation"):
        meter.result()


def test_a_ratio_needs_both() -> None:
    assert ratio(3.0, 2.0) == 1.5
    assert [ratio(None, 1.0), ratio(1.0, None), ratio(1.0, 0.0)] == [None, None, None]


def test_measurement_converts_to_json() -> None:
    samples = array("Q", range(1000, 1001000, 1000))
    found = Measurement("echo/64", 64, 1000, 0.5, 0.25, 500, samples, lost=3)
    assert json.loads(json.dumps(found.as_dict())) == {
        "name": "echo/64",
        "size": 64,
        "count": 1000,
        "seconds": 0.5,
        "operations_per_second": 2000.0,
        "megabytes_per_second": 0.128,
        "cpu_us_per_operation": 250.0,
        "wake_ups_per_operation": 0.5,
        "mean_us": 500.5,
        "p50_us": 500.0,
        "p90_us": 900.0,
        "p99_us": 990.0,
        "p99.9_us": 999.0,
        "lost": 3,
    }


def test_a_rate_alone_has_no_percentiles() -> None:
    found = Measurement("write/64", 64, 10, 1.0, 0.0, 0, array("Q"))
    assert not [key for key in found.as_dict() if key.endswith("_us")]
    with pytest.raises(ValueError, match="only the rate"):
        _ = found.mean_us


def test_the_meter_counts_time_processor_and_sleeps() -> None:
    meter = Meter("sleeping", 1)
    with meter:
        for _ in range(5):
            time.sleep(0.01)
            meter.count += 1
        busy = time.process_time() + 0.02
        while time.process_time() < busy:
            pass
    found = meter.result()
    assert found.count == 5
    assert found.seconds >= 0.07
    assert 0.02 <= found.cpu_seconds < found.seconds
    assert found.wake_ups >= 5


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


def test_turns_round_up_to_whole_chains() -> None:
    meter = Meter("", 1, iterations=10)
    assert len(list(meter.turns())) == 10
    assert len(list(meter.turns(4))) == 6
    assert len(list(meter.turns(4, 4))) == 2
    assert list(meter.turns(12)) == []
    assert next(Meter("", 1).turns(5, 3)) is True


@pytest.mark.parametrize("width", [20, 80])
def test_table_loses_no_digit_on_a_narrow_terminal(width: int) -> None:
    samples = array("Q", [123_456_700] * 10)
    row = Measurement("messages/65536/window16", 65536, 9_876_543, 1.0, 1000.0, 123_456, samples)
    file = io.StringIO()
    print_table(Console(file=file, width=width), "on 127.0.0.1", [row, ("echo/64", "refused")])
    printed = "".join(file.getvalue().split())
    for part in ("123457" * 4, "9,876,543", "647269", "101.3", "0.012", row.name, "echo/64"):
        assert part in printed


def test_table_of_usual_numbers_fits_80_columns() -> None:
    samples = array("Q", [1_234_500] * 10)
    row = Measurement("messages/65536/window16", 65536, 123_456, 1.0, 10.0, 123_456, samples)
    file = io.StringIO()
    print_table(Console(file=file, width=80), "on 127.0.0.1", [row])
    assert max(len(line.rstrip()) for line in file.getvalue().splitlines()) <= 80
