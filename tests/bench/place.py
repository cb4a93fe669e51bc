"""Where a row is measured: on which bed, and by which interpreter. bench.json names both."""

import os
import platform
import sys
import sysconfig


def place() -> dict[str, object]:
    """Return what a row has of this process's place.

    `bed` is this machine or the virtual machine, in words; `python` names the interpreter;
    `python_optimised` says whether that was built with profile-guided optimisation.
    """
    here = f"this machine, Linux {platform.release()}, {os.cpu_count()} processors"
    return {
        "bed": os.environ.get("AIORDMA_VM") or here,
        "python": interpreter(),
        "python_optimised": is_optimised(),
    }


def interpreter() -> str:
    """Return the interpreter's version and path, without a virtual environment's link."""
    name = platform.python_implementation()
    return f"{name} {platform.python_version()} ({os.path.realpath(sys.executable)})"


def is_optimised() -> bool:
    """Whether the interpreter was built with profile-guided optimisation.

    Its configuration says so. Debian's does not, as Debian keeps only the options for extensions;
    but Debian builds its interpreters so.
    """
    if "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or ""):
        return True
    return sys.base_prefix == "/usr" and _distribution() in ("debian", "ubuntu")


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("ID", "")
    except OSError:
        return ""


def words(place: dict[str, object]) -> str:
    """Return a place in words."""
    how = "optimised" if place["python_optimised"] else "built without optimisation"
    return f"{place['bed']}; {place['python']}, {how}"
