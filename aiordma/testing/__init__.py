"""For the tests of programs that use aiordma: connected endpoints in one process, fault injection,
and counts of leaked objects. The fixtures of the pytest plugin (`aiordma.testing.plugin`) are made
of them.

By default they use the software device, so such tests run on every machine::

    async with aiordma.testing.connected_pair() as (client, server):
        with aiordma.testing.Faults(seed=7) as faults:
            faults.drop_connection(after_bytes=10_000)
            ...
"""

from aiordma.testing.faults import Fault, Faults
from aiordma.testing.guest import simulated_network
from aiordma.testing.leaks import software_objects
from aiordma.testing.pairs import (
    Fabric,
    connected_pair,
    fabric,
    serving_listener,
    stream_pair,
)
from aiordma.testing.simulation import (
    Host,
    OwnershipError,
    Simulation,
    SimulationError,
    simulate,
    simulated,
)

__all__ = (
    "Fabric",
    "Fault",
    "Faults",
    "Host",
    "OwnershipError",
    "Simulation",
    "SimulationError",
    "connected_pair",
    "fabric",
    "serving_listener",
    "simulate",
    "simulated",
    "simulated_network",
    "software_objects",
    "stream_pair",
)
