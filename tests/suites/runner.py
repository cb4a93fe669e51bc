"""Fetches suites, runs each test on our loop and on asyncio's, and compares."""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.suites.catalogue import DEPARTURES, SUITES, Suite
from tests.suites.common import BUILD, PACKAGES, ROOT, fetch_commit

__all__ = (
    "Row",
    "counts_of_comms",
    "counts_of_streams",
    "fetch",
    "lost",
    "reasons",
    "run",
    "every_test",
    "versions",
)

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
DEBIAN = BUILD / "debian" / "usr" / "lib" / f"python{PYTHON}" / "test"
SECONDS = 900
"""For one run of one suite."""
EACH = 20
"""Seconds for one test."""


@dataclass(frozen=True)
class Row:
    """One test, on both loops.

    Attributes:
        uses: whether it opened a stream, a stream server or a comm.
        length: the bytes that its comms have sent over RDMA, in the test's process.
        ours, stock: "passed", "failed", "skipped", "crashed" or "" (did not run).
        why: the end of the failure on our loop.
    """

    suite: Suite
    test: str
    ours: str
    stock: str
    uses: bool
    through_gateway: bool
    length: int
    why: str

    @property
    def reason(self) -> str | None:
        """Why the test does not apply, or None."""
        return self.suite.reason(self.test)

    @property
    def departs(self) -> bool:
        """Whether a stream behaves otherwise than a TCP socket."""
        return self.ours != "passed" and self.reason in DEPARTURES

    @property
    def is_bad(self) -> bool:
        """Whether the test did not pass on our loop, and is not skipped everywhere."""
        return self.ours != "passed" and not self.ours == "skipped" == self.stock

    @property
    def explanation(self) -> str:
        """Why the test did not pass on our loop."""
        if self.reason is None:
            return "fails on both" if not self.is_difference else "an open fault"
        return f"departure: {self.reason}" if self.departs else self.reason

    @property
    def is_difference(self) -> bool:
        """Whether the loops differ, without a reason in the catalogue."""
        bad = ("failed", "crashed")
        return self.ours in bad and self.stock not in bad and self.reason is None


def _sources(suite: Suite) -> Path:
    return BUILD / suite.source


def _is_there(suite: Suite) -> bool:
    """Whether `fetch` has fetched it."""
    parts = {"apt": DEBIAN}
    there = parts.get(suite.source, _sources(suite) / (".fetched" if suite.revision else "tests"))
    return there.exists() and all((PACKAGES / f".{each}").exists() for each in suite.packages)


def fetch(suite: Suite) -> None:
    """Fetch the suite's tests, and what they import, into build/suites.

    Raises:
        subprocess.CalledProcessError: the registry or the archive does not have them.
    """
    if _is_there(suite):
        return
    BUILD.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    if suite.source == "apt":
        name = f"libpython{PYTHON}-testsuite"
        subprocess.run(["apt-get", "-q", "download", name], cwd=BUILD, check=True)
        archive = next(BUILD.glob(f"{name}_*.deb"))
        subprocess.run(["dpkg-deb", "-x", archive, BUILD / "debian"], check=True)
    elif suite.revision:
        _fetch_commit(suite)
    else:
        wanted = f"{suite.source}=={version(suite.source)}"
        options = ["--no-deps", "--no-binary", suite.source, "--dest", str(BUILD)]
        subprocess.run([*pip, "download", *options, wanted], check=True)
        archive = BUILD / f"{suite.source}-{version(suite.source)}.tar.gz"
        # Its tests, and a README that one of them reads: the project itself is the installed one.
        _sources(suite).mkdir(exist_ok=True)
        unpack = ["tar", "xzf", str(archive), "--strip-components=1", "-C", str(_sources(suite))]
        folder = archive.name.removesuffix(".tar.gz")
        subprocess.run([*unpack, "--wildcards", f"{folder}/tests", f"{folder}/README*"], check=True)
    missing = [each for each in suite.packages if not (PACKAGES / f".{each}").exists()]
    if missing:
        # With one call: pip leaves out the part of a namespace package whose folder is there.
        subprocess.run([*pip, "install", "--no-deps", "--target", PACKAGES, *missing], check=True)
    for each in missing:
        (PACKAGES / f".{each}").touch()


def _fetch_commit(suite: Suite) -> None:
    folder = _sources(suite)
    fetch_commit(folder, suite.repository, suite.revision)
    found = find_spec(suite.source)
    assert found is not None
    assert found.submodule_search_locations
    installed = found.submodule_search_locations[0]
    shutil.copytree(installed, folder / suite.source, dirs_exist_ok=True)
    (folder / ".fetched").touch()


def _report(suite: Suite, loop: str) -> Path:
    return BUILD / f"{suite.name.replace(' ', '-')}-{loop}.jsonl"


def _run_on(suite: Suite, loop: str) -> None:
    report = _report(suite, loop)
    report.unlink(missing_ok=True)
    folder = _sources(suite)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pytest.ini").write_text("[pytest]\n")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT / "tests" / "suites", PACKAGES))),
        "AIORDMA_DEVICE": "software",
        "AIORDMA_SUITE_LOOP": loop,
        "AIORDMA_SUITE_REPORT": str(report),
        "AIORDMA_SUITE_GATEWAY": str(int(suite.gateway)),
        "AIORDMA_SUITE_TEST_PACKAGE": str(DEBIAN) if suite.source == "apt" else "",
    }
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "AIORDMA_STREAM_HOSTS"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "pytest", "-q", "-c", "pytest.ini", "-p", "in_suite.report"]
    command += ["-p", suite.plugin, "-o", "addopts="]
    command += [
        f"-pno:{each}" for each in ("cacheprovider", "hypothesispytest", "xdist", "aiordma")
    ]
    command += ["--timeout", str(EACH), "--timeout-method", "signal", "--tb=short"]
    # A test that ends the process is not run again; those behind it are.
    done = 0
    with open(report.with_suffix(".log"), "w") as log:
        while True:
            subprocess.run(
                [*command, *suite.arguments],
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=SECONDS,
                check=False,
            )
            lines = report.read_text().splitlines()
            if len(lines) == done or json.loads(lines[-1])["outcome"] != "crashed":
                break
            done = len(lines)


def _read(report: Path) -> dict[str, dict[str, Any]]:
    rows = (json.loads(line) for line in report.read_text().splitlines())
    return {row["test"].rpartition("/")[2].lstrip(":"): row for row in rows}


def _bare(test: str) -> str:
    """The name of a test without its parameters."""
    return test.partition("[")[0]


def run(suite: Suite) -> list[Row]:
    """Run the suite on our loop, and then on asyncio's.

    Raises:
        subprocess.TimeoutExpired: the suite did not end.
        FileNotFoundError: pytest collected nothing; its log is beside the report.
    """
    for loop in ("ours", "stock"):
        _run_on(suite, loop)
    ours, stock = (_read(_report(suite, loop)) for loop in ("ours", "stock"))
    # A test with one random parameter has another name in each run.
    names = Counter(map(_bare, stock))
    stock |= {_bare(test): row for test, row in stock.items() if names[_bare(test)] == 1}
    return [
        Row(
            suite,
            test,
            row["outcome"],
            (stock.get(test) or stock.get(_bare(test), {})).get("outcome", ""),
            bool(row.get("transports") or row.get("servers") or row.get("comms")),
            bool(row.get("gateway")),
            row.get("bytes", 0),
            row.get("why", ""),
        )
        for test, row in ours.items()
    ]


def lost(suite: Suite) -> list[str]:
    """Return the tests that the last run reported on asyncio's loop only: our run ended early.

    Raises:
        FileNotFoundError: it has not run.
    """
    # Without parameters, because some are random.
    ours, stock = (Counter(map(_bare, _read(_report(suite, loop)))) for loop in ("ours", "stock"))
    return sorted(stock - ours)


def counts_of_streams(rows: list[Row]) -> str:
    """Return the counts of each suite whose tests open streams."""
    lines = [
        "| suite | open a stream | pass | open no stream | pass | departures | do not apply |"
        " fail on both | on asyncio pass |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for suite, of in _by_suite(rows):
        ran = [row for row in of if row.ours != "skipped"]
        uses = [row for row in ran if row.uses]
        others = [row for row in ran if not row.uses]
        bad = [row for row in of if row.is_bad]
        counts = (
            len(uses),
            sum(row.ours == "passed" for row in uses),
            len(others),
            sum(row.ours == "passed" for row in others),
            sum(row.departs for row in bad),
            sum(row.stock == "passed" and not row.departs for row in bad),
            sum(row.stock != "passed" for row in bad),
            sum(row.stock == "passed" for row in of),
        )
        lines.append(f"| {suite.name} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(lines)


def counts_of_comms(rows: list[Row]) -> str:
    """Return the counts of each suite whose tests open comms."""
    lines = [
        "| tests | passed over RDMA | of them with an RDMA connection | kB sent | passed over TCP |"
        " passed over TCP only | on neither |",
        "|---|---|---|---|---|---|---|",
    ]
    for suite, of in _by_suite(rows):
        passed = [row for row in of if row.ours == "passed"]
        bad = [row for row in of if row.ours in ("failed", "crashed")]
        counts = (
            len(passed),
            sum(row.uses for row in passed),
            round(sum(row.length for row in of) / 1000),
            sum(row.stock == "passed" for row in of),
            sum(row.stock == "passed" for row in bad),
            sum(row.stock in ("failed", "crashed") for row in bad),
        )
        lines.append(f"| {suite.name} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(lines)


def _by_suite(rows: list[Row]) -> list[tuple[Suite, list[Row]]]:
    """Return the suites that have rows, each with its rows."""
    found = [(suite, [row for row in rows if row.suite is suite]) for suite in SUITES]
    return [(suite, of) for suite, of in found if of]


def reasons(rows: list[Row]) -> str:
    """Return how many tests did not pass for each reason."""
    counted = Counter(row.explanation for row in rows if row.is_bad)
    lines = [f"| {why} | {count} |" for why, count in counted.most_common()]
    return "\n".join(["| why a test did not pass | tests |", "|---|---|", *lines])


def versions(rows: list[Row]) -> str:
    """Return the day, and the versions of what is tested."""
    tested = sorted({suite.source for suite, _ in _by_suite(rows)} - {"apt"})
    named = ", ".join(f"{each} {version(each)}" for each in tested)
    return f"Run on {date.today()} with Python {platform.python_version()}, {named}."


def every_test(rows: list[Row]) -> str:
    """Return each test that opens a stream or a comm, or that did not pass."""
    lines = ["| test | ours | the other | |", "|---|---|---|---|"]
    for row in rows:
        if row.ours == "skipped" == row.stock:
            continue
        if row.uses or row.is_bad:
            why = row.explanation if row.is_bad else ""
            peer = "socket, through the gateway" if row.through_gateway and not why else ""
            lines.append(f"| {row.test} | {row.ours} | {row.stock} | {why or peer} |")
    return "\n".join(lines)
