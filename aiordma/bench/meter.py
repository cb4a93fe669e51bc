"""Measurements: the times of operations, and their cost in processor time and wake-ups."""

import resource
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Self

from aiordma.bench.statistics import percentile

__all__ = ("PERCENTILES", "Measurement", "Meter")

PERCENTILES = (50.0, 90.0, 99.0, 99.9)


@dataclass(frozen=True)
class Measurement:
    """The result of one measurement.

    Attributes:
        name: the name of the workload.
        size: bytes per operation.
        count: the number of operations.
        seconds: the duration of the measurement.
        cpu_seconds: processor time of this process, all threads, user and system.
        wake_ups: how often the loop's thread slept and was woken.
        samples: nanoseconds of each operation, in ascending order; empty if only the rate was
            measured.
        lost: the number of datagrams without an answer.
        device: the RDMA device; empty over TCP.
    """

    name: str
    size: int
    count: int
    seconds: float
    cpu_seconds: float
    wake_ups: int
    samples: "array[int]" = field(repr=False)
    lost: int = 0
    device: str = ""

    @property
    def rate(self) -> float:
        """Operations per second."""
        return self.count / self.seconds

    @property
    def megabytes_per_second(self) -> float:
        """Payload per second, in 10**6 bytes. An echo counts in one direction only."""
        return self.rate * self.size / 1e6

    @property
    def cpu_us(self) -> float:
        """Processor time per operation, in microseconds, on this side."""
        return self.cpu_seconds / self.count * 1e6

    @property
    def wake_ups_each(self) -> float:
        """Wake-ups per operation, on this side."""
        return self.wake_ups / self.count

    @property
    def mean_us(self) -> float:
        """The mean of the samples, in microseconds.

        Raises:
            ValueError: there are no samples.
        """
        if not self.samples:
            raise ValueError("no samples: only the rate was measured")
        return sum(self.samples) / len(self.samples) / 1000

    def percentile_us(self, percent: float) -> float:
        """Return a percentile of the samples, in microseconds.

        Raises:
            ValueError: there are no samples.
        """
        return percentile(self.samples, percent) / 1000

    def as_dict(self) -> dict[str, Any]:
        """Return the measurement as a dict for JSON."""
        found: dict[str, Any] = {
            "name": self.name,
            "size": self.size,
            "count": self.count,
            "seconds": self.seconds,
            "operations_per_second": self.rate,
            "megabytes_per_second": self.megabytes_per_second,
            "cpu_us_per_operation": self.cpu_us,
            "wake_ups_per_operation": self.wake_ups_each,
        }
        if self.samples:
            found["mean_us"] = self.mean_us
            found |= {f"p{percent:g}_us": self.percentile_us(percent) for percent in PERCENTILES}
        if self.lost:
            found["lost"] = self.lost
        if self.device:
            found["device"] = self.device
        return found


class Meter:
    """Measures a `with` block, which appends to `samples` or sets `count`."""

    def __init__(self, name: str, size: int, iterations: int | None = None) -> None:
        self.name = name
        self.iterations = iterations
        self.received = 0
        """Messages from the peer, which count in addition to the samples."""
        self.size = size
        self.samples: array[int] = array("Q")
        self.count = 0
        self.lost = 0
        self._began = self._cpu = self._seconds = 0.0
        self._slept = 0

    def __enter__(self) -> Self:
        self._slept = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        self._cpu = time.process_time()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._seconds = time.perf_counter() - self._began
        self._cpu = time.process_time() - self._cpu
        self._slept = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - self._slept

    def turns(self, started: int = 0, each: int = 1) -> Iterator[bool]:
        """Return an iterator with an element for each further start of `each` operations, after
        `started` ones: as many as the iterations permit, else without end."""
        if self.iterations is None:
            return repeat(True)
        return repeat(True, -(-max(0, self.iterations - started) // each))

    def result(self) -> Measurement:
        """Return the measurement of the block.

        Raises:
            TimeoutError: the block completed no operation.
        """
        count = (self.count or len(self.samples)) + self.received
        if not count:
            raise TimeoutError(f"{self.name}: not one operation in the time that there was")
        return Measurement(
            self.name,
            self.size,
            count,
            self._seconds,
            self._cpu,
            self._slept,
            array("Q", sorted(self.samples)),
            self.lost,
        )
