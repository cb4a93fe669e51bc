"""Chooses the backend, by the environment variable AIORDMA_BACKEND: `c` (the default) is the engine
in C (`_native/engine/`), `python` is the same in Python (`python` and `python_ports`), for reading,
comparing and debugging.

Both have the same interface, which the Python modules document, and pass the same tests.
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
    "calls_port",
)

Function = TypeVar("Function")

BACKENDS = {"c": vars(c_backend), "python": {**vars(python), **vars(python_ports)}}
"""The classes of each backend, by name."""


def _backend_of_environment() -> str:
    name = os.environ.get("AIORDMA_BACKEND", "c")
    if name not in BACKENDS:
        raise ImportError(f"AIORDMA_BACKEND={name!r}: it is one of {', '.join(BACKENDS)}")
    return name


BACKEND = _backend_of_environment()
"""The name of the chosen backend."""

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


def calls_port(name: str) -> Callable[[Function], Function]:
    """Decorate a method: a call goes to the method `name` of `self._port` first, without Python
    code. If that returns None, the decorated method runs. With the backend in Python, the decorated
    method runs for each call."""

    def choose(method: Function) -> Function:
        chosen: Function = c_backend.method(name, method) if BACKEND == "c" else method
        return chosen

    return choose
