"""Functions that are called after others: after a drain, and whatever one of them raises."""

import asyncio
from functools import partial

import pytest

from aiordma._base.call_all import call_all
from tests.internals import Waiter, call_at_end, call_then_run

# -- call_at_end ----------------------------------------------------------------------------------


def test_no_function_is_called_where_nothing_collects_it() -> None:
    assert not call_at_end(lambda: pytest.fail("it was called"))


async def _woken(waiter: Waiter, seen: list[str]) -> None:
    await waiter.wait()
    seen.append("task")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_function_is_called_after_the_callback_and_its_task_after_it() -> None:
    seen: list[str] = []
    waiter = Waiter(asyncio.get_running_loop())
    task = asyncio.create_task(_woken(waiter, seen))
    await asyncio.sleep(0)

    def at_end() -> None:
        seen.append("end")
        waiter.wake()
        assert call_at_end(lambda: seen.append("end of the end"))

    def callback() -> None:
        assert call_at_end(at_end)
        seen.append("callback")

    asyncio.get_running_loop().call_soon(call_then_run, callback)
    await task
    assert seen == ["callback", "end", "task", "end of the end"]


def test_a_function_that_raises_keeps_no_other_from_being_called() -> None:
    seen: list[str] = []

    def interrupted() -> None:
        raise KeyboardInterrupt

    def callback() -> None:
        for each in (interrupted, lambda: seen.append("called")):
            assert call_at_end(each)

    with pytest.raises(KeyboardInterrupt):
        call_then_run(callback)
    assert seen == ["called"]


# -- call_all -------------------------------------------------------------------------------------


def test_each_is_called_whatever_the_others_raise() -> None:
    seen: list[int] = []

    def step(number: int, error: BaseException | None = None) -> None:
        seen.append(number)
        if error is not None:
            raise error

    first, last = ValueError("first"), KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt) as caught:
        call_all([lambda: step(1), lambda: step(2, first), lambda: step(3, last), lambda: step(4)])
    assert seen == [1, 2, 3, 4]
    assert caught.value.__context__ is first


def test_more_failing_steps_than_the_stack_has_frames_are_all_called() -> None:
    called: list[int] = []

    def step(number: int) -> None:
        called.append(number)
        raise OSError(f"step {number}")

    with pytest.raises(OSError, match="step 4999"):
        call_all([partial(step, number) for number in range(5000)])
    assert called == [*range(5000)]
