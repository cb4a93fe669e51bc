"""For the tests of programs that use aiordma: fault injection, and counts of leaked objects.

Both use the software device, so such tests run on every machine::

    with aiordma.testing.Faults(seed=7) as faults:
        faults.drop_connection(after_bytes=10_000)
        ...
"""

from aiordma.testing.faults import Fault, Faults
from aiordma.testing.leaks import software_objects

__all__ = ("Fault", "Faults", "software_objects")
