"""The software device's rooms, in C: each includes and calls only those below it in one list."""

import re
from pathlib import Path

import pytest

from tests.unit.sources import ROOT

SOFTWARE = ROOT / "aiordma" / "_native" / "software"

# From low to high: a room is a .c file, its .h, or both. docs/software-device.md is this list in
# words. A new room goes where its calls allow.
ORDER = (
    "limits",
    "crc32c",
    "frame",
    "mpa",
    "roce",
    "sidr",
    "device",
    "blocks",
    "timers",
    "engine",
    "progress",
    "events",
    "faults",
    "gids",
    "context",
    "mapping",
    "memory",
    "completion",
    "shared_receive",
    "queue_pair",
    "work",
    "udp",
    "datagram",
    "stream",
    "transmit",
    "receive",
    "connected",
    "states",
    "identifier",
    "cm_addresses",
    "group",
    "cm_datagram",
    "cm_handshakes",
    "cm_silence",
    "cm_stream",
    "cm_listen",
    "cm",
    "address",
    "fork",
    "table",
)
INCLUDED = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
# What begins a line is no call, and static is its room's own.
DEFINED = re.compile(r"^(?!static\b)\w[\w *]*?\b(\w+)(?:\(|\[|;| =)", re.MULTILINE)
TAG = re.compile(r"\b(?:struct|enum)\s+\w+")
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


def text_of(room: str) -> str:
    """Its code, without comments."""
    files = [SOFTWARE / f"{room}.h", SOFTWARE / f"{room}.c"]
    return COMMENT.sub("", "".join(path.read_text() for path in files if path.exists()))


def defined_in(room: str) -> set[str]:
    path = SOFTWARE / f"{room}.c"
    text = COMMENT.sub("", path.read_text()) if path.exists() else ""
    return {name for name in DEFINED.findall(text) if name.startswith(("sw_", "aiordma_"))}


def test_every_room_has_a_place() -> None:
    assert sorted({path.stem for path in SOFTWARE.glob("*.[ch]")}) == sorted(ORDER)


@pytest.mark.parametrize("room", ORDER)
def test_a_room_includes_only_those_below_it(room: str) -> None:
    seen = {name for name in INCLUDED.findall(text_of(room)) if "/" not in name}
    rooms = {Path(name).stem for name in seen} - {room}
    assert rooms <= set(ORDER[: ORDER.index(room)])


def test_the_rooms_names_are_found() -> None:
    # Else the next test could not fail.
    assert {"sw_device", "sw_lock"} <= defined_in("device")
    assert {"sw_find_queue_pair", "sw_end_send"} <= defined_in("queue_pair")
    assert "sw_stream_transport" in defined_in("connected")
    assert "aiordma_software" in defined_in("table")


@pytest.mark.parametrize("room", ORDER)
def test_a_room_calls_only_those_below_it(room: str) -> None:
    # Also without an include: a prototype written anew would be enough for the compiler.
    above = {name for other in ORDER[ORDER.index(room) + 1 :] for name in defined_in(other)}
    assert above & set(re.findall(r"\w+", TAG.sub("", text_of(room)))) == set()
