"""rcopy's messages, as the C program lays them out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma.cli.cp import split_target
from aiordma.cli.rcopy import (
    HEADER_BYTES,
    Command,
    Header,
    RcopyError,
    close_message,
    open_message,
    path_of,
    size_of,
    write_message,
)

# By the source of rcopy of rdma-core 44, for `rcopy FILE HOST:target`, FILE of mode 0644 and 1000
# bytes, on a little-endian host. (tests/interop/test_rcopy.py exchanges files with the program.)
OPEN = bytes.fromhex("00011800a48100000000000000000000") + b"target\0\0"
WRITE = bytes.fromhex("00031800000000000000000000000000e803000000000000")
CLOSE = bytes.fromhex("00021000000000000000000000000000")


def test_messages_are_those_of_the_c_program() -> None:
    assert open_message("target", 0o100644) == OPEN
    assert write_message(1000) == WRITE
    assert close_message() == CLOSE


@given(st.integers(1, 3), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
def test_a_header_survives_packing(command: int, data: int, number: int) -> None:
    header = Header(command, data=data, id=number)
    assert Header.unpack(header.pack()) == header
    reply = Header.unpack(header.reply(5))
    assert (reply.status(Command(command)), reply.id) == (5, number)


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1))
def test_a_path_survives_packing(path: str) -> None:
    message = open_message(path, 0)
    header = Header.unpack(message[:HEADER_BYTES])
    assert header.length == len(message)
    assert len(message) % 8 == 0
    assert path_of(message[HEADER_BYTES:]) == path


@pytest.mark.parametrize("path", ["", "a\0b", "a" * 65_512])
def test_a_path_that_does_not_fit_is_refused(path: str) -> None:
    with pytest.raises(RcopyError, match=r"the destination path has \d+ bytes"):
        open_message(path, 0)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_any_header_is_read_or_refused(data: bytes) -> None:
    try:
        header = Header.unpack(data)
    except RcopyError:
        assert data[0] or int.from_bytes(data[2:4], "little") < HEADER_BYTES
        return
    assert header.pack() == data


@pytest.mark.parametrize("payload", [b"", b"no end", b"\0"])
def test_a_wrong_path_is_refused(payload: bytes) -> None:
    with pytest.raises(RcopyError, match="path that is empty, or has no end"):
        path_of(payload)


def test_a_wrong_size_is_refused() -> None:
    assert size_of(WRITE[HEADER_BYTES:]) == 1000
    with pytest.raises(RcopyError, match="a size in 7 bytes, not 8"):
        size_of(bytes(7))


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Header(Command.OPEN), "a request for command 1 of 16 bytes"),
        (Header(Command.CLOSE, True), "a reply to command 2 of 16 bytes"),
        (Header(Command.OPEN, True, 24), "a reply to command 1 of 24 bytes"),
        (Header(Command.OPEN, True, data=2**31), "error number 2147483648"),
        (Header(Command.OPEN, True, data=2**32 - 1), "error number 4294967295"),
    ],
)
def test_a_wrong_reply_is_refused(reply: Header, said: str) -> None:
    with pytest.raises(RcopyError, match=said):
        reply.status(Command.OPEN)


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("host", ("host", "name")),
        ("host:", ("host", "name")),
        ("host:path", ("host", "path")),
        ("host:folder/", ("host", "folder/name")),
        ("host:a:b", ("host", "a:b")),
        ("[fd00::1]", ("fd00::1", "name")),
        ("[fd00::1]:path", ("fd00::1", "path")),
    ],
)
def test_a_target_is_split(target: str, found: tuple[str, str]) -> None:
    assert split_target(target, "name") == found


@pytest.mark.parametrize("target", ["", ":", ":path", "[]", "[]:path", "[::1", "[::1]path"])
def test_a_target_without_a_host_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match=r"has no host|is not"):
        split_target(target, "name")
