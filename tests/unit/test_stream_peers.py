"""What a stream accepts of its peer, message by message: credits where the 16-bit numbers of
messages wrap, and what comes behind a violation."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from aiordma import RemoteMemory
from aiordma.streams.protocol import GRANT_BYTES, TABLE_ENTRIES, Hello
from aiordma.verbs import WorkCompletionOpcode
from tests.fuzz.engine_world import EngineWorld
from tests.fuzz.model_protocol import Control, Operation
from tests.fuzz.rsocket_driver import DEPTH, TABLE_ADDRESS, TABLE_KEY, World

WRAP = 1 << 16
TABLE = RemoteMemory(TABLE_ADDRESS, TABLE_ENTRIES * GRANT_BYTES, TABLE_KEY)
HELLO = Hello(DEPTH, TABLE, RemoteMemory(0x100000, 1 << 20, 5))
"""It lends memory for all messages at once."""
BEFORE = 3
"""How many messages before the wrap the sender has stopped."""


class Peer:
    """Of an rsocket that sends messages of one byte."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rsocket = world.rsocket()
        self.rsocket.start(HELLO.pack())
        world.permitted = DEPTH
        world.lent.append(HELLO.buffer)
        self.rsocket.begin(is_first=True)

    def permit(self, number: int) -> None:
        """Permit messages up to this number."""
        self.world.permitted = number - self.world.sent
        self.sends(Operation.GRANT, number & 0xFFFF)

    def sends(self, operation: Operation, value: int, *, beyond: int = 0) -> None:
        """A message arrives; one with data has written as much as it says, and `beyond` more."""
        request, _word = self.world.receives.popleft()
        opcode = WorkCompletionOpcode.RECV_RDMA_WITH_IMM
        written = value + beyond if operation is Operation.DATA else 0
        request.complete(
            SimpleNamespace(
                immediate=operation << 29 | value,
                byte_len=written,
                opcode=int(opcode),
                operation=opcode,
            )
        )

    def takes(self, most: int) -> int:
        """Have it send up to so many messages; returns how many it sent."""
        before = self.world.sent
        for _ in range(most):
            self.rsocket.write(b"x")
            while self.world.sends:
                self.world.sends.popleft().complete()
        assert not self.world.faults
        return self.world.sent - before


@contextmanager
def before_the_wrap() -> Iterator[Peer]:
    """Yield a peer whose sender has BEFORE numbers left, and may use one of them."""
    world = EngineWorld(uses_words=False)
    with world.running():
        peer, end = Peer(world), WRAP - BEFORE
        while world.sent < end:
            peer.takes(min(DEPTH, end - world.sent))
            peer.permit(min(world.sent + DEPTH, end + 1))
        assert world.sent == end
        yield peer


def test_impossible_credits_at_the_wrap_are_refused() -> None:
    with before_the_wrap() as peer:
        sent = peer.world.sent
        for number in (sent - 1, sent, sent + DEPTH + 1, WRAP + sent - 1):
            assert peer.world.failure is None
            said = _refusal(peer, number)
            assert f"up to number {number & 0xFFFF}, where {sent} were sent" in said


def test_all_credits_across_the_wrap_are_used() -> None:
    with before_the_wrap() as peer:
        peer.permit(peer.world.sent + DEPTH)
        assert peer.takes(DEPTH + 5) == DEPTH
        assert peer.world.sent == WRAP - BEFORE + DEPTH
        # Behind it, a number of before the wrap takes credits back.
        assert "up to number 65535, where 13 were sent" in _refusal(peer, WRAP - 1)


def _refusal(peer: Peer, number: int) -> str:
    """Permit what no correct peer does, and return what the rsocket says; it goes on."""
    world = peer.world
    heard: list[Exception] = []
    world._endpoint.fail = heard.append
    world.permitted, kept = 0, world.permitted
    peer.permit(number)
    world.permitted = kept
    peer.rsocket.path.failed, peer.rsocket._error = False, None
    (error,) = heard
    return str(error)


def test_what_arrives_behind_a_violation_is_ignored() -> None:
    """A device may hand out both in one batch, before the connection has ended."""
    world = EngineWorld(uses_words=False)
    with world.running():
        peer = Peer(world)
        path = peer.rsocket.path
        peer.sends(Operation.DATA, 2)
        assert path.readable == 2
        peer.sends(Operation.IOMAP, 0)
        assert "riomap" in str(world.failure)
        posted = len(world.receives)
        peer.sends(Operation.DATA, 3)
        peer.sends(Operation.CONTROL, Control.SHUTDOWN)
        assert (path.readable, path.at_eof) == (2, False)
        assert len(world.receives) == posted - 2  # nor are they posted again
        assert not world.faults


def test_a_message_beyond_the_credits_is_refused() -> None:
    world = EngineWorld(uses_words=False)
    with world.running():
        peer = Peer(world)
        for _ in range(DEPTH):
            peer.sends(Operation.DATA, 1)
        assert world.failure is None
        peer.sends(Operation.DATA, 1)
        assert f"a message beyond its {DEPTH} credits" in str(world.failure)


@pytest.mark.parametrize("beyond", [-1, 1])
def test_a_length_that_was_not_written_is_refused(beyond: int) -> None:
    world = EngineWorld(uses_words=False)
    with world.running():
        peer = Peer(world)
        peer.sends(Operation.DATA, 4, beyond=beyond)
        assert f"says that it wrote 4 bytes: {4 + beyond}" in str(world.failure)
