"""The table at the end of `make test`, from what the test runs left in the results folder.

Each run writes summary-<device>.json (tests/conftest.py):
    {"device": str,
     "rows": [{"loop": str, "kind": str, "passed": int, "failed": int, "skipped": int}, ...],
     "skips": {reason: count, ...}}
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

OUTCOMES = ("passed", "failed", "skipped")
Row = tuple[str, ...]


def report(results: Path, expected: list[str]) -> int:
    """Print every summary in `results`, the reasons for skips, and the totals as the last line.

    Returns 1 if a test failed, nothing passed, or the summary of an `expected` device is missing
    or unreadable: a run that died leaves none and must not look like a success.
    """
    rows: list[Row] = []
    totals: Counter[str] = Counter()
    skips: Counter[str] = Counter()
    found = set()
    problems = []
    for path in sorted(results.glob("summary-*.json")):
        try:
            summary = json.loads(path.read_text())
            new_rows, counts = read(summary)
            skips.update({f"{summary['device']}: {why}": n for why, n in summary["skips"].items()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problems.append(f"{path.name} cannot be read: {error!r}")
            continue
        rows += new_rows
        totals += counts
        found.add(summary["device"])
    problems += [
        f"no results for {device}: its run ended early, see above"
        for device in expected
        if device not in found
    ]
    print()
    print(table([("device", "loop", "kind", *OUTCOMES), *rows]))
    for reason, count in skips.most_common():
        print(f"skipped {count:5}  {reason}")
    for problem in problems:
        print(f"PROBLEM        {problem}")
    print(", ".join(f"{totals[outcome]} {outcome}" for outcome in OUTCOMES), flush=True)
    return int(bool(totals["failed"] or problems or not totals["passed"]))


def read(summary: dict[str, Any]) -> tuple[list[Row], Counter[str]]:
    """The table's rows of one summary, and its sums."""
    rows = []
    totals: Counter[str] = Counter()
    for row in summary["rows"]:
        counts = {outcome: int(row[outcome]) for outcome in OUTCOMES}
        totals.update(counts)
        rows.append((summary["device"], row["loop"], row["kind"], *map(str, counts.values())))
    return rows, totals


def table(rows: list[Row]) -> str:
    """Columns as wide as their widest cell; the counts, which come last, flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        words = [cell.ljust(width) for cell, width in zip(row[:-3], widths, strict=False)]
        counts = [cell.rjust(width) for cell, width in zip(row[-3:], widths[-3:], strict=True)]
        lines.append("  ".join(words + counts))
    return "\n".join(lines)
