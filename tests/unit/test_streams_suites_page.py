"""The summaries that `make suites` writes into docs/ count each test that did not pass, by
suite and by reason."""

import re

from tests.suites.catalogue import SUITES
from tests.suites.runner import Row, counts_of_streams, every_test, reasons
from tests.unit.sources import ROOT

UVLOOP = next(suite for suite in SUITES if suite.name == "uvloop test_tcp")


def row(test: str, ours: str, stock: str, uses: bool = True) -> Row:
    return Row(UVLOOP, test, ours, stock, uses, through_gateway=False, length=0, why="")


ROWS = [
    row("test_passes", "passed", "passed"),
    row("test_opens_nothing", "passed", "passed", uses=False),
    row("test_create_server_4", "failed", "passed"),
    row("test_create_server_6", "failed", "passed"),
    row("test_fails_anyway", "failed", "failed"),
    row("test_is_skipped", "skipped", "skipped", uses=False),
]


def test_counts_name_each_suite_that_ran() -> None:
    *_, line = counts_of_streams(ROWS).splitlines()
    assert line == "| uvloop test_tcp | 4 | 1 | 1 | 1 | 1 | 1 | 1 | 4 |"


def test_each_reason_is_counted() -> None:
    assert reasons(ROWS).splitlines()[2:] == [
        "| expects other words in an error of the same class | 1 |",
        "| departure: needs SO_REUSEPORT, which librdmacm does not have | 1 |",
        "| fails on both | 1 |",
    ]


def test_difference_without_a_reason_is_an_open_fault() -> None:
    assert reasons([row("test_new", "failed", "passed")]).endswith("| an open fault | 1 |")


def test_full_table_has_the_tests_that_use_streams_or_fail() -> None:
    named = re.findall(r"^\| (test_\w+)", every_test(ROWS), re.MULTILINE)
    assert named == ["test_passes", *(each.test for each in ROWS[2:5])]


def test_page_counts_as_many_reasons_as_tests_that_did_not_pass() -> None:
    page = (ROOT / "docs/streams-suites.md").read_text()
    suites = re.findall(r"^\| .+? \|((?: \d+ \|){8})$", page, re.MULTILINE)
    counted = [[int(each) for each in re.findall(r"\d+", line)] for line in suites]
    found = re.findall(r"^\| [^|]+ \| (\d+) \|$", page, re.MULTILINE)
    assert "an open fault" not in page
    assert sum(sum(line[4:7]) for line in counted) == sum(map(int, found)) > 0
