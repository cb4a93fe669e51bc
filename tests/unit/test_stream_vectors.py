"""Exchanges with C programs on rsockets, recorded in the virtual machine by
tests/interop/record_streams.py and replayed: the engine and the model take in what the C library
sent, and post what the model posted then."""

import json
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma import RemoteMemory
from aiordma.streams.protocol import GRANT_BYTES, Hello
from aiordma.verbs import WorkCompletionOpcode
from tests.fuzz.engine_world import EngineWorld
from tests.fuzz.model_protocol import Control, Operation, operation_of
from tests.fuzz.rsocket_driver import World

VECTORS = sorted(Path(__file__).with_name("vectors").glob("*.jsonl"))
Event = list[Any]


class _Unchecked(World):
    """A world in which the posts are compared with the recorded ones, and not checked."""

    def _check(self, target: RemoteMemory) -> None:
        pass


class _UncheckedEngine(EngineWorld):
    _check = _Unchecked._check


class Replay:
    """Plays the inputs of an exchange, and collects what the data path posts."""

    def __init__(self, world: World, facts: dict[str, Any]) -> None:
        self._world, self._ring = world, facts["ring"]
        self._rsocket = world.rsocket(self._ring)
        self._path = self._rsocket.path
        self._lent = world.registered[0]
        self._hello: Hello | None = None
        self._arrived = self._read = self._written = 0  # bytes of data

    def play(self, event: Event) -> list[Event]:
        """Play an input; returns it with its results, and the posts before its end."""
        self._world.done.clear()
        kind, *given = event
        results = getattr(self, f"_play_{kind}")(*given)
        if self._world.faults:
            raise self._world.faults[0]
        assert self._world.failure is None
        return [[kind, *(given if results is None else results)], *self._posts()]

    def _play_start(self, private_data: str) -> None:
        self._rsocket.start(bytes.fromhex(private_data))
        self._hello = Hello.unpack(bytes.fromhex(private_data))

    def _play_begin(self, may_send: bool) -> None:
        self._path.begin(may_send)

    def _play_arrived(self, value: int, length: int, table: str) -> None:
        view = self._lent.view
        view[self._ring :] = bytes.fromhex(table) or bytes(len(view) - self._ring)
        if value >> 29 == Operation.DATA:
            for number in range(self._arrived, self._arrived + value):
                view[number % self._ring] = number & 0xFF
            self._arrived += value
        request, word = self._world.receives.popleft()
        operation = WorkCompletionOpcode.RECV_RDMA_WITH_IMM
        immediate = value
        if self._world.uses_words:
            operation, immediate = WorkCompletionOpcode.RECV, 0
            word.view[:] = value.to_bytes(len(word), sys.byteorder)
        request.complete(
            SimpleNamespace(
                immediate=immediate, byte_len=length, opcode=int(operation), operation=operation
            )
        )

    def _play_completed(self, requests: int) -> None:
        for _ in range(requests):
            self._world.sends.popleft().complete()

    def _play_write(self, length: int, _done: int) -> Event:
        data = bytes((self._written + number) & 0xFF for number in range(length))
        done = self._path.write(data)
        self._written += done
        return [length, done]

    def _play_read(self, limit: int, _length: int) -> Event:
        data = self._path.read(limit)
        first = self._read
        assert data == bytes(number & 0xFF for number in range(first, first + len(data)))
        self._read += len(data)
        return [limit, len(data)]

    def _play_close_write(self, both: bool) -> None:
        self._path.close_write(both)

    def _play_end(self, *_recorded: object) -> Event:
        return [self._path.readable, self._path.at_eof, self._path.peer_disconnected]

    def _posts(self) -> list[Event]:
        """What was posted, as the recorder writes it."""
        done, posts = list(self._world.done), []
        while done:
            posted: Any = done.pop(0)
            if isinstance(posted, bytes):  # a word alone
                posts.append(["control", int.from_bytes(posted, sys.byteorder)])
                continue
            data, target, immediate = posted
            if immediate is None:  # its word follows
                word: Any = done.pop(0)
                immediate = int.from_bytes(word, sys.byteorder)
            posts.append(self._post(data, target, immediate))
        return posts

    def _post(self, data: bytes, target: RemoteMemory, immediate: int) -> Event:
        if immediate >> 29 == Operation.DATA:
            return ["data", target.address, target.rkey, target.length, immediate]
        if not data:
            return ["control", immediate]
        assert len(data) == GRANT_BYTES
        address, _rkey, length = struct.unpack("=QII", data)
        offset = address - self._lent.remote().address
        return ["grant", target.address, target.rkey, offset, length, immediate]


def replay(kind: type[World], vector: Path) -> tuple[list[Event], list[Event]]:
    """Return the events of a recorded exchange, and those of its replay."""
    facts, *events = (json.loads(line) for line in vector.read_text().splitlines())
    world = kind(facts["uses_words"], facts["max_recv_wr"], facts["max_send_wr"])
    replayed: list[Event] = []
    with world.running():
        play = Replay(world, facts)
        for event in events:
            if event[0] not in ("data", "grant", "control"):
                replayed += play.play(event)
    return events, replayed


@pytest.mark.parametrize("kind", [_Unchecked, _UncheckedEngine], ids=["model", "engine"])
@pytest.mark.parametrize("vector", VECTORS, ids=lambda path: path.stem)
def test_recorded_exchanges_are_replayed(vector: Path, kind: type[World]) -> None:
    recorded, replayed = replay(kind, vector)
    for number, (now, then) in enumerate(zip(replayed, recorded, strict=False), 2):
        assert now == then, f"line {number} of {vector.name}"
    assert len(replayed) == len(recorded)


def test_recordings_have_every_kind_of_message() -> None:
    """C's data, credits with and without a grant, and both ends."""
    kinds: set[tuple[str, int, bool]] = set()
    for vector in VECTORS:
        _facts, *events = (json.loads(line) for line in vector.read_text().splitlines())
        for kind, *given in events:
            if kind == "arrived":
                operation, value = operation_of(given[0])
                control = value if operation is Operation.CONTROL else 0
                has_grant = operation is Operation.GRANT and bool(given[2])
                kinds.add((operation.name, control, has_grant))
    assert kinds == {
        ("DATA", 0, False),
        ("GRANT", 0, False),
        ("GRANT", 0, True),
        ("CONTROL", Control.DISCONNECT, False),
        ("CONTROL", Control.SHUTDOWN, False),
    }


def test_recordings_are_of_both_kinds_of_devices() -> None:
    facts = [json.loads(vector.read_text().partition("\n")[0]) for vector in VECTORS]
    assert {(each["device"], each["uses_words"]) for each in facts} == {
        ("rxe", False),
        ("siw", True),
    }
