"""`python -m tests.suites`: see `make suites`."""

import argparse
import subprocess
import sys

from tests.suites.catalogue import SUITES
from tests.suites.common import BUILD, write_page
from tests.suites.runner import (
    Row,
    counts_of_comms,
    counts_of_streams,
    every_test,
    fetch,
    lost,
    reasons,
    run,
    versions,
)

PAGES = {"streams-suites": counts_of_streams, "dask": counts_of_comms, "valkey": counts_of_comms}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.suites")
    parser.add_argument("--only", default="", help="suites whose name contains this")
    parser.add_argument("--write", action="store_true", help="write the summaries in docs/")
    given = parser.parse_args()
    chosen = [suite for suite in SUITES if given.only in suite.name]
    missing = []
    for suite in list(chosen):
        try:
            fetch(suite)
        except subprocess.CalledProcessError as error:
            print(f"{suite.name} was not fetched, and does not run: {error}", file=sys.stderr)
            missing.append(suite)
            chosen.remove(suite)
    rows: list[Row] = []
    for suite in chosen:
        rows += run(suite)
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
            write_page(name, summary)
    return int(bool(missing) or any(row.is_difference for row in rows))


sys.exit(main())
