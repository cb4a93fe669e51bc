"""Where a row is measured: on which bed, and by which interpreter. bench.json names both."""

import os
import platform
import sys


def place() -> dict[str, object]:
    """Return what a row has of this process's place.

    `bed` is this machine or the virtual machine, in words; `python` names the interpreter.
    """
    here = f"this machine, Linux {platform.release()}, {os.cpu_count()} processors"
    return {
        "bed": os.environ.get("AIORDMA_VM") or here,
        "python": interpreter(),
    }


def interpreter() -> str:
    """Return the interpreter's version and path, without a virtual environment's link."""
    name = platform.python_implementation()
    return f"{name} {platform.python_version()} ({os.path.realpath(sys.executable)})"


def words(place: dict[str, object]) -> str:
    """Return a place in words."""
    return f"{place['bed']}; {place['python']}"
