"""Posting: what the driver answers to a post is said in C's own words, whichever way it answers."""

import errno
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma._native import ffi
from aiordma.errors import ClosedError, VerbsCallError
from aiordma.process import here
from aiordma.verbs import Capacity, QueuePair, queue_pair


class Posted(QueuePair):
    """A queue pair of which only the posts are real, down to the call into C."""

    def __init__(self) -> None:
        self._closed = False
        self._process = here.pid
        self._parents = ()
        self._children = {}
        self._unmake = lambda _: None
        self._groups = set()
        self._attaching = Lock()
        self.pointer = ffi.NULL
        self.capacity = Capacity(max_send_wr=7)


def answering(patch: pytest.MonkeyPatch, result: int, number: int = 0) -> list[tuple[Any, ...]]:
    """Let C answer each post with a result and an errno; return what it is given."""
    given: list[tuple[Any, ...]] = []

    def post(*arguments: Any) -> int:
        given.append(arguments)
        ffi.errno = number
        return result

    patch.setattr(
        queue_pair, "lib", SimpleNamespace(aiordma_post_send=post, aiordma_post_recv=post)
    )
    return given


def post(pair: QueuePair, call: str) -> None:
    if call == "ibv_post_send":
        pair.post_send_raw(5, 0, 2, b"s" * 16, 1, 0x1000, 0x77, 9)
    else:
        pair.post_recv_raw(5, b"s" * 16, 1)


@pytest.mark.parametrize(
    ("call", "result", "number", "said"),
    [
        ("ibv_post_send", errno.ENOMEM, 0, errno.ENOMEM),  # as the man page says
        ("ibv_post_recv", errno.ENOMEM, 0, errno.ENOMEM),
        ("ibv_post_recv", -1, errno.EOPNOTSUPP, errno.EOPNOTSUPP),  # siw's user-space driver
        ("ibv_post_recv", -errno.ENOMEM, 0, errno.ENOMEM),
        ("ibv_post_recv", -1, 0, errno.EIO),
    ],
)
def test_a_refused_post_says_why(
    monkeypatch: pytest.MonkeyPatch, call: str, result: int, number: int, said: int
) -> None:
    answering(monkeypatch, result, number)
    with Posted() as pair, pytest.raises(VerbsCallError) as caught:
        post(pair, call)
    assert (caught.value.errno, caught.value.call) == (said, call)
    assert "posted 1 sges" in str(caught.value)
    assert "max_send_wr=7" in str(caught.value)


def test_what_the_device_has_and_was_not_told_of_is_said_to_be_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answering(monkeypatch, -errno.EIO, 0)
    with Posted() as pair, pytest.raises(VerbsCallError) as caught:
        post(pair, "ibv_post_send")
    assert (caught.value.errno, caught.value.was_taken) == (errno.EIO, True)


def test_what_is_posted_is_what_c_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given = answering(monkeypatch, 0)
    with Posted() as pair:
        post(pair, "ibv_post_send")
        post(pair, "ibv_post_recv")
    assert given == [
        (ffi.NULL, 5, 0, 2, b"s" * 16, 1, 0x1000, 0x77, 9),
        (ffi.NULL, 5, b"s" * 16, 1),
    ]


@pytest.mark.parametrize("call", ["ibv_post_send", "ibv_post_recv"])
def test_nothing_is_posted_to_a_closed_queue_pair(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    given = answering(monkeypatch, 0)
    pair = Posted()
    pair.close()
    with pytest.raises(ClosedError):
        post(pair, call)
    assert given == []
