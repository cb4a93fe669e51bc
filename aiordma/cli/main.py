"""The command `aiordma`: checks that its dependencies are installed, and runs the benchmark."""

import runpy
import sys
from importlib.util import find_spec

__all__ = ("main",)

NEEDS = ("typer", "rich")


def main() -> None:
    """Run the command, or exit with a message that names the missing packages."""
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        sys.exit(
            f"aiordma: the command needs {' and '.join(missing)}: pip install 'aiordma[cli]'\n"
            "(the library itself does not)"
        )
    # By name, so that importing this module needs neither package.
    runpy.run_module("aiordma.bench.commands")["main"]()
