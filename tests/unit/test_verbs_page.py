"""docs/verbs.md: its tables name what exists, and examples and tests that use it."""

import re
from pathlib import Path

import pytest

import aiordma
from tests.unit.sources import ROOT

ROWS = [
    [cell.strip() for cell in line.strip("|\n").split(" | ")]
    for line in (ROOT / "docs/verbs.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| C |")
]
LINK = re.compile(r"\[[^]]+\]\(([\w/.-]+)(?:#([\w-]+))?\)")


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _section(page: Path, anchor: str | None) -> str:
    """Return the text of a section with its subsections; without an anchor, of the page."""
    text = page.read_text()
    if anchor is None:
        return text
    headings = list(re.finditer(r"^(#+) (.*)$", text, re.MULTILINE))
    for number, heading in enumerate(headings):
        if _anchor(heading[2]) == anchor:
            later = (each for each in headings[number + 1 :] if len(each[1]) <= len(heading[1]))
            end = next(later, None)
            return text[heading.start() : end.start() if end else len(text)]
    raise AssertionError(f"{page} has no section #{anchor}")


def _programs(example: str) -> str:
    """Return the programs of a row's examples: links to sections, and files."""
    found = ""
    for each in example.split(", "):
        link = LINK.fullmatch(each)
        if link is None:
            found += (ROOT / each).read_text()
        else:
            section = _section(ROOT / "docs" / link[1], link[2])
            found += "".join(re.findall(r"^```python \w+\n(.*?)^```$", section, re.DOTALL | re.M))
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].partition("]")[0])
def test_a_row_names_what_exists(row: list[str]) -> None:
    function, ours, _, proof = row
    assert re.match(r"\[[^]]+\]\(https://man7.org/linux/man-pages/man3/\w+\.3\.html\)", function)
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


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].partition("]")[0])
def test_example_of_a_row_uses_its_names(row: list[str]) -> None:
    _, ours, example, _ = row
    names = [name.split(".")[-1] for name in re.findall(r"`([\w.]+)`", ours)]
    names += re.findall(r"\b(\w+)=", ours)
    programs = _programs(example)
    assert [name for name in names if not re.search(rf"\b{name}\b", programs)] == []
