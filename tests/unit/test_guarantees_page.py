"""docs/guarantees.md: each promise names its test functions, and each of these exists."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.unit.sources import ROOT

PAGE = (ROOT / "docs/guarantees.md").read_text()
TESTS = re.compile(r"^\*(?!\*)([^*]+)\*$", re.MULTILINE)
"""A paragraph in italics, which lists tests."""
NAME = re.compile(r"(?:[\w-]+/)*[\w-]+\.(?:py|c)\b|`\w+`")
"""A file, whose folder can be that of the file before it, or one of its functions in backticks."""


def promises(page: str) -> dict[str, str]:
    """Return the sections by their titles."""
    _, *sections = re.split(r"^## ", page, flags=re.MULTILINE)
    return dict(section.split("\n", 1) for section in sections)


def named(section: str) -> Iterator[tuple[str, str]]:
    """Yield each (file, function) that a section names; "" for a file as a whole."""
    for paragraph in TESTS.findall(section):
        folder = file = ""
        for name in NAME.findall(paragraph):
            if name.startswith("`"):
                yield file, name.strip("`")
                continue
            place, _, base = name.rpartition("/")
            folder = place or folder
            file = f"{folder}/{base}"
            yield file, ""


def functions(file: str) -> set[str]:
    """Return the names of a file's functions, also of those in classes."""
    tree = ast.parse((ROOT / file).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def missing(section: str) -> list[str]:
    """Return what a section names and the tests do not have."""
    found = []
    for file, function in named(section):
        if not (ROOT / file).is_file():
            found.append(file)
        elif file.endswith(".py") and function and function not in functions(file):
            found.append(f"{file}: {function}")
    return found


def without_function(section: str) -> list[str]:
    """Return the files of tests that a section names without one of their functions."""
    names = [*named(section)]
    followers = [*names[1:], ("", "")]
    return [
        file
        for (file, function), (_, follower) in zip(names, followers, strict=True)
        if not function and not follower and re.search(r"/test_\w+\.py$", file)
    ]


@pytest.mark.parametrize("title", promises(PAGE))
def test_promise_names_tests_that_exist(title: str) -> None:
    section = promises(PAGE)[title]
    files = [file for file, _ in named(section)]
    assert any(re.search(r"/test_\w+\.py$", each) for each in files), "it names no test"
    assert missing(section) == []
    assert without_function(section) == []


def test_missing_names_are_found() -> None:
    page = """
## One

*tests/unit/test_gone.py, test_guarantees_page.py (`test_missing_names_are_found`, `test_gone`);
tests/devices.py (`nothing_is_left`)*

## Other

Text with *emphasis* names none.
"""
    one, other = promises(page).values()
    assert [*named(other)] == []
    assert missing(one) == [
        "tests/unit/test_gone.py",
        "tests/unit/test_guarantees_page.py: test_gone",
    ]
    assert without_function(one) == ["tests/unit/test_gone.py"]
