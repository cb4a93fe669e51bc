"""The classes of the backend that the environment variable AIORDMA_BACKEND names (`_base/backend`):
`c` (the default) is the engine in C (`_native/engine/`), `python` is the same in Python (`python`,
`python_ports` and `python_arrivals`), for reading, comparing and debugging.

Both have the same interface, which the Python modules document. The one in Python passes the unit
tests and ten modules of tests/device (tests/unit/test_engines.py).
"""

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from aiordma._base.backend import BACKEND
from aiordma._native import c_backend
from aiordma._requests import python, python_arrivals, python_ports
from aiordma._requests.python import BATCH, Entry, Holdable, RequestOwner

__all__ = (
    "BACKEND",
    "BACKENDS",
    "BATCH",
    "ArrivalQueue",
    "ArrivalView",
    "ChainPort",
    "DatagramReceive",
    "Drain",
    "Entry",
    "Holdable",
    "InFlightTable",
    "OpenRequests",
    "PooledReceives",
    "Port",
    "RequestOwner",
    "SharedPort",
    "WorkRequest",
    "awaits_path",
    "begin_trace",
    "calls_port",
    "take_trace",
)

Function = TypeVar("Function")
Method = TypeVar("Method", bound=Callable[..., Coroutine[Any, Any, Any]])

BACKENDS = {
    "c": vars(c_backend),
    "python": {**vars(python), **vars(python_ports), **vars(python_arrivals)},
}
"""The classes of each backend, by name."""

if TYPE_CHECKING:
    from aiordma._requests.python import (
        Drain,
        InFlightTable,
        OpenRequests,
        WorkRequest,
        begin_trace,
        take_trace,
    )
    from aiordma._requests.python_arrivals import (
        ArrivalQueue,
        ArrivalView,
        DatagramReceive,
        PooledReceives,
    )
    from aiordma._requests.python_ports import ChainPort, Port, SharedPort
else:
    InFlightTable = BACKENDS[BACKEND]["InFlightTable"]
    WorkRequest = BACKENDS[BACKEND]["WorkRequest"]
    begin_trace = BACKENDS[BACKEND]["begin_trace"]
    take_trace = BACKENDS[BACKEND]["take_trace"]
    OpenRequests = BACKENDS[BACKEND]["OpenRequests"]
    Drain = BACKENDS[BACKEND]["Drain"]
    Port = BACKENDS[BACKEND]["Port"]
    SharedPort = BACKENDS[BACKEND]["SharedPort"]
    ChainPort = BACKENDS[BACKEND]["ChainPort"]
    PooledReceives = BACKENDS[BACKEND]["PooledReceives"]
    ArrivalQueue = BACKENDS[BACKEND]["ArrivalQueue"]
    ArrivalView = BACKENDS[BACKEND]["ArrivalView"]
    DatagramReceive = BACKENDS[BACKEND]["DatagramReceive"]


def calls_port(name: str) -> Callable[[Function], Function]:
    """Decorate a method: a call goes to the method `name` of `self._port` first, without Python
    code. If that returns None, the decorated method runs. With the backend in Python, the decorated
    method runs for each call."""

    def choose(method: Function) -> Function:
        chosen: Function = c_backend.method(name, method) if BACKEND == "c" else method
        return chosen

    return choose


def awaits_path(name: str) -> Callable[[Method], Method]:
    """Decorate a coroutine method. With the backend in C, the method `name` of `self._path` does
    what is usual, and calls the decorated method for the rest."""

    def choose(method: Method) -> Method:
        if BACKEND != "c":
            return method

        @wraps(method)
        async def run(self: Any, *arguments: Any, **keywords: Any) -> Any:
            return await getattr(self._path, name)(method, (self, *arguments), keywords)

        return cast(Method, run)

    return choose
