"""What type checkers see of the public interface.

`make lint` checks this file, too: a call that has to be a type error carries the error's code, and
mypy reports a code where there is no error.
"""

import array
import mmap
import typing

import pytest

import aiordma
from tests.internals import Buffer

TAKES_MEMORY = (
    (aiordma.Connection.post_send, "data"),
    (aiordma.Connection.post_recv, "buffer"),
    (aiordma.Connection.post_write, "local"),
    (aiordma.Connection.post_read, "local"),
    (aiordma.Connection.send, "item"),
    (aiordma.Connection.write, "local"),
    (aiordma.Connection.read, "local"),
    (aiordma.Datagram.post_ud_send, "data"),
    (aiordma.Datagram.send, "data"),
)


@pytest.mark.promise("Type checkers know every public name")
@pytest.mark.parametrize(("call", "name"), TAKES_MEMORY)
def test_calls_take_buffers_and_regions(call: typing.Callable[..., object], name: str) -> None:
    taken = typing.get_args(typing.get_type_hints(call)[name])
    assert taken == (Buffer, aiordma.MemoryRegion, aiordma.types.MemorySlice)


@pytest.mark.promise("Type checkers know every public name")
def test_regions_are_made_of_buffers_and_arrays() -> None:
    for call in (aiordma.Connection.register, aiordma.MemoryRegion.__init__):
        assert typing.get_type_hints(call)["buffer"] == aiordma.verbs.RegistrableMemory
    assert typing.get_args(aiordma.verbs.RegistrableMemory)[0] is Buffer


def _accepted(
    connection: aiordma.Connection, remote: aiordma.RemoteMemory, region: aiordma.MemoryRegion
) -> None:
    """Not called: mypy has to accept every line."""
    connection.post_write(b"bytes", remote)
    connection.post_write(bytearray(1), remote)
    connection.post_write(memoryview(b"view"), remote)
    connection.post_write(array.array("B", [1]), remote)
    connection.post_write(mmap.mmap(-1, 1), remote)
    connection.post_write(region, remote)
    connection.post_write(region[:1], remote)
    connection.post_writev([b"bytes", region[:1]], remote)


def _refused(
    connection: aiordma.Connection, remote: aiordma.RemoteMemory, region: aiordma.MemoryRegion
) -> None:
    """Not called: mypy has to refuse every line."""
    connection.post_write(42, remote)  # type: ignore[arg-type]
    connection.post_write("text", remote)  # type: ignore[arg-type]
    connection.post_write([b"a", b"list"], remote)  # type: ignore[arg-type]
    connection.post_write(None, remote)  # type: ignore[arg-type]
    connection.post_write(b"bytes", region)  # type: ignore[arg-type]
    connection.post_writev(b"bytes", remote)  # type: ignore[arg-type]
    connection.post_recv(42)  # type: ignore[arg-type]
    connection.register(region)  # type: ignore[arg-type]
