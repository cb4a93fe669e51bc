"""First come, first served, and which source gives way where a queue is full."""

import pytest

from aiordma._base.fair_queue import FairQueue, source_of


def queue(*items: str) -> FairQueue[str]:
    """A queue of items like "a1", whose source is the letter."""
    made: FairQueue[str] = FairQueue()
    for item in items:
        made.append(item, item[:1].encode())
    return made


def test_items_leave_in_order_of_arrival() -> None:
    made = queue("a1", "b1", "a2")
    assert list(made) == ["a1", "b1", "a2"]
    assert [made.popleft()[0] for _ in range(3)] == ["a1", "b1", "a2"]
    assert len(made) == 0


def test_removed_items_do_not_count() -> None:
    made = queue("a1", "a2")
    made.remove("a1")
    assert "a1" not in made
    assert (made.count(b"a"), made.count(b"b")) == (1, 0)
    made.remove("a2")
    assert made.count(b"a") == 0


@pytest.mark.parametrize(
    ("items", "greediest"),
    [
        (["a1"], "a1"),
        (["b1", "a1", "a2"], "a1"),
        (["b1", "a1", "a2", "b2"], "b1"),  # of two that have as many: the oldest
    ],
)
def test_greediest_is_the_oldest_of_the_most(items: list[str], greediest: str) -> None:
    assert queue(*items).greediest() == greediest


def test_only_an_eligible_item_of_the_greediest_is_returned() -> None:
    made = queue("b1", "a1", "a2")
    assert made.greediest(lambda item: item != "a1") == "a2"
    assert made.greediest(lambda item: item == "b1") is None
    assert queue().greediest() is None


@pytest.mark.promise("A listener's peers do not hold each other up")
@pytest.mark.parametrize(
    ("items", "displaced"),
    [
        ([], None),
        (["a1"], None),  # for b1: they would only change places
        (["a1", "a2"], "a1"),
        (["b1", "a1", "a2"], None),
        (["b1", "a1", "a2", "a3"], "a1"),
        (["b1", "b2", "a1"], None),  # b has most of it already
    ],
)
def test_only_a_greedier_source_is_displaced(items: list[str], displaced: str | None) -> None:
    assert queue(*items).displaced_by(b"b") == displaced


@pytest.mark.promise("A listener's peers do not hold each other up")
@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8::1", "2001:db8::2", True),  # a /64 is one host's
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%lo", "fe80::2%lo", False),
        ("fe80::1%lo", "fe80::1%lo", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
    ],
)
def test_source_is_an_address_or_a_network(one: str, other: str, is_same: bool) -> None:
    assert (source_of((one, 1)) == source_of((other, 2))) is is_same


def test_peers_without_an_address_are_one_source() -> None:
    assert source_of(None) == source_of(None)
