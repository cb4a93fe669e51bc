"""A pytest plugin for other projects' suites: it writes a line of JSON for each test.

Environment: AIORDMA_SUITE_REPORT (the file to write).
"""

import json
import os
from collections.abc import Generator, Iterator
from typing import Any

import pytest

_facts: dict[str, int] = {}


def count(name: str, number: int = 1) -> None:
    """Add to a fact of the test that runs."""
    _facts[name] = _facts.get(name, 0) + number


def _write(row: dict[str, Any]) -> None:
    with open(os.environ["AIORDMA_SUITE_REPORT"], "a") as report:
        report.write(json.dumps(row) + "\n")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        with open(os.environ["AIORDMA_SUITE_REPORT"]) as report:
            done = {json.loads(line)["test"] for line in report}
    except FileNotFoundError:
        return
    items[:] = [each for each in items if each.nodeid not in done]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    _facts.clear()
    reports: list[pytest.TestReport] = []
    item.stash[_REPORTS] = reports
    _write({"test": item.nodeid, "outcome": "crashed"})
    try:
        return (yield)
    finally:
        outcome, why = "passed", ""
        for each in reports:
            if each.failed:
                outcome, why = "failed", str(each.longreprtext)[-1500:]
                break
            if each.skipped:
                outcome = "skipped"
                why = str(each.longrepr[2] if isinstance(each.longrepr, tuple) else each.longrepr)
        _write({"test": item.nodeid, "outcome": outcome, "why": why, **_facts})


_REPORTS = pytest.StashKey[list[pytest.TestReport]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report: pytest.TestReport = yield
    item.stash[_REPORTS].append(report)
    return report
