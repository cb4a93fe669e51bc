"""A peer that asks for a connection and, once accepted, sends nothing until the test says so, or
breaks the rules."""

import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress

import anyio
from anyio import to_thread

from aiordma import RemoteMemory
from aiordma.verbs import (
    CmEventType,
    ConnectionParameters,
    EventChannel,
    QueuePairState,
    WorkRequestOpcode,
)
from tests.device.identifiers import expect, next_event, resolved
from tests.device.test_own_queue_pairs import End
from tests.devices import ADDRESS, DEVICE
from tests.internals import SOFTWARE
from tests.unit.mpa_peer import LOWER, UPPER, Frame
from tests.unit.stream_peer import SEND, tagged, untagged

WRITE = 0
SECONDS = 60

_S = QueuePairState
_ENDS = (CmEventType.REJECTED, CmEventType.DISCONNECTED, CmEventType.CONNECT_ERROR)


class SilentPeer(ABC):
    """Its calls may block: the coroutines run them in a thread."""

    async def finish(self) -> bytes:
        """Finish the handshake, and return the private data that it was accepted with."""
        return await to_thread.run_sync(self._finish)

    async def misbehave(self, message: str) -> None:
        """Send a message once accepted, without finishing the handshake.

        Args:
            message: "long": a SEND of 64 bytes; "write": a WRITE to memory that nobody has
                registered.
        """
        await to_thread.run_sync(self._misbehave, message)

    async def ended(self) -> None:
        """Return once the other side has ended the handshake, or the connection."""
        await to_thread.run_sync(self._await_end)

    @abstractmethod
    def _finish(self) -> bytes: ...

    @abstractmethod
    def _misbehave(self, message: str) -> None: ...

    @abstractmethod
    def _await_end(self) -> None: ...


class _PlainPeer(SilentPeer):
    """Of the software device: a plain socket."""

    def __init__(self, port: int, stack: ExitStack, private_data: bytes) -> None:
        self._socket = stack.enter_context(socket.create_connection((ADDRESS, port), SECONDS))
        request = Frame(inbound=4 | UPPER, outbound=4 | UPPER | LOWER, private_data=private_data)
        self._socket.sendall(request.pack())

    def _finish(self) -> bytes:
        reply = Frame.receive(self._socket)
        assert reply.is_reply
        self._socket.sendall(tagged(WRITE, 0, 0))
        return reply.private_data

    def _misbehave(self, message: str) -> None:
        assert Frame.receive(self._socket).is_reply
        frames = {"long": untagged(SEND, 0, 1, bytes(64)), "write": tagged(WRITE, 0xBAD, 0, b"x")}
        self._socket.sendall(frames[message])

    def _await_end(self) -> None:
        with suppress(ConnectionResetError):
            while self._socket.recv(1000):
                pass


class _VerbsPeer(SilentPeer):
    """Of a RoCE device: a client with its own queue pair, which has to call rdma_establish."""

    def __init__(self, port: int, stack: ExitStack, private_data: bytes) -> None:
        self._channel = stack.enter_context(EventChannel())
        self._identifier = resolved(self._channel, port, stack)
        self._end = End(stack.enter_context(self._identifier.context()), stack)
        self._end.move(self._identifier, _S.INIT)
        self._identifier.connect(
            ConnectionParameters(qp_num=self._end.pair.qp_num, private_data=private_data)
        )

    def _finish(self) -> bytes:
        data = expect(self._channel, CmEventType.CONNECT_RESPONSE).private_data
        self._end.move(self._identifier, _S.RTR, _S.RTS)
        self._identifier.establish()
        return data

    def _misbehave(self, message: str) -> None:
        expect(self._channel, CmEventType.CONNECT_RESPONSE)
        self._end.move(self._identifier, _S.RTR, _S.RTS)
        if message == "long":
            self._end.pair.post_send(1, [self._end.memory[:]])
        else:
            nowhere = RemoteMemory(0x10000, 1, 0xBAD)
            self._end.pair.post_send(
                1, [self._end.memory[:1]], opcode=WorkRequestOpcode.RDMA_WRITE, remote=nowhere
            )

    def _await_end(self) -> None:
        while next_event(self._channel).type not in _ENDS:
            pass


@asynccontextmanager
async def silent_peer(port: int, private_data: bytes = b"") -> AsyncIterator[SilentPeer]:
    """Yield a peer that has asked for a connection."""
    made = _PlainPeer if DEVICE == SOFTWARE else _VerbsPeer
    with ExitStack() as stack:
        peer = await to_thread.run_sync(made, port, stack, private_data)
        try:
            yield peer
        finally:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(stack.close)
