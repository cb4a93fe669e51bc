"""A request that is not answered: the end of its loop rejects the peer."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma import ClosedError, ConnectionOptions, ConnectionRequest
from aiordma._connection.incoming import IncomingRequest
from tests.internals import ListenerReceives, Place, current_event_loop

pytestmark = pytest.mark.anyio


class Reactor:
    """Counts what the loop's end would close, and destroys at once."""

    def __init__(self) -> None:
        self.entered: list[Any] = []
        self.loop = current_event_loop()
        self.forgotten: list[Any] = []

    def enter(self, closable: Any) -> None:
        self.entered.append(closable)

    def leave(self, closable: Any) -> None:
        self.entered.remove(closable)

    def require_here(self, _what: object, _close: Any) -> None:
        """The test's loop is the one that it belongs to."""

    def unsubscribe(self, identifier: Any) -> None:
        self.forgotten.append(identifier)

    def drop(self, identifier: Any, then: Any) -> None:
        self.unsubscribe(identifier)
        identifier.close()
        then()


class Identifier:
    peer_address = ("192.0.2.1", 1)

    def __init__(self) -> None:
        self.calls: list[str] = []

    def reject(self, private_data: bytes) -> None:
        assert private_data == b""
        self.calls.append("reject")

    def close(self) -> None:
        self.calls.append("close")


async def test_closing_a_request_refuses_the_peer_once() -> None:
    reactor, identifier = Reactor(), Identifier()
    asked: Any = SimpleNamespace(private_data=b"")
    made: Any = (
        reactor,
        ConnectionOptions(),
        1.0,
        ListenerReceives(None, ConnectionOptions()),
        identifier,
        asked,
        Counter(),
        Place(""),
    )
    request = ConnectionRequest(IncomingRequest(*made))
    assert len(reactor.entered) == 1
    await request.aclose()
    await request.aclose()
    assert identifier.calls == ["reject", "close"]
    assert (reactor.entered, reactor.forgotten) == ([], [identifier])
    with pytest.raises(ClosedError, match="answered"):
        await request.accept()
