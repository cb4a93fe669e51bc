"""The only door to C: no other module imports the compiled binding.

`ffi` and `lib` are cffi's, for everything but the hot path. `lib` has our own C functions, the
inline verbs behind them, and the constants; every call that lives in libibverbs or librdmacm goes
through a provider's table (provider.h): rdma-core's, or that of the software device. Nothing is
opened at import.

`_engine` is the hot path as Python objects written in C (engine/). Each class of it stands in for
one written in Python, its reference, which says so with `in_c`. AIORDMA_ENGINE=python leaves the
references in their places.
"""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import aiordma._native._engine as _engine
from aiordma._native._binding import ffi, lib

__all__ = (
    "IN_C",
    "ffi",
    "given",
    "in_c",
    "lib",
    "load_rdma_core",
    "load_software",
    "plain_calls",
    "spinner",
)

Reference = TypeVar("Reference")

IN_C = os.environ.get("AIORDMA_ENGINE") != "python"
"""Whether the hot path is the engine's."""


def in_c(name: str) -> Callable[[Reference], Reference]:
    """Decorate a class that the engine's class of that name stands in for."""

    def choose(reference: Reference) -> Reference:
        chosen: Reference = getattr(_engine, name) if IN_C else reference
        return chosen

    return choose


def given(part: str) -> Callable[[Reference], Reference]:
    """Decorate what the engine uses of Python's."""

    def give(reference: Reference) -> Reference:
        _engine.give(**{part: reference})
        return reference

    return give


def plain_calls(name: str) -> Callable[[Reference], Reference]:
    """Decorate a method whose plain calls `self._plain` takes without Python, by its method of this
    name: those without keywords, unless that answers None."""

    def choose(method: Reference) -> Reference:
        chosen: Reference = _engine.method(name, method) if IN_C else method
        return chosen

    return choose


def spinner() -> Any:
    """Return what polls the engine's drains; None where they are not the engine's."""
    return _engine.Spinner() if IN_C else None


def load_rdma_core() -> Any:
    """Return the table of calls of libibverbs and librdmacm, opening both at the first use.

    Raises:
        OSError: one of the two is not installed; the text is the dynamic loader's.
    """
    message = ffi.new("char[512]")
    table = lib.aiordma_rdma_core(message, len(message))
    if table == ffi.NULL:
        raise OSError(ffi.string(message).decode(errors="replace"))
    return table


def load_software() -> Any:
    """Return the table of calls of the software device, which is part of the binding."""
    return lib.aiordma_software()
