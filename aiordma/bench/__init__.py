"""The benchmark that `aiordma bench` runs: two processes, over the public interface only.

docs/performance.md describes the measurements and how to read them.
"""

from aiordma.bench.client import measure
from aiordma.bench.conditions import Conditions
from aiordma.bench.loops import LOOPS, run
from aiordma.bench.meter import Measurement
from aiordma.bench.server import serve
from aiordma.bench.workload import OPERATIONS, Workload

__all__ = (
    "LOOPS",
    "OPERATIONS",
    "Conditions",
    "Measurement",
    "Workload",
    "measure",
    "run",
    "serve",
)
