"""What the runs of other projects' tests share: their sources, why tests fail, and the pages with
the results."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

__all__ = (
    "BUILD",
    "PACKAGES",
    "REST_OF_PAGE",
    "ROOT",
    "by_hand",
    "fetch_commit",
    "reason",
    "run_copy",
    "summary",
    "write_page",
)

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "suites"
PACKAGES = BUILD / "packages"
SECONDS = 3600
"""For the tests of one copy."""
EACH = 120
"""For one test of a copy."""
REST_OF_PAGE = "<!-- from here on written by make suites -->\n"


def fetch_commit(folder: Path, repository: str, revision: str, *paths: str) -> None:
    """Fetch the files of a commit or a tag into a folder, without those of other commits.

    Args:
        paths: the files and folders that are wanted; all, if there are none.

    Raises:
        subprocess.CalledProcessError: they cannot be fetched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for command in (
        ("init", "-q"),
        ("config", "remote.origin.url", repository),
        ("fetch", "-q", "--depth=1", "--filter=blob:none", "origin", revision),
        ("checkout", "-qf", "FETCH_HEAD", "--", *(paths or (".",))),
    ):
        subprocess.run(["git", "-C", folder, *command], check=True)


def by_hand(folder: Path) -> str:
    """Return what a page says about files that `fetch_commit` has not fetched, or nothing."""
    return "" if (folder / ".git").exists() else " (files of commits near that release)"


def run_copy(
    file: Path, substitutes: Iterable[tuple[str, str]], *plugins: str, **settings: str
) -> list[dict[str, str]]:
    """Run the tests of a copy of a file, in which only the transport is replaced.

    Args:
        substitutes: what is replaced, each with its replacement.
        plugins: of pytest, beside in_suite/report.py.
        settings: of the environment.

    Returns:
        The line of in_suite/report.py about each test.
    """
    folder = BUILD / "over_aiordma"
    folder.mkdir(exist_ok=True)
    text = file.read_text()
    for old, new in substitutes:
        text = text.replace(old, new)
    (folder / file.name).write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    report = folder / f"{file.name}.jsonl"
    report.unlink(missing_ok=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "suites", PACKAGES))),
        "AIORDMA_DEVICE": "software",
        "AIORDMA_SUITE_REPORT": str(report),
        **settings,
    }
    command = [sys.executable, "-m", "pytest", "-q", "-c", "pytest.ini", "-o", "addopts="]
    command += [f"-p{each}" for each in ("in_suite.report", *plugins)]
    command += [f"-pno:{each}" for each in ("cacheprovider", "xdist", "aiordma")]
    command += ["--timeout", str(EACH), "--timeout-method", "signal", "--tb=short", file.name]
    with open(report.with_suffix(".log"), "w") as log:
        subprocess.run(
            command, cwd=folder, env=environment, stdout=log, stderr=log, timeout=SECONDS
        )
    found = {row["test"]: row for row in map(json.loads, report.read_text().splitlines())}
    return [*found.values()]


def summary(
    title: str, rows: Mapping[str, list[dict[str, str]]], reasons: Mapping[str, str]
) -> tuple[str, bool]:
    """Sum up the results of copies, and print each failure without a reason.

    Args:
        rows: what `run_copy` returned for each file.

    Returns:
        The summary in Markdown, and whether each failure has a reason.
    """
    lines = [title, "", "| tests | passed | failed | skipped themselves |", "|---|---|---|---|"]
    why: dict[str, str] = {}  # of each test function that failed
    known = True
    for name, of in rows.items():
        count = Counter(row["outcome"] for row in of)
        numbers = (count[each] for each in ("passed", "failed", "skipped"))
        lines.append(f"| {name} | " + " | ".join(map(str, numbers)) + " |")
        for row in of:
            if row["outcome"] in ("passed", "skipped"):
                continue
            found = reason(reasons, row["test"])
            if found is None:
                known = False
                print(f"{row['test']}: {row['outcome']}: {row.get('why')}", file=sys.stderr)
            why[row["test"].partition("[")[0]] = str(found)
    if why:
        lines += ["", "| why they fail | test functions |", "|---|---|"]
        lines += [f"| {each} | {count} |" for each, count in Counter(why.values()).most_common()]
    return "\n".join(lines), known


def reason(reasons: Mapping[str, str], test: str) -> str | None:
    """Return the reason whose pattern a test has, or None."""
    return next((why for pattern, why in reasons.items() if fnmatchcase(test, pattern)), None)


def write_page(name: str, text: str, mark: str = REST_OF_PAGE, following: str = "") -> None:
    """Put results into a page of docs/, behind a mark, and before the text that follows."""
    page = ROOT / "docs" / f"{name}.md"
    head, mark, rest = page.read_text().partition(mark)
    tail = f"\n{following}{rest.partition(following)[2]}" if following else ""
    page.write_text(f"{head}{mark}\n{text}\n{tail}")
