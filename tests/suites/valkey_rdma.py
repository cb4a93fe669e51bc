"""Valkey's own tests of RDMA on the software device: python -m tests.suites.valkey_rdma [--write].

They run as under `aiordma exec`, as an ordinary user. The sources are those of Debian's testing
release, since the client library has RDMA from Valkey 9 on. Nothing of them is kept in this
repository.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from aiordma.cli.exec import FOLDER
from tests.ports import free_port
from tests.suites.common import BUILD, write_page
from tests.vm import packages
from tests.vm.report import TestBedError
from tests.vm.valkey import OPTIONS

__all__ = ("main",)

SOURCES = BUILD / "valkey-rdma"
RELEASE = "forky"
IN_SUITE = Path(__file__).parent / "in_suite"
MARK = "<!-- written by make suites up to the next heading -->\n"
SECONDS = 400
"""For each of the three programs of tests."""

NOBODY = 65534
AS_ORDINARY_USER = (
    ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    if os.geteuid() == 0
    else ()
)
PROGRAMS = ("server", "cli", "benchmark", "check-aof", "check-rdb", "sentinel")

ADDRESS, ADDRESS_OF_RDMA = "127.0.0.1", "127.0.0.2"
"""A server has one port number for both, and iWARP's ports are those of TCP."""

ROUNDS = 13
"""Of rdma-test: PING, SET and GET in each of four threads, and one BGSAVE."""

TCL_UNITS = ("integration/valkey-cli", "integration/valkey-benchmark")
UNANSWERED = "libvalkey reports no error if nobody listens at an RDMA address"
UNREADABLE = "valkey-cli calls `funcs->read`, which libvalkey does not have for RDMA"
FLUSHES = (
    "an iWARP device flushes the receives when the peer closes; libvalkey takes that for another "
    "error, since it looks at completions before it looks at events"
)
LEFT_OUT = {
    "Returns I/O error when the connection is lost": FLUSHES,
    "Returns I/O error on socket timeout": "in one function with a test of the line above",
    "Non-interactive non-TTY CLI: ASK redirect test": "its servers know TCP only",
    "Non-interactive non-TTY CLI: Test command-line hinting - no server": UNANSWERED,
    "Dumping an RDB - functions only: no": UNREADABLE,
    "Dumping an RDB - functions only: yes": UNREADABLE,
    "Connecting as a replica": UNREADABLE,
    "Piping raw protocol": "valkey-cli waits until a completion channel's descriptor is writable",
    "valkey-cli make sure selected db survives connection drops": FLUSHES,
    "benchmark: clients idle mode should return error when reached maxclients limit": "`-I` waits "
    "for ever over RDMA: libvalkey's read waits for an answer, and no request was sent",
}
"""Tests that fail for a reason which is not the software device's. Most are of the Tcl suite."""

RDMA_PART, OF_ERRORS = "cfg.type = CONN_RDMA;", "test_blocking_io_errors(cfg);"
"""In the main function of client_test, which has no option to skip a test."""


@dataclass(frozen=True)
class Test:
    """A test's name and outcome: "passed", "failed" or "skipped"."""

    suite: str
    name: str
    outcome: str


def fetch() -> str:
    """Fetch and build Valkey and its tests in build/suites, and return the version.

    Raises:
        TestBedError: the sources cannot be had, or do not build.
    """
    version = SOURCES / ".version"
    if version.exists():
        return version.read_text()
    packages.ensure((*packages.VALKEY, "tcl"))
    shutil.rmtree(SOURCES, ignore_errors=True)
    SOURCES.mkdir(parents=True)
    options = packages.sources_of(RELEASE)
    command = ("source", "--download-only", "--only-source", "--tar-only", "valkey")
    fetched = packages.apt_get(*options, *command, cwd=SOURCES)
    archive = next(SOURCES.glob("valkey_*.orig.tar.*"), None)
    if fetched.returncode or archive is None:
        raise TestBedError(f"apt-get source valkey failed:\n{fetched.stdout}")
    unpack = ["tar", "-x", "-f", str(archive), "-C", str(SOURCES), "--strip-components=1"]
    subprocess.run(unpack, check=True)
    libvalkey = SOURCES / "deps" / "libvalkey"
    source = libvalkey / "tests" / "client_test.c"
    text = source.read_text()
    head, mark, part = text.partition(RDMA_PART)
    if OF_ERRORS not in part:
        raise TestBedError(f"{source} has changed: look at {OF_ERRORS}")
    source.write_text(head + mark + part.replace(OF_ERRORS, "", 1))
    jobs = f"-j{os.cpu_count() or 1}"
    _make(SOURCES / "src", jobs, *OPTIONS, *(f"valkey-{each}" for each in PROGRAMS))
    _make(libvalkey, jobs, "USE_RDMA=1", "tests/client_test")
    number = archive.name.removeprefix("valkey_").partition(".orig")[0]
    version.write_text(number)
    return number


def _make(folder: Path, *arguments: str) -> None:
    done = subprocess.run(
        ["make", "-C", folder, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise TestBedError(f"Valkey does not build:\n{done.stdout[-4000:]}")


@contextmanager
def everybodys() -> Iterator[Path]:
    """Yield a copy of the programs and tests, which belongs to the ordinary user, with the software
    device's libraries. The project may be root's."""
    with tempfile.TemporaryDirectory(prefix="aiordma-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for each in (*(f"src/valkey-{each}" for each in PROGRAMS), "runtest", "src/commands"):
            target = folder / each
            target.parent.mkdir(exist_ok=True)
            if (SOURCES / each).is_dir():
                shutil.copytree(SOURCES / each, target)
            else:
                shutil.copy(SOURCES / each, target)
        shutil.copytree(SOURCES / "tests", folder / "tests", symlinks=True)
        shutil.copy(SOURCES / "deps/libvalkey/tests/client_test", folder)
        shutil.copy(IN_SUITE / "valkey_run.py", folder)
        for part in ("bin", "lib", "data"):
            (folder / part).mkdir()
        for library in FOLDER.glob("*.so.1"):
            shutil.copy(library, folder / "lib")
        for each in PROGRAMS:
            is_ours = each in ("server", "cli", "benchmark")
            program = IN_SUITE / "valkey_program" if is_ours else SOURCES / f"src/valkey-{each}"
            shutil.copy(program, folder / "bin" / f"valkey-{each}")
        if AS_ORDINARY_USER:
            for path in (folder, *folder.rglob("*")):
                os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
        yield folder


def _environment(folder: Path) -> dict[str, str]:
    return os.environ | {
        "HOME": str(folder),
        "LD_LIBRARY_PATH": str(folder / "lib"),
        "VALKEY_BIN_DIR": str(folder / "bin"),
        "AIORDMA_SUITE_PROGRAMS": str(folder / "src"),
    }


def _output(folder: Path, *command: str | Path) -> tuple[int, str]:
    """Run a program, and return its status, or -1 if it did not end, and what it wrote."""
    log = BUILD / f"valkey-rdma-{Path(command[0]).name}.log"
    words = [*AS_ORDINARY_USER, "stdbuf", "-oL", *map(str, command)]
    with open(log, "w") as written:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=_environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            status = -1
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)  # a server that a suite left, too
            process.wait()
    return status, re.sub(r"\x1b\[[\d;]*m", "", log.read_text(errors="replace"))


def _ended(suite: str, status: int) -> list[Test]:
    return [Test(suite, f"ended with status {status}", "failed")] if status else []


def run_py(folder: Path) -> list[Test]:
    """Run tests/rdma/run.py: its client, rdma-test, and the server."""
    suite = "tests/rdma/run.py"
    run = folder / "tests" / "rdma" / "run.py"
    status, output = _output(folder, "python3", "valkey_run.py", run, ADDRESS)
    names = re.findall(r"thread\[\d+\] (PING/PONG|SET|GET|BGSAVE)\b.*\[OK\]", output)
    tests = [Test(suite, name, "passed") for name in names]
    tests += [Test(suite, "a round", "failed")] * (ROUNDS - len(names))
    return tests + _ended(suite, status)


def client_test(folder: Path) -> list[Test]:
    """Run libvalkey's tests, and return those of connections over RDMA."""
    suite = "libvalkey's client_test, over RDMA"
    port, path = str(free_port()), folder / "data" / "socket"
    command = [folder / "src/valkey-server", "--port", port, "--bind", ADDRESS, "--unixsocket"]
    command += [path, "--rdma-port", port, "--rdma-bind", ADDRESS_OF_RDMA, "--save", ""]
    command += ["--protected-mode", "no", "--enable-debug-command", "local", "--dir", path.parent]
    with open(BUILD / "valkey-rdma-server.log", "w") as log:
        server = subprocess.Popen(
            [*AS_ORDINARY_USER, *map(str, command)],
            env=_environment(folder),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            while not path.exists() and server.poll() is None:
                time.sleep(0.1)
            time.sleep(1)  # it listens on RDMA last
            options = ["-h", ADDRESS, "-p", port, "-s", path, "--rdma-addr", ADDRESS_OF_RDMA]
            status, output = _output(folder, folder / "client_test", *map(str, options))
        finally:
            server.kill()
            server.wait()
    # What follows them needs a network, and ends client_test if there is none.
    part, end, _ = output.partition("Testing against RDMA connection")[2].partition("\nTesting ")
    found = re.findall(r"^#\d+ (.*): (PASSED|FAILED|SKIPPED)$", part, re.MULTILINE)
    tests = [Test(suite, name, outcome.lower()) for name, outcome in found]
    return tests + _ended(suite, 0 if end else status or -1)


def tcl(folder: Path) -> list[Test]:
    """Run the Tcl suite's tests of valkey-cli and valkey-benchmark, which then use `--rdma`."""
    (folder / "skipped").write_text("\n".join(LEFT_OUT))
    options = ["--clients", "1", "--timeout", "120", "--skipfile", "skipped"]
    options += ["--baseport", str(free_port() + 40), "--portcount", "100"]  # others stand before it
    for unit in TCL_UNITS:
        options += ["--single", unit]
    status, output = _output(folder, "./runtest", *options)
    tests = []
    for outcome, name in re.findall(r"^\[(ok|err|exception|TIMEOUT)\]: (.*)$", output, re.M):
        unit = TCL_UNITS["benchmark:" in name]
        name = re.sub(r" \(\d+ ms\)$", "", name)
        tests.append(Test(f"tests/{unit}.tcl", name, "passed" if outcome == "ok" else "failed"))
    return tests + _ended("runtest", status)


def summary(tests: list[Test], version: str) -> str:
    """Return the results, in Markdown."""
    lines = [
        f"Valkey {version}:",
        "",
        "| tests | passed | failed | skipped themselves |",
        "|---|---|---|---|",
    ]
    for suite in dict.fromkeys(each.suite for each in tests):
        count = Counter(each.outcome for each in tests if each.suite == suite)
        numbers = (count[each] for each in ("passed", "failed", "skipped"))
        lines.append(f"| {suite} | " + " | ".join(map(str, numbers)) + " |")
    lines += ["", "| left out | tests |", "|---|---|"]
    left_out = Counter(LEFT_OUT.values())
    lines += [f"| {why} | {count} |" for why, count in left_out.most_common()]
    return "\n".join(lines)


def main() -> int:
    """Run the tests, print the results, and write them into the page if that is wanted."""
    try:
        version = fetch()
    except TestBedError as error:
        print(f"Valkey's tests of RDMA do not run: {error}", file=sys.stderr)
        return 1
    with everybodys() as folder:
        tests = [*run_py(folder), *client_test(folder), *tcl(folder)]
    failed = [each for each in tests if each.outcome == "failed"]
    for each in failed:
        print(f"{each.suite}: {each.name} failed; its log is in {BUILD}", file=sys.stderr)
    text = summary(tests, version)
    every = "\n".join(f"| {each.suite} | {each.name} | {each.outcome} |" for each in tests)
    (BUILD / "valkey-rdma.md").write_text(f"{text}\n\n| | test | |\n|---|---|---|\n{every}\n")
    print(text)
    if "--write" in sys.argv:
        write_page("exec", text, MARK, "## ")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
