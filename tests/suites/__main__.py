"""`python -m tests.suites run` (see `make suites`), `fetch`, or `results` of the last run."""

import argparse
import subprocess
import sys

from tests.suites.catalogue import SUITES
from tests.suites.runner import (
    BUILD,
    ROOT,
    Row,
    counts_of_comms,
    counts_of_streams,
    every_test,
    fetch,
    lost,
    reasons,
    results,
    run,
    versions,
)

PAGES = {"streams-suites": counts_of_streams, "dask": counts_of_comms, "valkey": counts_of_comms}
MARK = "<!-- from here on written by make suites -->\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.suites")
    parser.add_argument("action", choices=("fetch", "run", "results"))
    parser.add_argument("--only", default="", help="suites whose name contains this")
    parser.add_argument("--quick", action="store_true", help="the short ones")
    parser.add_argument("--write", action="store_true", help="write the summaries in docs/")
    given = parser.parse_args()
    chosen = [s for s in SUITES if given.only in s.name and (s.is_quick or not given.quick)]
    missing = []
    for suite in list(chosen):
        try:
            fetch(suite)
        except subprocess.CalledProcessError as error:
            print(f"{suite.name} was not fetched, and does not run: {error}", file=sys.stderr)
            missing.append(suite)
            chosen.remove(suite)
    if given.action == "fetch":
        return int(bool(missing))
    rows: list[Row] = []
    for suite in chosen:
        rows += run(suite) if given.action == "run" else results(suite)
        if left_out := lost(suite):
            print(f"{suite.name}: did not run on our loop: {left_out}", file=sys.stderr)
            missing.append(suite)
        for row in rows:
            if row.suite is suite and row.is_difference:
                print(f"{suite.name}: {row.test}: {row.ours}\n{row.why}\n", flush=True)
    for name, counts in PAGES.items():
        of = [row for row in rows if row.suite.page == name]
        if not of or any(suite.page == name for suite in missing):
            continue  # the page keeps what it has
        summary = "\n\n".join([versions(of), counts(of), reasons(of)])
        print(summary)
        (BUILD / f"{name}.md").write_text(f"{summary}\n\n{every_test(of)}\n")
        if given.write:
            page = ROOT / "docs" / f"{name}.md"
            head, mark, _ = page.read_text().partition(MARK)
            page.write_text(f"{head}{mark}\n{summary}\n")
    return int(bool(missing) or any(row.is_difference for row in rows))


sys.exit(main())
