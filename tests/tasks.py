"""What the Makefile's targets compute: python3 -m tests.tasks TASK [arguments].

Standard library only: it runs before the environment exists.
"""

import os
import platform
import re
import shlex
import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable
from pathlib import Path

from tests.vm import machine, packages, parts, summary, valkey
from tests.vm.__main__ import PROJECT, request
from tests.vm.report import TestBedError, say, status_of

BUILD = PROJECT / "build"
RESULTS = BUILD / "vm"
VENV = PROJECT / ".venv"

# tests/conftest.py puts the slow modules first.
PARALLEL = "-n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0"
# Without plugins that these tests do not use: they take the VM ten seconds.
IN_VM = "-p no:hypothesispytest -p no:valkey -p no:xdist -p no:cacheprovider"
# The unit tests come last: the others compare what a process has open before and after each test.
NATIVE = (
    "tests/faults tests/docs tests/soak tests/attacks tests/simulation tests/device tests/dask"
    " tests/valkey tests/interop/test_decoded.py tests/unit"
)
# Programs in C that need no kernel driver: natively, they run under `aiordma exec`.
PROGRAMS = " ".join(
    f"tests/interop/test_{each}.py"
    for each in (
        *("by_hand", "mckey", "perftest", "rc_uc_pingpong", "rdma_client_server"),
        *("rping", "rping_command", "software_and_rxe", "srq_pingpong", "ucmatose"),
        *("ud_pingpong", "udaddy", "valkey", "with_themselves"),
    )
)

TARGETS = {  # the device (the built-in one is tested natively), the folders, options of pytest
    "software": ("software", f"{PROGRAMS} {NATIVE}", f"{PARALLEL} -m 'not cluster'"),
    # Without workers: see tests.devices.alone_on_roce_port. What is above the verbs and takes long
    # has run on the other device.
    "software_roce": ("software_roce", "tests/device", "-m 'not (one_kernel_device and slow)'"),
    "quick": ("software", "tests/device tests/unit", f"{PARALLEL} -m 'not slow'"),
    "rxe": ("rxe0", "tests/device tests/interop tests/faults tests/docs", IN_VM),
    "siw": ("siw0", "tests/device tests/interop tests/faults", IN_VM),
    "docs": ("rxe0", "tests/docs", IN_VM),
    "dask-software": ("software", "tests/dask", ""),
    "dask-rxe": ("rxe0", "tests/dask", IN_VM),
    "dask-siw": ("siw0", "tests/dask", IN_VM),
}


def test(name: str, *arguments: str) -> int:
    """Run a target's tests. Tests that the arguments name replace its folders."""
    if name not in TARGETS:
        raise TestBedError(f"no tests are called {name}; there are {', '.join(TARGETS)}")
    device, folders, options = TARGETS[name]
    if any(word.startswith("tests/") for word in arguments):
        folders = ""
    words = shlex.split(f"-m pytest {options} {folders} --junitxml={RESULTS}/junit-{name}.xml")
    os.environ["AIORDMA_TEST_DEVICE"] = device
    if device.startswith("software"):
        if name in ("quick", "software_roce"):
            os.environ["AIORDMA_TEST_LOOPS"] = "asyncio"
        RESULTS.mkdir(parents=True, exist_ok=True)
        if name == "software" and not arguments:
            valkey_server()
        os.execv(f"{VENV}/bin/python", [f"{VENV}/bin/python", *words, *arguments])
    os.environ["PROVIDER"] = device.rstrip("0")
    os.environ.setdefault("VM_TIMEOUT", "4000")  # longer than a command that somebody waits for
    command = shlex.join(["python", *words, *arguments])
    if name == "rxe":
        valkey_server()
        command = command if arguments else f"tests/vm/guest/mended.sh && {command}"
    return machine.run(request(command))


def test_all() -> int:
    """Run the parts of `make test`, and print one table; its last line is for machines."""
    for old in RESULTS.glob("summary-*.json"):
        old.unlink()
    os.environ["AIORDMA_RESULTS"] = str(RESULTS)
    try:
        failed = parts.run("make", ["test-native", "test-rxe", "test-siw"], BUILD)
    finally:
        incomplete = summary.report(RESULTS, ["software", "software_roce", "rxe0", "siw0"])
    return failed or incomplete


def valkey_server() -> int:
    """Build a Valkey server with RDMA; what uses it says so if that fails, and does without."""
    try:
        valkey.prepare(BUILD / "valkey-server")
    except TestBedError as error:
        say(str(error))
        say("without build/valkey-server, its tests are skipped, and its benchmarks left out")
    return 0


def python() -> int:
    """Print this Python's name, if it is complete: it can make .venv and compile for it."""
    if sys.version_info < (3, 11) or packages.python_packages():
        return 1
    print(sys.executable)
    return 0


def environment() -> int:
    """Make .venv with what compiles the extension and what aiordma depends on. It is made anew if
    it has another Python: on top of that one's, it would be a mixture."""
    packages.ensure((*packages.BUILD, *packages.python_packages()))
    settings = VENV / "pyvenv.cfg"
    mine = f"version = {platform.python_version()}\nexecutable = {os.path.realpath(sys.executable)}"
    is_mine = settings.exists() and mine in settings.read_text()
    venv.create(VENV, clear=not is_mine, symlinks=True, with_pip=True)
    metadata = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    return pip(*metadata["build-system"]["requires"], *metadata["project"]["dependencies"])


def install(*extras: str) -> int:
    """Install what the extras need, and the headers that the tests compare with."""
    packages.ensure(packages.HEADERS)
    metadata = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    return pip(*(each for name in extras for each in metadata["optional-dependencies"][name]))


def pip(*requirements: str) -> int:
    """Install into .venv, and print the names."""
    names = [re.split("[^a-z_-]", each)[0] for each in requirements]
    print("installing into .venv:", *names, flush=True)
    return subprocess.run([VENV / "bin/pip", "install", "-qq", *requirements]).returncode


def lint() -> int:
    """Run every check of style and types; returns 1 if one of them fails."""
    files = [each for name in ("aiordma", "tests") for each in Path(name).rglob("*.[ch]")]
    sources = " ".join(str(each) for each in files if not each.match("_*.c"))  # cffi makes those
    # pyright looks for the package with the first python of PATH, and would ask a registry for a
    # newer version of itself; node comes with its wheel.
    os.environ["PYRIGHT_PYTHON_IGNORE_WARNINGS"] = "1"
    os.environ["PATH"] = f"{VENV}/bin:{os.environ['PATH']}"
    failed = 0
    for check in (
        "ruff check .",
        "ruff format --check .",
        "mypy",
        f"clang-format --dry-run -Werror {sources}",
        "cppcheck --quiet -j2 --std=c11 --library=python,gnu --enable=warning --error-exitcode=1"
        " --suppressions-list=.cppcheck -D__has_feature(x)=0"
        " -Iaiordma/_native -iaiordma/_native/_binding.c aiordma/_native",
        "stubtest --ignore-disjoint-bases aiordma._native._engine",
        "pyright --verifytypes aiordma --ignoreexternal",
    ):
        print(check.partition(" aiordma/")[0], flush=True)
        failed |= subprocess.run(check.split()).returncode != 0
    return int(failed)


TASKS: tuple[Callable[..., int], ...] = (
    *(test, test_all, valkey_server),
    *(python, environment, install, lint),
)

if __name__ == "__main__":
    chosen, *rest = sys.argv[1:]
    sys.exit(status_of(lambda: {task.__name__: task for task in TASKS}[chosen](*rest)))
