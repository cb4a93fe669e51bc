"""The command `aiordma`: here only so that it can say what it needs."""

import runpy
import sys
from importlib.util import find_spec

__all__ = ("main",)

NEEDS = ("typer", "rich")


def main() -> None:
    """Run the command, or say what it needs."""
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        sys.exit(
            f"aiordma: the command needs {' and '.join(missing)}: pip install 'aiordma[cli]'\n"
            "(the library itself does not)"
        )
    # By name, so that importing aiordma needs neither.
    runpy.run_module("aiordma.bench.commands")["main"]()
