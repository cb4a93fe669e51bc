"""docs/verbs.md: the names of aiordma and the tests that its tables list exist."""

import re

import pytest

import aiordma
from tests.unit.sources import ROOT

ROWS = [
    [cell.strip() for cell in line.strip("|\n").split(" | ")]
    for line in (ROOT / "docs/verbs.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| C |")
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip())
def test_a_row_names_what_exists(row: list[str]) -> None:
    _, ours, proof = row
    names = re.findall(r"`([\w.]+)`", ours)
    assert names
    for name in names:
        thing: object = aiordma
        for part in name.split("."):
            fields = getattr(thing, "__annotations__", {})
            thing = fields[part] if part in fields else getattr(thing, part, None)
            assert thing is not None, name
    path, _, test = proof.strip().strip("|").strip().partition("::")
    assert re.search(rf"\bdef {test}\(", (ROOT / "tests" / path).read_text()), proof
