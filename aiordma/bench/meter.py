"""Measuring: samples of time, and what they cost the processor and the scheduler."""

import resource
import time
from array import array
from dataclasses import dataclass, field
from typing import Any, Self

from aiordma.bench.statistics import percentile

__all__ = ("PERCENTILES", "Measurement", "Meter")

PERCENTILES = (50.0, 90.0, 99.0, 99.9)


@dataclass(frozen=True)
class Measurement:
    """What was measured.

    Attributes:
        name: of what.
        size: bytes per operation.
        count: operations.
        seconds: in all.
        cpu_seconds: of this process, all threads, user and system.
        wake_ups: how often the loop's thread slept and was woken.
        samples: nanoseconds of each operation, in ascending order; empty where only the rate was
            measured.
        lost: datagrams without an answer.
    """

    name: str
    size: int
    count: int
    seconds: float
    cpu_seconds: float
    wake_ups: int
    samples: "array[int]" = field(repr=False)
    lost: int = 0

    @property
    def rate(self) -> float:
        """Operations per second."""
        return self.count / self.seconds

    @property
    def megabytes_per_second(self) -> float:
        """Payload, in 10**6 bytes: of an echo, one way."""
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
            ValueError: there are none.
        """
        if not self.samples:
            raise ValueError("no samples: only the rate was measured")
        return sum(self.samples) / len(self.samples) / 1000

    def percentile_us(self, percent: float) -> float:
        """Return a percentile of the samples, in microseconds.

        Raises:
            ValueError: there are none.
        """
        return percentile(self.samples, percent) / 1000

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
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
        return found


class Meter:
    """Measures what happens in a `with` block: fill `samples` or set `count` in it."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
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

    def result(self) -> Measurement:
        """Return what was measured.

        Raises:
            ValueError: nothing was.
        """
        count = self.count or len(self.samples)
        if not count:
            raise ValueError(f"{self.name}: not one operation in the time that there was")
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
