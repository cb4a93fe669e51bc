"""docs/verbs.md: every C function that the binding loads is there, with a name of ours that exists
and a test that exists."""

import re

import pytest

import aiordma
from tests.unit.sources import ROOT

ROWS = [
    [cell.strip() for cell in line.strip("|\n").split(" | ")]
    for line in (ROOT / "docs/verbs.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| C |")
]
LOADED = re.findall(
    r'LOAD\(\w+, \w+, "_?(\w+)"\)', (ROOT / "aiordma/_native/rdma_core.c").read_text()
)


def test_every_function_that_is_loaded_has_a_row() -> None:
    said = {name for row in ROWS for name in re.findall(r"\b(?:ibv|rdma)_\w+", row[0])}
    assert len(LOADED) > 70
    assert [name for name in LOADED if name not in said] == []


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
