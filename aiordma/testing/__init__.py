"""For the tests of programs that use aiordma: faults on demand, and what is left behind.

Both are the software device's, so that such tests run anywhere::

    with aiordma.testing.Faults(seed=7) as faults:
        faults.drop_connection(after_bytes=10_000)
        ...
"""

from aiordma.testing.faults import Fault, Faults
from aiordma.testing.leaks import software_objects

__all__ = ("Fault", "Faults", "software_objects")
