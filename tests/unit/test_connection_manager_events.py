"""Every event of the connection manager has a defined effect: docs/connection-manager.md's table is
what the code does, cell by cell."""

import errno
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma import ClosedError, ConnectionOptions
from aiordma._base.origin import Place
from aiordma._connection.handshake_errors import failed_event
from aiordma._connection.listener_receives import ListenerReceives
from aiordma.verbs import CmEventType
from aiordma.verbs.event_channel import Event, EventChannel
from tests.internals import (
    NEXT_STATES,
    ConnectionState,
    IncomingRequest,
    Provider,
    Requirement,
    ffi,
    lib,
    listener_endpoint,
)
from tests.unit.numbers_device import Loop
from tests.unit.sources import ROOT

PAGE = ROOT / "docs/connection-manager.md"
COLUMNS = (
    "event",
    "`connect()`",
    "a request that waits",
    "`accept()`",
    "an established connection",
    "a listener",
    "elsewhere",
)
NEWER = "newer than aiordma"
NOTHING = ""

S = ConnectionState


def table() -> dict[str, dict[str, str]]:
    rows = [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in PAGE.read_text().splitlines()
        if line.startswith("|") and len(line.split("|")) == len(COLUMNS) + 2
    ]
    assert tuple(rows[0]) == COLUMNS
    return {row[0]: dict(zip(COLUMNS, row, strict=True)) for row in rows[2:]}


def event(kind: CmEventType) -> Event:
    return Event(kind, -1, 1, 2 if kind is CmEventType.CONNECT_REQUEST else 0, b"", 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("kind", "status", "number"),
    [
        (CmEventType.ADDR_ERROR, errno.ENETUNREACH, errno.ENETUNREACH),
        (CmEventType.ADDR_ERROR, errno.EACCES, errno.ENETUNREACH),  # TCP's, of a broadcast address
        (CmEventType.ADDR_ERROR, errno.ENODEV, errno.ENODEV),
        (CmEventType.ADDR_ERROR, 1, None),  # librdmacm gave no reason
        (CmEventType.ROUTE_ERROR, errno.ENETUNREACH, errno.ENETUNREACH),
        (CmEventType.ROUTE_ERROR, errno.EINVAL, errno.EHOSTUNREACH),
        (CmEventType.UNREACHABLE, errno.EHOSTUNREACH, errno.EHOSTUNREACH),
        (CmEventType.UNREACHABLE, 1, errno.ETIMEDOUT),
        (CmEventType.CONNECT_ERROR, errno.EPROTO, errno.EPROTO),
        (CmEventType.REJECTED, errno.ETIMEDOUT, errno.ECONNREFUSED),
        (CmEventType.DISCONNECTED, 1, errno.ECONNRESET),
    ],
)
def test_error_of_an_event_has_the_errno_of_a_sockets(
    kind: CmEventType, status: int, number: int | None
) -> None:
    error = failed_event("what", event(kind)._replace(status=-status))
    assert isinstance(error, OSError)
    assert error.errno == number


def error_of(kind: CmEventType) -> str:
    return type(failed_event("what", event(kind))).__name__


@pytest.mark.parametrize("kind", sorted(CmEventType))
def test_unknown_status_is_not_called_a_permission(kind: CmEventType) -> None:
    # librdmacm's -1 says that a call of its own failed; taken as an errno it would be EPERM.
    assert "not permitted" not in str(failed_event("what", event(kind)))


def steps(kind: CmEventType, *states: ConnectionState) -> str:
    """What an event does in the one of these states where it does anything."""
    effects = set()
    for state in states:
        after = NEXT_STATES.get((state, kind), state)
        if after is state:
            continue
        if after in (S.BROKEN, S.DISCONNECTED):
            effects.add(error_of(kind))
        else:
            effects.add("established" if after is S.ESTABLISHED else "next step")
    assert len(effects) < 2
    return effects.pop() if effects else NOTHING


class FakeReactor:
    """Takes everything, and does nothing."""

    def __init__(self) -> None:
        self.channel = None
        self.loop = Loop()
        self.handlers: list[Any] = []

    def enter(self, _closable: Any) -> None: ...

    def after_events(self, callback: Any) -> None: ...

    def subscribe(self, _identifier: Any, handler: Any) -> None:
        self.handlers.append(handler)


def identifier(*_arguments: Any, **_options: Any) -> Any:
    ours, peer = ("192.0.2.2", 2), ("192.0.2.1", 1)
    return SimpleNamespace(peer_address=peer, local_address=ours, device_key=0)


NO_SHARED_RECEIVES = ListenerReceives(None, ConnectionOptions())


def request_effect(kind: CmEventType) -> str:
    reactor: Any = FakeReactor()
    asking = event(CmEventType.CONNECT_REQUEST)
    request = IncomingRequest(
        *(reactor, ConnectionOptions(), 1.0, NO_SHARED_RECEIVES, identifier(), asking),
        *(Counter[str](), Place("")),
    )
    request.was_answered = True  # or it would warn that it was not closed
    request.handle_event(event(kind))
    return NOTHING if request.withdrawal is None else error_of(request.withdrawal.type)


def listener_effect(kind: CmEventType, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(listener_endpoint, "Identifier", identifier)
    reactor: Any = FakeReactor()
    listening = listener_endpoint.ListenerEndpoint(
        reactor,
        identifier(),
        ConnectionOptions(),
        8,
        Requirement("auto"),
        1.0,
        NO_SHARED_RECEIVES,
        IncomingRequest.accept,
    )
    (handle,) = reactor.handlers
    handle(event(kind))
    listening.teardown.is_closing = True  # or it would warn that it was not closed
    for request in listening.requests:
        request.was_answered = True
    if listening.failure is not None:
        return type(listening.failure).__name__
    return "a request" if listening.requests else NOTHING


def test_the_table_has_a_row_for_each_event_and_for_newer_ones() -> None:
    assert list(table()) == [kind.name for kind in CmEventType] + [NEWER]


@pytest.mark.parametrize("kind", CmEventType, ids=lambda kind: kind.name)
def test_an_event_does_what_the_table_says(
    kind: CmEventType, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = table()[kind.name]
    accept = steps(kind, S.ACCEPTING)
    assert row == {
        "event": kind.name,
        "`connect()`": steps(kind, S.RESOLVING_ADDRESS, S.RESOLVING_ROUTE, S.CONNECTING),
        "a request that waits": request_effect(kind),
        # A peer that was accepted, and has gone again, is no failure (see Endpoint.handle_event).
        "`accept()`": "ended" if kind is CmEventType.DISCONNECTED else accept,
        "an established connection": steps(kind, S.ESTABLISHED),
        "a listener": listener_effect(kind, monkeypatch),
        "elsewhere": row["elsewhere"],
    }
    # An event that does nothing to connections is not forgotten: the page says what it is for.
    everywhere = [row[column] for column in COLUMNS[1:-1]]
    assert row["elsewhere"] or set(everywhere) != {NOTHING}


@pytest.mark.parametrize("kind", CmEventType, ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    "state", [S.DISCONNECTED, S.BROKEN, S.CLOSED], ids=lambda state: state.name
)
def test_no_event_does_anything_to_what_has_ended(
    kind: CmEventType, state: ConnectionState
) -> None:
    assert NEXT_STATES.get((state, kind), state) is state


def test_the_pages_other_names_exist() -> None:
    text = PAGE.read_text()
    options = re.findall(r"RDMA_OPTION_ID_\w+", text)
    assert sorted(options) == sorted(
        name for name in dir(lib) if name.startswith("RDMA_OPTION_ID_")
    )


class PlayedLibrary:
    """A librdmacm whose channel holds events of the given numbers; what is between it and Python
    (aiordma_next_cm_event) is the real thing."""

    def __init__(self, *numbers: int) -> None:
        self.waiting = list(numbers)
        self.acknowledged = 0
        self.on_acknowledge: Callable[[], object] = lambda: None
        self.id = ffi.new("struct rdma_cm_id *")
        self.id.ps = lib.RDMA_PS_TCP
        # struct rdma_cm_event: id, listen_id, event, status, and the parameters behind them.
        self.event = ffi.new("uint64_t[64]")
        self.event[0] = int(ffi.cast("uintptr_t", self.id))
        self.channel = ffi.new("struct rdma_event_channel *")
        self.reading, self._writing = os.pipe()
        self.channel.fd = self.reading
        self.table = ffi.new("struct aiordma_provider *")
        types = dict(ffi.typeof("struct aiordma_provider").fields)
        self._kept = []
        for name, function in (
            ("create_event_channel", lambda: self.channel),
            ("destroy_event_channel", lambda _channel: None),
            ("get_cm_event", self._get),
            ("ack_cm_event", self._acknowledge),
        ):
            self._kept.append(ffi.callback(types[name].type, function))
            setattr(self.table, name, self._kept[-1])

    def _get(self, _channel: Any, out: Any) -> int:
        if not self.waiting:
            ffi.errno = errno.EAGAIN
            return -1
        ffi.cast("int *", self.event)[4] = self.waiting.pop(0)
        out[0] = ffi.cast("struct rdma_cm_event *", self.event)
        return 0

    def _acknowledge(self, _event: Any) -> int:
        self.acknowledged += 1
        self.on_acknowledge()
        return 0

    def close(self) -> None:
        os.close(self.reading)
        os.close(self._writing)


@pytest.mark.parametrize("newer", [max(CmEventType) + 1, 1000])
def test_an_event_newer_than_aiordma_is_acknowledged_and_dropped(newer: int) -> None:
    library = PlayedLibrary(newer, CmEventType.TIMEWAIT_EXIT, newer, CmEventType.ADDR_RESOLVED)
    try:
        with EventChannel(Provider("played", library.table)) as channel:
            kinds = [event.type for event in channel.events()]
        assert kinds == [CmEventType.TIMEWAIT_EXIT, CmEventType.ADDR_RESOLVED]
        assert library.acknowledged == 4
    finally:
        library.close()
    row = table()[NEWER]
    assert {row[column] for column in COLUMNS[1:-1]} == {NOTHING}


@pytest.fixture
def played() -> Iterator[tuple[PlayedLibrary, EventChannel]]:
    library = PlayedLibrary(CmEventType.TIMEWAIT_EXIT, CmEventType.ADDR_RESOLVED)
    try:
        with EventChannel(Provider("played", library.table)) as channel:
            yield library, channel
    finally:
        library.close()


def test_each_thread_gets_the_event_that_it_took(
    played: tuple[PlayedLibrary, EventChannel],
) -> None:
    """The call that takes an event releases the GIL, so another thread can take the next one before
    it returns."""
    library, channel = played
    theirs: list[CmEventType] = []

    def take_another() -> None:
        library.on_acknowledge = lambda: None
        theirs.append(next(channel.events()).type)

    library.on_acknowledge = take_another
    assert next(channel.events()).type is CmEventType.TIMEWAIT_EXIT
    assert theirs == [CmEventType.ADDR_RESOLVED]


def test_closed_channel_has_no_events(played: tuple[PlayedLibrary, EventChannel]) -> None:
    library, channel = played
    for event in channel.events():
        assert event.type is CmEventType.TIMEWAIT_EXIT
        channel.close()  # ends the iteration that it is called in
    assert library.acknowledged == 1
    with pytest.raises(ClosedError, match="EventChannel is closed"):
        next(channel.events())
