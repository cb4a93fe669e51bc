"""The requests of a queue pair that have not ended: a set, and a list that runs through them."""

import gc
import random
import weakref
from typing import Any

import pytest

from aiordma import WorkRequest
from tests.internals import OpenRequests


class Owner:
    """Requests of no device, which never end."""

    open: OpenRequests


def requests(count: int, owner: Any = None) -> list[WorkRequest]:
    return [WorkRequest(owner, "SEND", i, ()) for i in range(count)]


def test_it_is_a_set() -> None:
    open_requests, everything = OpenRequests(), requests(100)
    expected: set[WorkRequest] = set()
    chance = random.Random(1)
    for _ in range(2000):
        request = chance.choice(everything)
        if chance.random() < 0.5:
            open_requests.add(request)
            expected.add(request)
        else:
            open_requests.discard(request)
            expected.discard(request)
        assert len(open_requests) == len(expected)
        assert (request in open_requests) == (request in expected)
        assert bool(open_requests) == bool(expected)
    assert set(open_requests) == expected


def test_one_may_go_while_they_are_looked_through() -> None:
    open_requests, everything = OpenRequests(), requests(5)
    for request in everything:
        open_requests.add(request)
    for request in list(open_requests):
        for other in everything:
            open_requests.discard(other)
        assert request not in open_requests
    assert not open_requests


def test_it_keeps_them_and_lets_go_of_them() -> None:
    open_requests, everything = OpenRequests(), requests(3)
    for request in everything:
        open_requests.add(request)
    alive = [weakref.ref(request) for request in everything]
    del everything, request
    gc.collect()
    assert all(reference() for reference in alive)
    del open_requests
    gc.collect()
    assert not any(reference() for reference in alive)


def test_a_circle_through_it_is_collected() -> None:
    owner = Owner()
    owner.open = OpenRequests()
    owner.open.add(requests(1, owner)[0])
    alive = weakref.ref(owner)
    del owner
    gc.collect()
    assert alive() is None


def test_a_request_is_of_one_queue_pair() -> None:
    one, other = OpenRequests(), OpenRequests()
    (request,) = requests(1)
    one.add(request)
    with pytest.raises(ValueError, match="one queue pair"):
        other.add(request)
    other.discard(request)
    assert request in one
    anything: Any = 3
    with pytest.raises(TypeError, match="work requests"):
        one.add(anything)
