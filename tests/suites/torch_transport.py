"""torch's own tests of its one-sided transports, over ours:
python -m tests.suites.torch_transport [--write].

A copy of each file runs, in which only the transport is replaced, as SUBSTITUTES says. Nothing of
them is kept in this repository.
"""

import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec

from tests.suites.common import BUILD, by_hand, fetch_commit, run_copy, summary, write_page

__all__ = ("main",)

SOURCES = BUILD / "torch"
FOLDER = "test/distributed"
REPOSITORY = "https://github.com/pytorch/pytorch"
MARK = "<!-- written by make suites up to Ray -->\n"
NEXT = "## Ray\n"

SUBSTITUTES = {
    "transport_test_utils.py": (
        (
            "import asyncio\n",
            "import asyncio\nfrom in_suite.torch_transport import TestCase, connected_pair\n",
        ),
        ("class TransportTestMixin:", "class TestTransport(TestCase):"),
        ("raise NotImplementedError", "return connected_pair()"),
        # torch 2.15.0 has not got this method.
        ("source_memory.reused_registration()", "False"),
        (".reused_registration()", ".registration is source_memory.registration"),
    ),
    "test_transport_nixl_native.py": (
        ('"nixl", "cpu"', '"aiordma", "cpu", host="127.0.0.1"'),
        (", enable_prog_thread=progress_thread", ""),
        ("None if progress_thread else transport", "None"),
        (
            "torch.distributed._transport.nixl import NIXLRemoteBuffer",
            "aiordma.integrations.torch import _RemoteBuffer as NIXLRemoteBuffer",
        ),
        ("memory._registration", "memory.registration"),
    ),
}
"""What is replaced in each file."""


def main() -> int:
    """Run the tests, print the results, and write them into the page if that is wanted."""
    if not find_spec("torch") or not find_spec("torch.distributed._transport"):
        print("torch 2.15 is not installed: its tests do not run", file=sys.stderr)
        return 0
    release = version("torch").partition("+")[0]
    try:
        if not (SOURCES / FOLDER).exists():
            files = [f"{FOLDER}/{name}" for name in SUBSTITUTES]
            fetch_commit(SOURCES, REPOSITORY, f"refs/tags/v{release}", *files)
    except subprocess.CalledProcessError as error:
        print(f"torch's tests were not fetched, and do not run: {error}", file=sys.stderr)
        return 1
    rows = {
        name: run_copy(SOURCES / FOLDER / name, substitutes, TORCH_TEST_NIXL="1")
        for name, substitutes in SUBSTITUTES.items()
    }
    text, known = summary(f"With torch {release}{by_hand(SOURCES)}:", rows, {})
    print(text)
    if "--write" in sys.argv:
        write_page("arrays", text, MARK, NEXT)
    return int(not known)


if __name__ == "__main__":
    sys.exit(main())
