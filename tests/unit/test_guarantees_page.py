"""docs/guarantees.md: each promise is held by tests (the marker `promise`), and its numbers are
right."""

import ast
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import aiordma
from aiordma import streams
from aiordma._requests.registrations import MAX_BYTES
from aiordma.streams.rsocket import CLOSE_TIMEOUT
from tests.unit.sources import ROOT

PAGE = (ROOT / "docs/guarantees.md").read_text()


def marked() -> dict[str, list[str]]:
    """Return the tests of each promise that a marker names."""
    found: dict[str, list[str]] = {}
    for path in ROOT.glob("tests/**/test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for each in node.decorator_list:
                if isinstance(each, ast.Call) and ast.unparse(each.func) == "pytest.mark.promise":
                    for title in map(ast.literal_eval, each.args):
                        found.setdefault(title, []).append(f"{path}::{node.name}")
    return found


def test_each_promise_is_held_by_tests() -> None:
    assert set(re.findall(r"^## (.+)$", PAGE, re.MULTILINE)) == set(marked())


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
