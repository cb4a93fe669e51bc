"""The engine's rooms, in C: each uses only what those below it in one list define."""

import re

import pytest

from tests.unit.sources import ROOT

ENGINE = ROOT / "aiordma" / "_native" / "engine"

# From low to high. A new room goes where its calls allow.
ORDER = (
    "table",
    "given",
    "interrupts",
    "memory",
    "completion",
    "wait",
    "request",
    "open",
    "drain",
    "port",
    "shared",
    "chain",
    "method",
    "select",
    "module",
)
# What begins a line is no call, and static is its room's own.
DEFINED = re.compile(r"^(?!static\b|extern\b)\w[\w *]*?\b(engine_\w+)(?:\(|\[|;| =)", re.MULTILINE)
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


def text_of(room: str) -> str:
    return COMMENT.sub("", (ENGINE / f"{room}.c").read_text())


def defined_in(room: str) -> set[str]:
    return set(DEFINED.findall(text_of(room)))


def test_every_room_has_a_place() -> None:
    assert sorted(path.stem for path in ENGINE.glob("*.c")) == sorted(ORDER)


def test_the_rooms_names_are_found() -> None:
    # Else the next test could not fail.
    assert {"engine_request", "engine_enter", "engine_request_type"} <= defined_in("request")
    assert "engine_port_write" in defined_in("port")
    assert "engine_given" in defined_in("given")


@pytest.mark.parametrize("room", ORDER)
def test_a_room_uses_only_those_below_it(room: str) -> None:
    above = {name for other in ORDER[ORDER.index(room) + 1 :] for name in defined_in(other)}
    assert above & set(re.findall(r"\w+", text_of(room))) == set()
