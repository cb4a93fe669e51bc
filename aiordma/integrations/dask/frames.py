"""The messages of a comm on the wire, without input or output.

A message of distributed is a list of frames. Small frames follow a table of all lengths, in the
message's **head**. A frame of at least `BULK` bytes is **bulk**: the sender WRITEs it into memory
that the receiver allocates for it. Frames that continue the memory of the frame before them (the
shards of a large array) arrive in the same buffer.

    MESSAGE  kind, number of frames, bytes of the head, bytes of the bulk; the head, if it fits
    READY    kind, number of ranges; a RemoteMemory for each: the answer to a MESSAGE whose head
             does not fit, and to each `BATCH` of its buffers
    DONE     kind: the ranges of the last READY are written
    CREDIT   kind, number of MESSAGEs that the program has taken, modulo 2**32

Every number of the peer's is checked here, before memory is allocated for it. The functions whose
work grows with the number of frames are generators: each yields after `TURN` frames, where the
event loop can run other tasks, and returns its result.
"""

import struct
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from aiordma._base.ranges import RemoteMemory
from aiordma.verbs.buffers import address_of, flat_view

__all__ = (
    "BATCH",
    "BULK",
    "CONTROLS",
    "CREDIT",
    "CREDITS",
    "DONE",
    "HELLO",
    "MESSAGE",
    "MESSAGE_BYTES",
    "READY",
    "TURN",
    "Announcement",
    "Outgoing",
    "ProtocolError",
    "Turns",
    "assembled",
    "at_once",
    "credit",
    "flat",
    "pack",
    "parse_announcement",
    "parse_credit",
    "parse_ready",
    "parse_table",
    "ready",
)

HELLO: bytes = b"aiordma dask 1"
"""The private data of both sides, with the version of this protocol."""

MESSAGE_BYTES = 16384
"""The longest SEND, and the bytes of each receive."""

CREDITS = 16
"""The number of MESSAGEs that a side may send before the peer's program has taken one."""

CONTROLS = 8
"""Receives for the other kinds. A side has at most one READY, one DONE and three CREDITs that its
peer has not received."""

BULK = 1 << 16
"""The shortest frame that is written into memory of its own."""

BATCH = 16
"""The largest number of buffers that a READY offers."""

MOST_FRAMES = 1 << 20
"""The largest number of frames of a message."""

TURN = 2048
"""The number of frames after which the work on a message yields. A head within a MESSAGE has
fewer."""

MESSAGE = 1
READY = 2
DONE = 3
CREDIT = 4

_ANNOUNCEMENT = struct.Struct("!B3xIQQ")
_COUNT = struct.Struct("!B3xI")
_LENGTH = struct.Struct("!Q")
_CONTINUES = 1 << 63
"""In the table: the frame continues the memory of the frame before it."""

_Result = TypeVar("_Result")
Turns = Generator[None, None, _Result]
"""Work that yields after `TURN` frames, and returns a result."""


class ProtocolError(ValueError):
    """The peer of a comm violates aiordma's protocol for `rdma://` addresses, and the comm has
    ended: it has another version, sends lengths, offers or credits that are not permitted, or a
    message longer than this side receives. The message says which. Install the same version of
    aiordma and distributed on all sides, or raise `distributed.comm.rdma.max-message-size`
    (docs/dask.md). Programs see it as distributed's CommClosedError, whose `__cause__` is this
    one."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to send.

    Attributes:
        announcement: the MESSAGE, with the head if it fits.
        head: the head if it does not fit, else None.
        bulk: the buffers that the receiver will offer, each with the frames to write into it.
        length: the bytes of all frames.
    """

    announcement: bytes
    head: bytes | None
    bulk: list[list[memoryview]]
    length: int


@dataclass(frozen=True, slots=True)
class Announcement:
    """A MESSAGE that arrived.

    Attributes:
        frames: the number of frames.
        head_length, bulk_length: in bytes.
        head: the head, or None if it does not fit and is to be written.
    """

    frames: int
    head_length: int
    bulk_length: int
    head: memoryview | None


def at_once(turns: Turns[_Result]) -> _Result:
    """Do all turns of a work, and return its result."""
    while True:
        try:
            next(turns)
        except StopIteration as end:
            result: _Result = end.value
            return result


def pack(frames: Sequence[Any]) -> Turns[Outgoing]:
    """Arrange frames to be sent.

    Args:
        frames: anything that `flat` takes.

    Raises:
        ValueError: there are too many frames.
    """
    if len(frames) > MOST_FRAMES:
        raise ValueError(f"a message of {len(frames)} frames: at most {MOST_FRAMES} can be sent")
    table: list[bytes] = []
    small: list[memoryview] = []
    bulk: list[list[memoryview]] = []
    length = small_length = 0
    before: memoryview | None = None  # the last frame, if it is bulk
    for number, each in enumerate(frames, 1):
        frame = flat(each)
        size = frame.nbytes
        length += size
        if before is not None and _continues(before, frame):
            table.append(_LENGTH.pack(size | _CONTINUES))
            bulk[-1].append(frame)
            before = frame
        else:
            table.append(_LENGTH.pack(size))
            if size >= BULK:
                bulk.append([frame])
                before = frame
            else:
                small.append(frame)
                small_length += size
                before = None
        if number % TURN == 0:
            yield
    head = b"".join([*table, *small])
    announcement = _ANNOUNCEMENT.pack(MESSAGE, len(frames), len(head), length - small_length)
    if len(announcement) + len(head) <= MESSAGE_BYTES:
        return Outgoing(announcement + head, None, bulk, length)
    return Outgoing(announcement, head, bulk, length)


def flat(frame: Any) -> memoryview:
    """Return a view of a frame's bytes, whose `obj` is the array that has them: the registration
    cache knows arrays."""
    try:
        return flat_view(frame)
    except ValueError:
        return memoryview(memoryview(frame).tobytes())  # not contiguous


def _continues(before: memoryview, frame: memoryview) -> bool:
    return (
        frame.nbytes > 0
        and frame.obj is before.obj
        and address_of(frame) == address_of(before) + before.nbytes
    )


def parse_announcement(data: bytes, most: int) -> Announcement:
    """Read a MESSAGE.

    Args:
        data: the message.
        most: the largest number of bytes that a message may have.

    Raises:
        ProtocolError: a number is out of range, or the head is not as long as announced.
    """
    if len(data) < _ANNOUNCEMENT.size:
        raise ProtocolError(f"a MESSAGE of {len(data)} bytes")
    _, frames, head_length, bulk_length = _ANNOUNCEMENT.unpack_from(data)
    if frames > MOST_FRAMES or frames * _LENGTH.size > head_length:
        raise ProtocolError(f"a message of {frames} frames with a head of {head_length} bytes")
    if head_length + bulk_length > most:
        raise ProtocolError(
            f"a message of {head_length + bulk_length} bytes: at most {most} are received. A "
            "larger limit can be set: distributed.comm.rdma.max-message-size in Dask's "
            "configuration"
        )
    head: memoryview | None = memoryview(data)[_ANNOUNCEMENT.size :]
    if _ANNOUNCEMENT.size + head_length > MESSAGE_BYTES and len(data) == _ANNOUNCEMENT.size:
        head = None
    elif len(data) - _ANNOUNCEMENT.size != head_length:
        raise ProtocolError(
            f"a MESSAGE of {len(data)} bytes announces a head of {head_length} bytes"
        )
    return Announcement(frames, head_length, bulk_length, head)


def parse_table(announcement: Announcement, head: memoryview) -> Turns[list[int]]:
    """Check the lengths of the frames, and return those of the bulk's buffers, in order.

    Raises:
        ProtocolError: the lengths are not those that were announced.
    """
    buffers: list[int] = []
    small = announcement.frames * _LENGTH.size
    follows_bulk = False
    for number, (length,) in enumerate(_table(announcement, head), 1):
        if length & _CONTINUES:
            if not follows_bulk:
                raise ProtocolError("a frame continues a frame that is not bulk")
            buffers[-1] += length ^ _CONTINUES
        elif length < BULK:
            small += length
            follows_bulk = False
        else:
            buffers.append(length)
            follows_bulk = True
        if number % TURN == 0:
            yield
    bulk = sum(buffers)
    if small != announcement.head_length or bulk != announcement.bulk_length:
        raise ProtocolError(
            f"a table of {small} bytes in the head and {bulk} of bulk: announced were "
            f"{announcement.head_length} and {announcement.bulk_length}"
        )
    return buffers


def _table(announcement: Announcement, head: memoryview) -> Iterator[tuple[int]]:
    """Iterate over the entries of the table."""
    return _LENGTH.iter_unpack(head[: announcement.frames * _LENGTH.size])


def assembled(
    announcement: Announcement, head: memoryview, buffers: Sequence[memoryview]
) -> Turns[list[memoryview]]:
    """Return the frames of a message that has arrived.

    Small frames are copied, so that no object that the program makes of one keeps the others in
    memory.

    Args:
        announcement, head: as `parse_table` has checked them.
        buffers: the buffers of the bulk, of the lengths that `parse_table` has returned.
    """
    frames: list[memoryview] = []
    place = announcement.frames * _LENGTH.size
    rest = iter(buffers)
    buffer = memoryview(b"")
    start = 0
    for number, (length,) in enumerate(_table(announcement, head), 1):
        if length & _CONTINUES:
            end = start + (length ^ _CONTINUES)
            frames.append(buffer[start:end])
            start = end
        elif length < BULK:
            frames.append(memoryview(bytearray(head[place : place + length])))
            place += length
        else:
            buffer, start = next(rest), length
            frames.append(buffer[:length])
        if number % TURN == 0:
            yield
    return frames


def ready(ranges: Sequence[RemoteMemory]) -> bytes:
    """Return a READY."""
    return b"".join([_COUNT.pack(READY, len(ranges)), *(each.pack() for each in ranges)])


def parse_ready(data: bytes) -> list[RemoteMemory]:
    """Return the ranges of a READY.

    Raises:
        ProtocolError: it is not as long as its number says, or a range is none.
    """
    if len(data) < _COUNT.size:
        raise ProtocolError(f"a READY of {len(data)} bytes")
    _, count = _COUNT.unpack_from(data)
    size = RemoteMemory.WIRE.size
    if count > BATCH or len(data) != _COUNT.size + count * size:
        raise ProtocolError(f"a READY of {len(data)} bytes for {count} ranges")
    try:
        return [
            RemoteMemory.unpack(data[start : start + size])
            for start in range(_COUNT.size, len(data), size)
        ]
    except ValueError as error:
        raise ProtocolError(f"a READY with a range that is none: {error}") from None


def credit(taken: int) -> bytes:
    """Return a CREDIT for a number of MESSAGEs that were taken."""
    return _COUNT.pack(CREDIT, taken % 2**32)


def parse_credit(data: bytes, known: int, sent: int) -> int:
    """Return how many MESSAGEs the peer has taken.

    Args:
        data: the CREDIT.
        known: how many it has taken as far as this side knew.
        sent: how many this side has sent.

    Raises:
        ProtocolError: it says more than were sent.
    """
    if len(data) != _COUNT.size:
        raise ProtocolError(f"a CREDIT of {len(data)} bytes")
    count: int = _COUNT.unpack(data)[1]
    taken = known + (count - known) % 2**32
    if taken > sent:
        raise ProtocolError(f"a CREDIT for {taken} messages: {sent} were sent")
    return taken
