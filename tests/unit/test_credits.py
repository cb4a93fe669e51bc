"""Credits: first come first served, and none is lost or made up, whatever is cancelled."""

import itertools

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiordma import DisconnectedError
from aiordma._requests.credits import Credits
from tests.alike import alike
from tests.internals import current_event_loop
from tests.unit.loops import settle

pytestmark = pytest.mark.anyio


class Takers:
    """Tasks that take a credit each, and keep it until `give`."""

    def __init__(self, slots: Credits, group: anyio.abc.TaskGroup) -> None:
        self.slots = slots
        self.group = group
        self.scopes: dict[str, anyio.CancelScope] = {}
        self.got: list[str] = []
        self.failed: dict[str, Exception] = {}
        self.ended: set[str] = set()

    def start(self, name: str) -> None:
        self.scopes[name] = anyio.CancelScope()
        self.group.start_soon(self._take, name)

    async def _take(self, name: str) -> None:
        try:
            with self.scopes[name]:
                await self.slots.take()
                self.got.append(name)
        except Exception as error:
            self.failed[name] = error
        finally:
            self.ended.add(name)

    def cancel(self, name: str) -> None:
        self.scopes[name].cancel()


def make(total: int) -> Credits:
    return Credits(current_event_loop(), total)


async def test_free_ones_are_taken_without_waiting() -> None:
    slots = make(2)
    assert [slots.try_take(), slots.try_take(), slots.try_take()] == [True, True, False]
    assert slots.free == 0
    slots.give()
    assert slots.free == 1
    with anyio.fail_after(20):
        await slots.take()
    assert slots.free == 0
    assert slots.total == 2


@pytest.mark.promise("A full queue waits or raises, and loses nothing")
async def test_waiters_get_theirs_in_the_order_in_which_they_came() -> None:
    slots = make(0)
    async with anyio.create_task_group() as group:
        takers = Takers(slots, group)
        names = [str(number) for number in range(10)]
        for name in names:
            takers.start(name)
            await settle()
        for count in range(1, 11):
            slots.give()
            await settle()
            assert takers.got == names[:count]
    assert slots.free == 0


async def test_waiters_are_served_in_order() -> None:
    slots = make(1)
    slots.try_take()
    async with anyio.create_task_group() as group:
        takers = Takers(slots, group)
        takers.start("first")
        await settle()
        slots.give()  # it is the first task's now, which has not run yet
        assert not slots.try_take()
        takers.start("second")
        await settle()
        assert takers.got == ["first"]
        slots.give()
    assert takers.got == ["first", "second"]


@pytest.mark.promise("A full queue waits or raises, and loses nothing")
async def test_woken_tasks_take_slots_in_their_order() -> None:
    slots = make(0)
    async with anyio.create_task_group() as group:
        takers = Takers(slots, group)
        for name in "abcdefgh":
            takers.start(name)
            await settle()
        for _ in range(8):
            slots.give()
        with anyio.fail_after(20):
            while len(takers.got) < 8:
                await settle()
    assert takers.got == list("abcdefgh")


async def test_woken_task_is_not_overtaken() -> None:
    slots = make(0)
    async with anyio.create_task_group() as group:
        takers = Takers(slots, group)
        takers.start("a")
        await settle()
        slots.give()
        slots.give()  # one more than it takes
        assert not slots.try_take()
        takers.start("b")
        await settle()
        assert takers.got == ["a", "b"]
    assert slots.free == 0


async def test_failure_ends_present_and_later_waiters() -> None:
    slots = make(1)
    error = DisconnectedError("the peer disconnected")
    async with anyio.create_task_group() as group:
        takers = Takers(slots, group)
        assert slots.try_take()
        for name in "ab":
            takers.start(name)
            await settle()
        slots.fail(error)
        await settle()
        takers.start("late")
        await settle()
        assert set(takers.failed) == {"a", "b", "late"}
        for failed in takers.failed.values():
            assert alike(failed, error)
    assert takers.got == []
    slots.give()
    assert slots.free == 1


# -- everything at once ---------------------------------------------------------------------------

STEPS = ("give", "cancel a", "cancel b", "run")


async def test_no_interleaving_loses_or_makes_a_credit() -> None:
    for steps in itertools.product(STEPS, repeat=4):
        slots = make(0)
        async with anyio.create_task_group() as group:
            takers = Takers(slots, group)
            for name in "ab":
                takers.start(name)
                await settle()
            for step in steps:
                if step == "give":
                    slots.give()
                elif step == "run":
                    await settle()
                else:
                    takers.cancel(step[-1])
            await settle()
            waiting = {"a", "b"} - takers.ended
            assert slots.free + len(takers.got) == steps.count("give"), steps
            assert not (slots.free and waiting), steps
            group.cancel_scope.cancel()
        assert slots.free + len(takers.got) == steps.count("give"), steps


numbers = st.integers(min_value=0, max_value=5)
actions = st.one_of(
    st.tuples(st.just("give"), st.just(0)),
    st.tuples(st.just("start"), st.just(0)),
    st.tuples(st.just("cancel"), numbers),
    st.tuples(st.just("post"), st.just(0)),
    st.tuples(st.just("run"), st.just(0)),
    st.tuples(st.just("fail"), st.just(0)),
)


async def _play(total: int, plan: list[tuple[str, int]]) -> None:
    slots = make(total)
    async with anyio.create_task_group() as group:
        takers = Takers(slots, group)
        given_out = posted = 0
        for action, number in plan:
            if action == "give":
                slots.give()
                given_out += 1
            elif action == "start":
                takers.start(str(len(takers.scopes)))
            elif action == "cancel" and str(number) in takers.scopes:
                takers.cancel(str(number))
            elif action == "post":
                posted += slots.try_take()
            elif action == "run":
                await settle()
            elif action == "fail":
                slots.fail(DisconnectedError("the peer disconnected"))
            assert 0 <= slots.free <= total + given_out
        await settle()
        assert slots.free + posted + len(takers.got) == total + given_out
        waiting = set(takers.scopes) - takers.ended
        assert not (slots.free and waiting), "somebody waits beside a free one"
        if any(action == "fail" for action, _ in plan):
            assert not waiting
        group.cancel_scope.cancel()
    assert slots.free + posted + len(takers.got) == total + given_out


BACKENDS = [("asyncio", {"use_uvloop": False}), ("asyncio", {"use_uvloop": True}), ("trio", {})]


@pytest.mark.parametrize("backend", BACKENDS, ids=["asyncio", "uvloop", "trio"])
def test_credits_always_add_up(backend: tuple[str, dict[str, bool]]) -> None:
    # hypothesis calls a synchronous test; each example is a loop's run of its own.
    @settings(max_examples=60)
    @given(st.integers(min_value=0, max_value=2), st.lists(actions, max_size=20))
    def examples(total: int, plan: list[tuple[str, int]]) -> None:
        anyio.run(_play, total, plan, backend=backend[0], backend_options=backend[1])

    examples()
