"""Posting: what the driver answers to a post is said in C's own words, whichever way it answers."""

import errno
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma import ClosedError, VerbsCallError
from aiordma.verbs import (
    Capacity,
    QueuePair,
    QueuePairType,
    SendFlag,
    SendWork,
    Sge,
    WorkRequestOpcode,
)
from tests.internals import here
from tests.unit.numbers_device import Driver


class Posted(QueuePair):
    """A queue pair of which only the posts are real, down to the driver."""

    def __init__(self, driver: Driver) -> None:
        self._closed = False
        self._process = here.pid
        self._parents = ()
        self._children = {}
        self._manager = None
        self._groups = set()
        calls: Any = SimpleNamespace(destroy_qp=lambda _: 0)
        self.provider = calls
        self.pointer = driver.queue_pair
        self.capacity = Capacity(max_send_wr=7)
        self.service = QueuePairType.RC


def post(pair: QueuePair, call: str) -> None:
    if call == "ibv_post_send":
        pair.post_send(5, [Sge(0x1000, 16, 0x77)])
    else:
        pair._post_recv_raw(5, b"s" * 16, 1)


@pytest.mark.promise("A post that raises has posted nothing")
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
@pytest.mark.parametrize("names_it", [True, False])
def test_a_refused_post_says_why(
    call: str, result: int, number: int, said: int, names_it: bool
) -> None:
    driver = Driver()
    driver.answer, driver.errno = result, number
    driver.refused = 0 if names_it or call == "ibv_post_send" else None
    with Posted(driver) as pair, pytest.raises(VerbsCallError) as caught:
        post(pair, call)
    assert (caught.value.errno, caught.value.call) == (said, call)
    assert "posted 1 sges" in str(caught.value)
    assert "max_send_wr=7" in str(caught.value)


@pytest.mark.promise("A post that raises has posted nothing")
@pytest.mark.parametrize("answer", [-errno.EIO, errno.EIO, -1])
def test_failed_doorbell_says_the_request_was_taken(answer: int) -> None:
    driver = Driver()
    driver.answer = answer  # and no request is named as refused
    with Posted(driver) as pair, pytest.raises(VerbsCallError) as caught:
        post(pair, "ibv_post_send")
    assert (caught.value.errno, caught.value.was_taken) == (errno.EIO, True)


def test_post_without_an_error_may_be_refused() -> None:
    # A driver that stops before a request and answers 0.
    driver = Driver()
    driver.refused = 0
    with Posted(driver) as pair, pytest.raises(VerbsCallError) as caught:
        post(pair, "ibv_post_send")
    assert (caught.value.errno, caught.value.was_taken) == (errno.EINVAL, False)


def test_driver_gets_what_is_posted() -> None:
    driver = Driver()
    with Posted(driver) as pair:
        post(pair, "ibv_post_send")
        post(pair, "ibv_post_recv")
    assert driver.posted == [5, 5]
    send, receive = driver.works
    sge = struct.pack("=QII", 0x1000, 16, 0x77)
    assert send == (1, sge, int(WorkRequestOpcode.SEND), int(SendFlag.SIGNALED))
    assert receive == (1, b"s" * 16)


def test_more_parts_than_are_given_are_refused() -> None:
    driver = Driver()
    with Posted(driver) as pair:
        send = SendWork("SEND", WorkRequestOpcode.SEND, b"s" * 16, 2)
        assert pair.post_send_chain([send], [5], [0]) == (errno.EINVAL, 0)
        with pytest.raises(VerbsCallError) as caught:
            pair._post_recv_raw(5, b"s" * 16, 2)
    assert caught.value.errno == errno.EINVAL
    assert driver.posted == []


@pytest.mark.parametrize("call", ["ibv_post_send", "ibv_post_recv"])
def test_nothing_is_posted_to_a_closed_queue_pair(call: str) -> None:
    driver = Driver()
    pair = Posted(driver)
    pair.close()
    with pytest.raises(ClosedError):
        post(pair, call)
    assert driver.posted == []


class Attached(Posted):
    """A queue pair that notes what the driver is asked, and calls `on_attach` within an attach."""

    def __init__(self) -> None:
        super().__init__(Driver())
        self.asked: list[str] = []
        self.on_attach: Callable[[], object] = lambda: None
        self.answer = 0
        self.refusals: list[int] = []
        calls: Any = SimpleNamespace(
            attach_mcast=self._attach,
            detach_mcast=self._detach_group,
            destroy_qp=self._destroyed,
        )
        self.provider = calls

    def _destroyed(self, _: object) -> int:
        self.asked.append("destroy")
        return self.refusals.pop() if self.refusals else 0

    def _attach(self, *_: object) -> int:
        self.asked.append("attach")
        self.on_attach()
        return self.answer

    def _detach_group(self, *_: object) -> int:
        self.asked.append("detach")
        return 0


def test_finalizer_may_close_while_a_group_is_attached() -> None:
    """The garbage collector runs it in the thread that attaches, which has the lock."""
    pair = Attached()
    pair.on_attach = pair.close
    pair.attach_multicast(bytes(16))
    assert pair.asked == ["attach", "detach", "destroy"]
    with pytest.raises(ClosedError):
        pair.attach_multicast(bytes(16))


def test_group_that_the_driver_refuses_is_not_detached() -> None:
    pair = Attached()
    pair.answer = errno.EINVAL
    with pytest.raises(VerbsCallError, match="ibv_attach_mcast"):
        pair.attach_multicast(bytes(16))
    pair.close()
    assert pair.asked == ["attach", "destroy"]


def test_second_close_after_a_refusal_detaches_no_group_again() -> None:
    pair = Attached()
    pair.attach_multicast(bytes(16))
    pair.refusals = [errno.EBUSY]
    with pytest.raises(VerbsCallError, match="ibv_destroy_qp"):
        pair.close()
    assert not pair.closed
    pair.close()
    assert pair.asked == ["attach", "detach", "destroy", "destroy"]
