"""docs/verbs.md: the names of aiordma and the tests that its tables list exist."""

import re

import pytest

import aiordma
from docs.site import reference
from tests.unit.sources import ROOT

ROWS = [
    [cell.strip() for cell in line.strip("|\n").split(" | ")]
    for line in (ROOT / "docs/verbs.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| C |")
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip())
def test_a_row_names_what_exists(row: list[str]) -> None:
    _, manual, ours, example, proof = row
    assert re.fullmatch(r"\[(\w+)\]\(https://man7.org/linux/man-pages/man3/\1.3.html\)", manual)
    link = re.fullmatch(r"\[[^]]+\]\(([\w/.-]*)(#[\w-]+)?\)", example)
    path = f"docs/{link[1] or 'verbs.md'}" if link else example
    generated = path.startswith("docs/reference/") and path[15:-3] in reference.PAGES
    assert generated or (ROOT / path).is_file(), example
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
