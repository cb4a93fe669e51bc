"""The examples of simloop and simloom, which simulate hosts over TCP, on aiordma's simulated
network: python -m tests.suites.simulations.

They need Python 3.12.3, which is sought as python3.14, python3.13 and python3.12, or named by
AIORDMA_SUITE_PYTHON. Nothing of them is kept in this repository.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.suites.common import BUILD, ROOT, fetch_commit

__all__ = ("main",)

OLDEST = "(3, 12, 3)"  # before, asyncio's streams raise what a cancelled handler has raised
NAMES = ("python3.14", "python3.13", "python3.12")
PACKAGES = ("simloop==0.2.2", "simloom==0.5.0", "pytest", "pytest-timeout")
SECONDS = 1800


@dataclass(frozen=True)
class Example:
    """Tests of a program that has planted faults.

    Attributes:
        simulation: the project, whose repository it is in.
        folder: where pytest runs.
        tests: what it runs.
        path: what the tests import, besides.
    """

    simulation: str
    repository: str
    revision: str
    folder: str
    tests: tuple[str, ...]
    path: str = ""


SIMLOOP = "simloop", "https://github.com/dhruvl/simloop", "579ae3bdca15ca844740e2f9efb43e9f72e974f3"
SIMLOOM = (
    "simloom",
    "https://github.com/mandipadk/simloom",
    "77c222768fd5b36cbd7e71f4e3ff03b1222e7fc2",
)
EXAMPLES = (
    Example(*SIMLOOP, "examples/raft", ("tests/test_ablations.py", "-m", "not slow")),
    Example(*SIMLOOP, "examples/jobqueue", ("tests/test_mutations.py", "-m", "not slow")),
    Example(*SIMLOOM, "tests", ("test_raft_demo.py",), "examples"),
)


def found() -> str | None:
    """Return an interpreter that is new enough."""
    for name in filter(None, (os.environ.get("AIORDMA_SUITE_PYTHON"), *NAMES)):
        check = f"import sys; sys.exit(sys.version_info < {OLDEST})"
        if shutil.which(name) and not subprocess.run([name, "-c", check]).returncode:
            return name
    return None


def fetch(example: Example) -> Path:
    """Fetch the project's repository; return the folder that has it."""
    folder = BUILD / example.simulation
    if not (folder / example.folder).exists():
        fetch_commit(folder, example.repository, example.revision)
    return folder


def install(name: str) -> str:
    """Install aiordma and the simulations for another interpreter; return that of the virtual
    environment."""
    folder = BUILD / "simulations"
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([name, "-m", "venv", folder], check=True)
    pip = [str(python), "-m", "pip", "install", "-qq"]
    subprocess.run([*pip, *PACKAGES, str(ROOT)], check=True)
    return str(python)


def run(python: str, example: Example, folder: Path) -> bool:
    """Run an example's tests; return whether they pass."""
    path = [ROOT / "tests" / "suites", folder / example.path]
    environment = os.environ | {
        "AIORDMA_SUITE_SIMULATION": example.simulation,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
    }
    options = ["-p", "no:aiordma", "-p", "in_suite.simulations", "-q", "--tb=short", "-oaddopts="]
    print(f"{example.simulation}: {example.folder}", flush=True)
    done = subprocess.run(
        [python, "-m", "pytest", *options, *example.tests, f"--timeout={SECONDS}"],
        cwd=folder / example.folder,
        env=environment,
        check=False,
    )
    return not done.returncode


def main() -> int:
    """Run the examples. Without an interpreter, say so, and succeed."""
    name = found()
    if name is None:
        print("skipped: the examples of simloop and simloom need Python 3.12.3 or newer")
        return 0
    BUILD.mkdir(parents=True, exist_ok=True)
    try:
        folders = {each: fetch(each) for each in EXAMPLES}
        python = install(name)
    except subprocess.CalledProcessError as error:
        print(f"simloop and simloom were not fetched, and do not run: {error}", file=sys.stderr)
        return 1
    passed = [run(python, each, folder) for each, folder in folders.items()]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
