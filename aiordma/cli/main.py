"""The command `aiordma`: checks that its dependencies are installed, and runs it."""

import runpy
import sys
from importlib.util import find_spec

NEEDS = ("typer", "rich")


def main() -> None:
    """Run the command, or exit with status 2 and a message that names the missing packages."""
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        print(
            f"aiordma: the command needs {' and '.join(missing)}: pip install 'aiordma[cli]'\n"
            "(the library itself does not)",
            file=sys.stderr,
        )
        sys.exit(2)
    # By name, so that importing this module needs neither package.
    runpy.run_module("aiordma.cli.commands")["main"]()
