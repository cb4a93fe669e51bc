"""Inputs to begin with: genuine exchanges, in the language of each target.

The targets read an input as a list of acts; what each byte means is in the C beside this file.
"""

import struct

REQUEST = b"MPA ID Req Frame" + bytes([0x10, 2, 0, 4]) + struct.pack(">HH", 0x8001, 0x8001)
REPLY = b"MPA ID Rep Frame" + bytes([0x50, 2, 0, 6]) + struct.pack(">HH", 0x8004, 0x8004) + b"hi"
"""As siw and the software device say them; the second with a sum, and with private data."""

SEND_FRAME = struct.pack(">HBBIIII", 23, 0x41, 0x43, 0, 0, 1, 0) + b"hello" + bytes(7)
READ_FRAME = struct.pack(">HBBIIIIIQIIQ", 46, 0x41, 0x41, 0, 1, 1, 0, 7, 0, 64, 0x1234, 4096)

WRITE, READ, READ_RESPONSE, SEND, SEND_INVALIDATE, TERMINATE = 0, 1, 2, 3, 4, 7
IMMEDIATE, ATOMIC, ATOMIC_RESPONSE = 8, 10, 11
SAYS, RECEIVES, POSTS, POLLS = 1, 5, 7, 9  # acts of stream.c
ALL, LONG, WINDOW, SINK = 0, 2, 5, 6  # its targets


def stream(mode: int, more: int) -> bytes:
    """One of each operation, from the peer and from the program, with its answer."""
    start = bytes([mode | 0xC0, more, 0, 0, 0, 0, 0])
    said = [
        bytes([SAYS, SEND, 100]),
        bytes([SAYS, WRITE, ALL, 0, 8, 64]),
        bytes([SAYS, READ, LONG, 0, 0, 200]),
        bytes([SAYS, ATOMIC, ALL, 0, 8, 2]),
        bytes([SAYS, IMMEDIATE, 0]),
        bytes([POSTS, 9, 0, 0]),  # a window is bound, and the peer's message takes it away
        bytes([SAYS, SEND_INVALIDATE, WINDOW, 0, 0, 4]),
        bytes([POSTS, 1, 0, 100]),  # a READ, and its answer
        bytes([SAYS, READ_RESPONSE | 0x80, SINK, 0, 0, 0]),
        bytes([POSTS, 2, 0, 1]),  # an atomic
        bytes([SAYS, ATOMIC_RESPONSE]),
        bytes([POSTS, 0, 0, 50]),
        bytes([POSTS, 5, 1, 0]),
        bytes([POLLS]),
        bytes([SAYS, TERMINATE, 5]),
    ]
    return start + bytes([RECEIVES, 0]).join(said)


def composed(kind: int, flags: int, size: int, depths: bytes = b"\x80\x04\x80\x04") -> bytes:
    return bytes([1, kind, flags, size]) + depths[:size]


SEEDS: dict[str, dict[str, bytes]] = {
    "stream": {
        f"{mode:02x}-{more}": stream(mode, more) for mode in (0, 1, 3, 6) for more in (0, 2)
    },
    "handshake": {
        # A request that is accepted, another that is rejected; a call that is answered.
        "accepted": composed(0, 0x10, 4) + bytes([8, 4]) + bytes([6]),
        "rejected": composed(0, 0x50, 12) + bytes([8, 65]),
        "revision-1": composed(0x12, 0x40, 0) + bytes([8, 0]),
        "call": bytes([10, 4]) + composed(1, 0x10, 4) + bytes([7]),
        "refused-call": bytes([10, 4]) + composed(1, 0x30, 8) + bytes([13]),
        # Silent peers while descriptors are few, then while there is one, then none.
        "few": bytes([14 | 1 << 4]) + b"".join(bytes([0 | peer << 4]) for peer in range(4)),
        "one": bytes([14 | 2 << 4]) + b"".join(bytes([0 | peer << 4, 13]) for peer in range(4)),
        # None until the listener turns peers away, which it can once there is one.
        "none": bytes([14 | 3 << 4, 0]) + bytes([13]) * 22 + bytes([14 | 2 << 4, 13, 0 | 1 << 4]),
    },
    "datagrams": {
        "datagram": bytes([7, 0, 1, 2, 0, 100, 9]),
        "question": bytes([4, 1, 7, 9, 11, 2]),
        "call": bytes([10, 4, 0, 9]),
    },
    # Receives, then the peer's SEND, WRITE, READ and atomic; then the program's, and their answers.
    "packets": {
        f"{kind}-{name}": bytes([kind]) + steps * 3
        for kind in (0, 1)
        for name, steps in {
            "in": bytes([4, 1, 1, 9, 4, 9, 0, 0, 1, 1, 6, 2, 0, 8, 1, 5, 8, 9, 0, 16])
            + bytes([1, 5, 12, 40, 0, 64, 1, 1, 0x14, 0, 0, 0]),
            "out": bytes([5, 0, 1, 44, 3, 16, 1, 0, 5, 4, 1, 44, 3, 0x23, 2, 0, 3, 0x25, 3, 44])
            + bytes([5, 6, 0, 8, 3, 2, 4, 0, 6 | 0xF0, 7]),
        }.items()
    },
    # A call and its answers; a request, the program's answer, and the peer's.
    "conversations": {
        "out": bytes([13, 7, 1, 1, 1, 1, 3, 3, 5, 16, 7, 1, 1, 6]),
        "refused": bytes([13, 7, 1, 1, 2]),
        "in": bytes([1, 2, 0, 4, 0, 7, 1, 1, 4, 1, 1, 5, 7]),
        "left": bytes([1, 3, 0, 4, 4, 7, 1, 1, 4, 4, 16, 7, 1, 1, 6, 4, 24]),
    },
    "codecs": {
        "request": b"\0\0" + REQUEST,
        "reply": b"\0\1" + REPLY,
        "send": b"\1" + SEND_FRAME,
        "read": b"\1" + READ_FRAME,
        "packet": b"\2\0\0\1" + bytes(64),
    },
    # Data and reads, grants and writes, with immediate data and with words.
    "rsocket": {
        f"{mode}-{name}": bytes([mode]) + steps * 20
        for mode in (0, 1)
        for name, steps in {
            "in": bytes([1, 8, 0, 9, 63]),
            "out": bytes([3, 3, 9, 0, 11, 40, 6, 0]),
        }.items()
    },
    # Receives before and after data, sends that wait and are cancelled; with and without a pause.
    "calls": {
        f"{mode}-{name}": bytes([mode]) + steps * 20
        for mode in (0, 1, 16, 17)
        for name, steps in {
            "in": bytes([10, 40, 0, 8, 0, 0, 8, 0, 12, 40]),
            "out": bytes([13, 90, 3, 20, 0, 6, 0, 6, 0, 16, 0]),
        }.items()
    },
}


def of(target: str) -> dict[str, bytes]:
    """The inputs of a target, by name."""
    return SEEDS[target]
