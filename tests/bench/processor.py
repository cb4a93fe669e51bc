"""What a measurement takes of the processors, on both sides together."""

import resource
import time
from collections.abc import Callable
from dataclasses import replace

from aiordma.bench.meter import Measurement


def processor_seconds(*pids: int) -> float:
    """Return the processor time of this process and of others that run, all threads together."""
    # A process's clock by its number, as clock_getcpuclockid(3) has it.
    return time.process_time() + sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)


def ended_processor_seconds() -> float:
    """Return what the programs that have ended have used, both sides together."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def of_both(measure: Callable[[], Measurement], pid: int) -> Measurement:
    """Measure; the processor time is that of the peer's process, too. What comes before and after
    the measured operations counts as if it were some of them."""
    began, before = time.perf_counter(), processor_seconds(pid)
    found = measure()
    cores = (processor_seconds(pid) - before) / (time.perf_counter() - began)
    return replace(found, cpu_seconds=cores * found.seconds)
