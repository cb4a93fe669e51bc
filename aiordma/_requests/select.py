"""The one place that chooses between the two backends, by the environment variable
AIORDMA_BACKEND: `c` (the default), the engine in C (`_native/engine/`), or `python`, the same in
Python (`python` and `python_ports`), for reading, for comparing, and for debugging.

Both have one interface, which these two modules document, and the same tests run on both.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from aiordma._native import c_backend
from aiordma._requests import python, python_ports
from aiordma._requests.python import BATCH, Entry, Holdable, RequestOwner

__all__ = (
    "BACKEND",
    "BATCH",
    "ChainPort",
    "Drain",
    "Entry",
    "Holdable",
    "InFlightTable",
    "OpenRequests",
    "Port",
    "RequestOwner",
    "SharedPort",
    "WorkRequest",
    "plain_calls",
)

Function = TypeVar("Function")

BACKENDS = {"c": vars(c_backend), "python": {**vars(python), **vars(python_ports)}}
"""The classes of each, by their names."""


def _asked() -> str:
    name = os.environ.get("AIORDMA_BACKEND", "c")
    if name not in BACKENDS:
        raise ImportError(f"AIORDMA_BACKEND={name!r}: it is one of {', '.join(BACKENDS)}")
    return name


BACKEND = _asked()
"""Which one it is."""

if TYPE_CHECKING:
    from aiordma._requests.python import Drain, InFlightTable, OpenRequests, WorkRequest
    from aiordma._requests.python_ports import ChainPort, Port, SharedPort
else:
    InFlightTable = BACKENDS[BACKEND]["InFlightTable"]
    WorkRequest = BACKENDS[BACKEND]["WorkRequest"]
    OpenRequests = BACKENDS[BACKEND]["OpenRequests"]
    Drain = BACKENDS[BACKEND]["Drain"]
    Port = BACKENDS[BACKEND]["Port"]
    SharedPort = BACKENDS[BACKEND]["SharedPort"]
    ChainPort = BACKENDS[BACKEND]["ChainPort"]


def plain_calls(name: str) -> Callable[[Function], Function]:
    """Decorate a method whose plain calls `self._plain` takes, by its method of this name: those
    without keywords, unless that answers None. The engine makes them without entering Python."""

    def choose(method: Function) -> Function:
        chosen: Function = c_backend.method(name, method) if BACKEND == "c" else method
        return chosen

    return choose
