"""docs/guarantees.md: each promise names test functions that exist, and its numbers are right."""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import aiordma
from aiordma import streams
from aiordma._requests.registrations import MAX_BYTES
from aiordma.streams.rsocket import CLOSE_TIMEOUT
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


def default(call: Callable[..., Any], parameter: str) -> Any:
    """Return what a call takes for a parameter that is not given."""
    return inspect.signature(call).parameters[parameter].default


OPTIONS = aiordma.ConnectionOptions()


@pytest.mark.parametrize(
    ("wait", "seconds"),
    [
        ("`connect`, all steps", default(aiordma.connect, "timeout")),
        ("`connect`, all steps", default(streams.connect_stream, "timeout")),
        ("`accept`, `serve`: the handshake", default(aiordma.listen, "accept_timeout")),
        ("`accept`, `serve`: the handshake", default(streams.listen_stream, "accept_timeout")),
        ("a peer that vanishes while nothing", OPTIONS.keepalive),
        ("`aclose`, and the flush", OPTIONS.flush_timeout),
        ("`aclose` of a stream", CLOSE_TIMEOUT),
    ],
)
def test_stated_limits_are_the_defaults(wait: str, seconds: float | None) -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| {wait}")]
    stated = row.split(" | ")[2]
    assert stated == ("no limit" if seconds is None else f"{seconds:g} s")


@pytest.mark.parametrize(
    "sentence",
    [
        f"`linger` sets the delay, {OPTIONS.linger} s by default",
        f"`flush_timeout` seconds to flush, {OPTIONS.flush_timeout} by default",
        f"At most `max_bytes` ({MAX_BYTES >> 20} MiB by default",
        f"by default {default(aiordma.Connection.read_bytes, 'max_bytes') >> 20} MiB",
        f"up to `max_delay` ({default(aiordma.reconnecting, 'max_delay'):g} s)",
    ],
)
def test_stated_numbers_are_the_defaults(sentence: str) -> None:
    assert sentence in " ".join(PAGE.split())
