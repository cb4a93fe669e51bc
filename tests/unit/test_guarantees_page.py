"""docs/guarantees.md: each promise is held by tests (the marker `promise`), and its numbers, and
those of docs/dead-peers.md, are the code's."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import aiordma
from aiordma import streams
from aiordma._requests.registrations import MAX_BYTES
from aiordma.integrations import valkey
from aiordma.streams.rsocket import CLOSE_TIMEOUT
from docs.site import promises
from tests.unit.sources import ROOT

PAGE = (ROOT / "docs/guarantees.md").read_text()
LIMITS = (ROOT / "docs/dead-peers.md").read_text()


def test_each_promise_is_held_by_tests() -> None:
    assert set(promises.promises()) == set(promises.held_by())


def default(call: Callable[..., Any], parameter: str) -> Any:
    """Return what a call takes for a parameter that is not given."""
    return inspect.signature(call).parameters[parameter].default


OPTIONS = aiordma.ConnectionOptions()


@pytest.mark.parametrize(
    ("wait", "seconds"),
    [
        ("`connect`, `connect_stream`", default(aiordma.connect, "timeout")),
        ("`connect`, `connect_stream`", default(streams.connect_stream, "timeout")),
        ("`connect`, `connect_stream`", default(streams.create_connection, "timeout")),
        ("`connect`, `connect_stream`", default(valkey.open_connection, "timeout")),
        ("`prepare_connection`", default(aiordma.prepare_connection, "timeout")),
        ("`accept`, `serve`", default(aiordma.listen, "accept_timeout")),
        ("`accept`, `serve`", default(streams.listen_stream, "accept_timeout")),
        ("`reconnecting`", default(aiordma.reconnecting, "attempts")),
        ("a peer that vanishes while nothing", OPTIONS.keepalive),
        ("sends in flight after a disconnect", OPTIONS.linger),
        ("`aclose`: the device's flush", OPTIONS.flush_timeout),
        ("`aclose` of a stream", CLOSE_TIMEOUT),
    ],
)
def test_stated_limits_are_the_defaults(wait: str, seconds: float | None) -> None:
    (row,) = [line for line in LIMITS.splitlines() if line.startswith(f"| {wait}")]
    stated = row.removesuffix(" |").split(" | ")[2]
    assert stated == ("no limit" if seconds is None else f"{seconds:g} s")


@pytest.mark.parametrize(
    "sentence",
    [
        f"At most {MAX_BYTES >> 20} MiB stay registered",
        f"by default {default(aiordma.Connection.read_bytes, 'max_bytes') >> 20} MiB",
        f"at most `max_delay=` ({default(aiordma.reconnecting, 'max_delay'):g} s)",
    ],
)
def test_stated_numbers_are_the_defaults(sentence: str) -> None:
    assert sentence in " ".join((PAGE + LIMITS).split())
