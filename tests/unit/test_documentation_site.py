"""The documentation site (`make docs`) has every page and every public name."""

import re

import pytest

import aiordma
from docs.site import reference
from docs.site.navigation import navigation
from tests.unit.sources import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
GENERATED = {"reference/index", "changelog", "contributing", "examples", "promises"}
FOLDERS = ("cookbook", "post-mortems")
"""Folders whose index lists all of their pages."""


def test_each_public_name_is_described_once() -> None:
    described = [name for _, _, names in reference.PAGES.values() for name in names]
    assert sorted(described) == sorted(reference.public_names()), "see PAGES of reference.py"


def test_index_lists_each_page_once() -> None:
    listed = [name for names in navigation().values() for name in names]
    pages = {path.relative_to(DOCS).with_suffix("").as_posix() for path in PAGES} - {"index"}
    inner = {name for name in pages if name.startswith(FOLDERS) and not name.endswith("/index")}
    assert sorted(listed) == sorted(pages - inner | GENERATED), "see the table of docs/index.md"


@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("RPC", "cookbook/rpc"),
        ("lease", "cookbook/leases"),
        ("Retry", "cookbook/retry"),
        ("Timeout", "dead-peers"),
        ("pytest", "cookbook/faults"),
    ],
)
def test_title_has_the_word_that_is_searched_for(word: str, page: str) -> None:
    title, _, _ = (DOCS / f"{page}.md").read_text().partition("\n")
    assert word in title


def test_each_environment_variable_is_on_its_page() -> None:
    found = set()
    for path in (ROOT / "aiordma").rglob("*.py"):
        found |= set(re.findall(r"\bAIORDMA_[A-Z]+(?:_[A-Z]+)*", path.read_text()))
    of_c = r"AIORDMA_(FAULT|OF|SIMULATED)_"  # enumerations of the C sources
    variables = {name for name in found if not re.match(of_c, name)}
    assert "AIORDMA_DEVICE" in variables
    page = (DOCS / "environment.md").read_text()
    assert [name for name in sorted(variables) if f"| {name} |" not in page] == []


def test_each_exception_is_on_the_page_of_errors() -> None:
    names = [name for name in reference.public_names() if not name.startswith("integrations.")]
    things = {name: reference.find(name) for name in names}
    exceptions = {
        name
        for name, thing in things.items()
        if isinstance(thing, type) and issubclass(thing, aiordma.RdmaError)
    }
    assert set(reference.PAGES["errors"][2]) == exceptions


@pytest.mark.parametrize("name", sorted(reference.public_names()))
def test_description_of_a_name_has_its_signature_and_text(name: str) -> None:
    key = next(key for key, (_, _, names) in reference.PAGES.items() if name in names)
    page = reference.page(key)
    (module,) = re.findall(r"^```\{py:currentmodule\} (\S+)$", page, re.MULTILINE)
    shown = f"aiordma.{name}".removeprefix(f"{module}.")
    pattern = rf"^::::\{{py:\w+\}} {re.escape(shown)}(\(.*)?$\n(:.*\n)*\n\S"
    assert re.search(pattern, page, re.MULTILINE)
