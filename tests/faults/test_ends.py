"""EndOfStream says that the peer's program ended the connection. Whatever else ended it is raised
as the cause, and what the device refused is logged and counted."""

import logging
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

import anyio
import anyio.to_thread
import pytest

import aiordma
from aiordma import DeviceEventError, DisconnectedError
from aiordma.verbs import AsyncEventType
from tests.device.players import one_loop
from tests.devices import ADDRESS
from tests.unit.stream_peer import SEND, frame

from .raw_iwarp import RawConnection, read_request, reset, tagged, untagged

pytestmark = [pytest.mark.anyio, pytest.mark.natively, one_loop]

WHOLE = untagged(SEND, b"second", queue=0, number=2)
UNFINISHED = frame(struct.pack(">BBIIII", 0x01, 0x40 | SEND, 0, 0, 2, 0), b"half of it")

BROKEN: dict[str, tuple[bytes, type[Exception], AsyncEventType | None]] = {
    "a corrupt CRC": (
        WHOLE[:-1] + bytes([WHOLE[-1] ^ 1]),
        DeviceEventError,
        AsyncEventType.QP_REQ_ERR,
    ),
    "garbage": (bytes(200), DeviceEventError, AsyncEventType.QP_REQ_ERR),
    "half a frame": (WHOLE[:-8], DisconnectedError, None),
    "half a message": (UNFINISHED, DisconnectedError, None),
    "a TERMINATE": (untagged(7, bytes(4), queue=2, number=1), DisconnectedError, None),
    "a WRITE to other memory": (
        tagged(0, 77, 0, b"evil"),
        DeviceEventError,
        AsyncEventType.QP_ACCESS_ERR,
    ),
    "a READ of other memory": (
        read_request(77, 0, 8),
        DeviceEventError,
        AsyncEventType.QP_ACCESS_ERR,
    ),
}


async def end_of(
    last: bytes, end: Callable[[RawConnection], object]
) -> tuple[list[bytes], Exception]:
    """Return the messages of a peer that sends two messages and these bytes, and then ends the
    connection; and what the next `receive` raises."""

    def attack() -> None:
        peer = RawConnection(listener.port, uses_crc=True)
        peer.send(b"first", 1)
        peer.socket.sendall(last)
        end(peer)

    got: list[bytes] = []
    async with aiordma.listen(ADDRESS, 0) as listener, anyio.create_task_group() as group:
        group.start_soon(anyio.to_thread.run_sync, attack)
        async with await listener.accept() as connection:
            with anyio.fail_after(30):
                while True:
                    try:
                        got.append(await connection.receive())
                    except (aiordma.RdmaError, aiordma.EndOfStream) as error:
                        return got, error
    raise AssertionError("the connection goes on")


async def end_of_messages(connection: aiordma.Connection) -> Exception:
    while True:
        try:
            await connection.receive()
        except (aiordma.RdmaError, aiordma.EndOfStream) as error:
            return error


@pytest.mark.promise("Messages arrive whole and in order")
async def test_orderly_end_is_end_of_stream() -> None:
    got, error = await end_of(WHOLE, lambda peer: peer.socket.close())
    assert (got, type(error)) == ([b"first", b"second"], aiordma.EndOfStream)


@pytest.mark.promise("Messages arrive whole and in order")
async def test_reset_is_not_end_of_stream() -> None:
    _, error = await end_of(b"", lambda peer: reset(peer.socket))
    assert isinstance(error, DisconnectedError)


@pytest.mark.promise("Messages arrive whole and in order")
async def test_reset_of_a_held_back_peer_is_not_end_of_stream() -> None:
    """The receiver is behind: it reads nothing more of the socket when the reset comes."""
    resets = threading.Event()

    def attack() -> None:
        peer = RawConnection(listener.port, uses_crc=True)
        peer.socket.settimeout(0.5)
        with suppress(TimeoutError):
            for number in range(1, 10_000):
                peer.send(bytes(1 << 14), number)
        reset(peer.socket)
        resets.set()

    options = aiordma.ConnectionOptions(receive_buffers=2)
    listening = aiordma.listen(ADDRESS, 0, options=options)
    async with listening as listener, anyio.create_task_group() as group:
        group.start_soon(anyio.to_thread.run_sync, attack)
        async with await listener.accept() as connection:
            await anyio.to_thread.run_sync(resets.wait)
            await anyio.sleep(0.2)
            with anyio.fail_after(30):
                assert isinstance(await end_of_messages(connection), DisconnectedError)


@pytest.mark.promise("Messages arrive whole and in order")
@pytest.mark.parametrize("what", BROKEN)
async def test_broken_connection_raises_its_cause(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    last, kind, event = BROKEN[what]
    refused = aiordma.statistics()["software"].refused_accesses
    got, error = await end_of(last, lambda peer: peer.socket.close())
    assert (got, type(error)) == ([b"first"], kind)
    lines = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    refused = aiordma.statistics()["software"].refused_accesses - refused
    if event is None:
        assert (lines, refused) == ([], 0)
        return
    assert isinstance(error, DeviceEventError)
    assert error.event is event
    assert lines == [str(error)]
    assert refused == (event is AsyncEventType.QP_ACCESS_ERR)


async def test_log_records_have_fields(caplog: pytest.LogCaptureFixture) -> None:
    """For programs that write their log as JSON."""
    await end_of(BROKEN["garbage"][0], lambda peer: peer.socket.close())
    (record,) = (each for each in caplog.records if each.levelno == logging.WARNING)
    fields = vars(record)
    assert (fields["device"], fields["peer"] in record.getMessage()) == ("software", True)
    assert fields["qp_num"] > 0
