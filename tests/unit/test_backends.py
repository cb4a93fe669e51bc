"""The backends in C and in Python have one interface, and one environment variable chooses."""

import inspect
import os
import subprocess
import sys
from typing import Any
from unittest.mock import MagicMock

import pytest

import aiordma
from aiordma._native import c_backend
from aiordma._requests import python, python_arrivals, python_ports
from aiordma._requests.select import BACKEND

CLASSES = (
    python.InFlightTable,
    python.WorkRequest,
    python.OpenRequests,
    python.Drain,
    python_ports.Port,
    python_ports.SharedPort,
    python_ports.ChainPort,
    python_arrivals.PooledReceives,
    python_arrivals.ArrivalQueue,
)
"""Of the backend in Python; the classes of the one in C have the same names."""


def methods(kind: type) -> set[str]:
    """The public methods that a class has of its own or inherits from those of its backend."""
    return {
        name
        for name, value in inspect.getmembers(kind, inspect.isroutine)
        if not name.startswith("_")
    }


def internal(kind: type) -> set[str]:
    """The methods of a class that only other modules of the package call, by an underscore."""
    return {
        name
        for name, value in inspect.getmembers(kind, inspect.isroutine)
        if name.startswith("_") and not name.startswith("__")
    }


def shape(kind: type, name: str) -> list[tuple[str, Any, bool]]:
    """A method's parameters: their names, kinds, and whether they can be left out."""
    return [
        (each.name, each.kind, each.default is not each.empty)
        for each in inspect.signature(getattr(kind, name)).parameters.values()
    ]


@pytest.mark.parametrize("in_python", CLASSES)
def test_backends_have_the_same_methods(in_python: type) -> None:
    in_c = getattr(c_backend, in_python.__name__)
    assert methods(in_c) == methods(in_python)
    assert internal(in_c) <= internal(in_python)


def test_views_have_the_same_methods_but_those_of_a_coroutine() -> None:
    """In C, a view is what its own `__aenter__` returns."""
    in_c, in_python = c_backend.ArrivalView, python_arrivals.ArrivalView
    assert methods(in_c) - methods(in_python) == {"close", "send", "throw"}
    assert internal(in_c) == internal(in_python)


@pytest.mark.parametrize("kind", [c_backend.WorkRequest, python.WorkRequest], ids=["c", "python"])
def test_a_request_has_one_inner_callback_which_is_called_first(kind: type) -> None:
    called: list[int] = []
    request = kind(MagicMock(), "SEND", 8, ())
    request.add_done_callback(lambda _: called.append(1))
    request._set_on_done(lambda _: called.append(2))
    request._set_on_done(lambda _: called.append(3))
    assert called == []
    request._complete((1 << 32, *[0] * 13))
    assert called == [3, 1]
    request._set_on_done(lambda _: called.append(4))
    assert called == [3, 1, 4]


@pytest.mark.parametrize("in_python", CLASSES)
def test_methods_in_c_have_real_signatures(in_python: type) -> None:
    in_c = getattr(c_backend, in_python.__name__)
    for method in sorted(methods(in_c) | internal(in_c)):
        assert shape(in_c, method)[1:] == shape(in_python, method)[1:], method


@pytest.mark.parametrize("awaitable", ["ArrivalView", "StreamTransfer"])
def test_awaitables_of_coroutines_pass_on_values(awaitable: str) -> None:
    """From Python 3.12 on, a coroutine calls `send` of what it awaits. trio sends values."""
    assert callable(getattr(c_backend, awaitable).send)


@pytest.mark.parametrize("method", sorted(methods(aiordma.WorkRequest)))
def test_public_methods_of_a_request_are_documented(method: str) -> None:
    text = inspect.getdoc(getattr(aiordma.WorkRequest, method))
    assert text
    assert "--" not in text


def run_with(name: str | None, code: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "AIORDMA_BACKEND"}
    if name is not None:
        environment["AIORDMA_BACKEND"] = name
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (None, "method_descriptor"),
        ("", "method_descriptor"),
        ("c", "method_descriptor"),
        ("python", "function"),
    ],
)
def test_environment_variable_chooses_the_backend(name: str | None, kind: str) -> None:
    code = "import aiordma; print(aiordma.WorkRequest.done.__class__.__name__)"
    assert run_with(name, code).stdout == f"{kind}\n"


USES = """
import asyncio, aiordma

def run(opening):
    async def main():
        await opening

    asyncio.run(main())

for use in (
    aiordma.Device.names,
    aiordma.Device("software").open,
    aiordma.EventChannel,
    lambda: run(aiordma.devices()),
    lambda: run(aiordma.resolve("127.0.0.1")),
    lambda: run(aiordma.connect("127.0.0.1", 7999)),
    lambda: run(aiordma.listen("127.0.0.1", 0)),
    lambda: run(aiordma.open_datagram("127.0.0.1")),
    lambda: run(aiordma.open_domain("127.0.0.1")),
    lambda: run(aiordma.open_shared_receive("127.0.0.1")),
    lambda: run(aiordma.open_queue_pair("software")),
):
    try:
        use()
    except ValueError as error:
        print(error)
"""


def test_uses_of_a_device_refuse_an_unknown_backend() -> None:
    done = run_with("fortran", USES)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["AIORDMA_BACKEND=fortran: give one of 'c', 'python'"] * 11


def test_this_run_has_the_backend_that_it_was_given() -> None:
    assert (os.environ.get("AIORDMA_BACKEND") or "c") == BACKEND
