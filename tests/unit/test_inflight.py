"""The in-flight table: a wr_id finds its request once, and a stale one finds nothing, ever."""

import ctypes
import gc
import weakref
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from aiordma import WorkRequest
from tests.internals import InFlightTable

SLOT_BITS = 32
SLOT_MASK = GENERATION_MASK = (1 << SLOT_BITS) - 1
"""wr_id = generation << SLOT_BITS | slot."""


class Slot(ctypes.Structure):
    """A slot of the table, as in in_flight.h."""

    _fields_ = [
        ("request", ctypes.c_void_p),
        ("generation", ctypes.c_uint32),
        ("next_free", ctypes.c_uint32),
    ]


def age(table: InFlightTable, slot: int, generation: int) -> bool:
    """Set the generation of a slot, as if it had been used so often, and return True; return False
    if it is not free. 2**32 uses would take hours."""
    slots = ctypes.POINTER(Slot).from_address(id(table) + object.__basicsize__)
    if slot >= table.slots or slots[slot].request:
        return False
    slots[slot].generation = generation
    return True


def new_request() -> WorkRequest:
    no_owner: Any = None
    return WorkRequest(no_owner, "SEND", 0, ())


def requests_of(table: InFlightTable) -> list[object]:
    """Return what the table refers to, the lowest slot first."""
    return gc.get_referents(table)


def slot_of(wr_id: int) -> int:
    return wr_id & SLOT_MASK


class InFlight(RuleBasedStateMachine):
    """Against a dictionary, with every wr_id ever handed out kept to be tried again.

    Generations are moved close to their end now and then, as 2**32 uses of a slot would.
    """

    live = Bundle("live")
    spent = Bundle("spent")

    def __init__(self) -> None:
        super().__init__()
        self.table = InFlightTable()
        self.model: dict[int, WorkRequest] = {}
        self.least_slots = 0
        self.has_old_slots = False

    @rule(target=live)
    def add(self) -> int:
        request = new_request()
        wr_id = self.table.add(request)
        assert 0 < wr_id < 2**64
        assert wr_id >> SLOT_BITS != 0  # so that a zeroed wr_id finds nothing
        assert slot_of(wr_id) not in {slot_of(other) for other in self.model}
        self.model[wr_id] = request
        self.least_slots = max(self.least_slots, len(self.model))
        return wr_id

    @rule(target=spent, wr_id=consumes(live))
    def take(self, wr_id: int) -> int:
        assert self.table.take(wr_id) is self.model.pop(wr_id)
        return wr_id

    @rule(wr_id=spent)
    def a_stale_one_finds_nothing(self, wr_id: int) -> None:
        # The number can come back by itself only after 2**32 - 1 uses of its slot.
        if wr_id not in self.model:
            assert self.table.take(wr_id) is None

    @rule(wr_id=st.integers(min_value=0, max_value=2**64 - 1))
    def a_made_up_one_finds_nothing(self, wr_id: int) -> None:
        if wr_id not in self.model:
            assert self.table.take(wr_id) is None

    @precondition(lambda self: self.model)
    @rule(data=st.data(), generation=st.integers(min_value=0, max_value=2**32 - 1))
    def another_generation_of_a_live_slot_finds_nothing(
        self, data: st.DataObject, generation: int
    ) -> None:
        slot = slot_of(data.draw(st.sampled_from(sorted(self.model))))
        wr_id = generation << SLOT_BITS | slot
        if wr_id not in self.model:
            assert self.table.take(wr_id) is None

    @rule(target=spent, wr_id=consumes(spent), near=st.integers(min_value=0, max_value=2))
    def age(self, wr_id: int, near: int) -> object:
        """Move a free slot to the end of its generations; what it handed out is forgotten."""
        slot = slot_of(wr_id)
        if not age(self.table, slot, GENERATION_MASK - near):
            return wr_id
        self.has_old_slots = True
        return multiple()

    @rule()
    def shrink(self) -> None:
        self.table.shrink()
        self.least_slots = max((slot_of(wr_id) + 1 for wr_id in self.model), default=0)
        if self.has_old_slots:  # those are kept
            self.least_slots = self.table.slots

    @invariant()
    def it_holds_what_the_model_holds(self) -> None:
        assert len(self.table) == len(self.model)
        assert sorted(map(id, requests_of(self.table))) == sorted(map(id, self.model.values()))

    @invariant()
    def it_is_as_large_as_it_had_to_be_since_it_shrank(self) -> None:
        assert self.table.slots == self.least_slots


TestInFlight = InFlight.TestCase
TestInFlight.settings = settings(max_examples=60, stateful_step_count=40)


@pytest.mark.promise("A buffer is held until its request completes")
@pytest.mark.parametrize("start", [1, GENERATION_MASK - 3, GENERATION_MASK])
def test_generations_wrap_around_past_zero(start: int) -> None:
    table = InFlightTable()
    table.take(table.add(new_request()))  # makes the slot
    assert age(table, 0, start)
    request = new_request()
    seen = []
    for _ in range(6):
        wr_id = table.add(request)
        seen.append(wr_id >> SLOT_BITS)
        assert 0 < wr_id < 2**64
        assert table.take(wr_id) is request
        assert table.take(wr_id) is None
    # The generations go round 1..2**32-1.
    assert seen == [(start - 1 + n) % GENERATION_MASK + 1 for n in range(6)]


@given(st.integers(min_value=0, max_value=2**64 - 1))
def test_an_empty_table_finds_nothing(wr_id: int) -> None:
    table = InFlightTable()
    assert table.take(wr_id) is None


def test_a_request_is_let_go_when_it_is_taken() -> None:
    # The table must not keep alive what the device no longer owns.
    table = InFlightTable()
    request = new_request()
    alive = weakref.ref(request)
    wr_id = table.add(request)
    del request
    assert alive() is not None
    table.take(wr_id)
    assert alive() is None
    assert requests_of(table) == []


def test_wr_ids_are_a_generation_over_a_slot() -> None:
    table = InFlightTable()
    assert [table.add(new_request()) for _ in range(2)] == [1 << 32 | 0, 1 << 32 | 1]
    table.take(1 << 32 | 1)
    assert table.add(new_request()) == 2 << 32 | 1


def test_shrinking_drops_the_free_slots_at_the_end() -> None:
    table = InFlightTable()
    requests = [new_request() for _ in range(1000)]
    wr_ids = [table.add(request) for request in requests]
    for wr_id in wr_ids[:10] + wr_ids[20:]:
        table.take(wr_id)
    table.shrink()
    assert table.slots == 20
    assert requests_of(table) == requests[10:20]
    assert [slot_of(table.add(requests[0])) for _ in range(11)] == [*range(10), 20]


@pytest.mark.promise("A buffer is held until its request completes")
def test_slot_made_after_shrinking_refuses_old_wr_ids() -> None:
    table = InFlightTable()
    spent = []
    for _ in range(5):
        spent.append(table.add(new_request()))
        table.take(spent[-1])
    table.shrink()
    assert table.slots == 0
    for _ in range(5):
        wr_id = table.add(new_request())
        assert slot_of(wr_id) == slot_of(spent[0])
        assert wr_id not in spent
        assert [table.take(number) for number in spent] == [None] * 5
        table.take(wr_id)
        table.shrink()


def test_shrinking_keeps_slots_near_their_last_generation() -> None:
    table = InFlightTable()
    stale = table.add(new_request()), table.add(new_request())
    for wr_id in stale:
        table.take(wr_id)
    assert age(table, 1, GENERATION_MASK)
    table.shrink()
    for _ in range(2):  # the first slot's generations do not go on from there, and round
        wr_id = table.add(new_request())
        assert wr_id not in stale
        table.take(wr_id)
