"""`python -m tests.suites run` (see `make suites`), `fetch`, or `results` of the last run."""

import argparse
import sys
from pathlib import Path

from tests.suites.catalogue import SUITES
from tests.suites.runner import ROOT, Row, fetch, results, run, table

PAGE = ROOT / "docs" / "streams-suites.md"
MARK = "<!-- from here on written by make suites -->\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.suites")
    parser.add_argument("action", choices=("fetch", "run", "results"))
    parser.add_argument("--only", default="", help="suites whose name contains this")
    parser.add_argument("--quick", action="store_true", help="the short ones")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    given = parser.parse_args()
    chosen = [s for s in SUITES if given.only in s.name and (s.is_quick or not given.quick)]
    for suite in chosen:
        fetch(suite)
    if given.action == "fetch":
        return 0
    rows: list[Row] = []
    for suite in chosen:
        rows += run(suite) if given.action == "run" else results(suite)
        for row in rows:
            if row.suite is suite and row.is_difference:
                print(f"{suite.name}: {row.test}: {row.ours}\n{row.why}\n", flush=True)
    page = table(rows)
    print(page.partition("\n\n")[0])
    if given.write:
        head, mark, _ = Path(PAGE).read_text().partition(MARK)
        PAGE.write_text(f"{head}{mark}\n{page}")
    return int(any(row.is_difference for row in rows))


sys.exit(main())
