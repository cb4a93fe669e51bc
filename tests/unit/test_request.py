"""WorkRequest: awaited by any task, any number of times; what the device may touch is held until
the end, and given back once."""

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from aiordma import (
    ClosedError,
    FlushedError,
    RemoteAccessError,
    RemoteMemory,
    WorkCompletionError,
    WorkRequest,
)
from aiordma.verbs import WorkCompletionStatus
from tests.alike import alike
from tests.internals import EventLoop, completion_error, current_event_loop
from tests.unit.loops import settle

pytestmark = pytest.mark.anyio

REMOTE = RemoteMemory(0x1000, 64, 0x77)


def completion(status: int = 0, *, wr_id: int = 1 << 32, byte_len: int = 64) -> tuple[int, ...]:
    """What the hub hands on, in the fields' order of WorkCompletion."""
    return (wr_id, status, 0, 0x88 if status else 0, byte_len, 0, 17, 0, 0, 0, 0, 0, 0, 0)


class Memory:
    """Remembers when it was held and released."""

    def __init__(self) -> None:
        self.users = 0
        self.history: list[str] = []

    def _hold(self) -> None:
        self.users += 1
        self.history.append("hold")

    def _release(self) -> None:
        self.users -= 1
        self.history.append("release")


class Owner:
    """An endpoint's part: errors made of completions, slots taken back."""

    def __init__(self) -> None:
        self.loop: EventLoop = current_event_loop()
        self.ended: list[WorkRequest] = []
        self.users_at_end: list[int] = []
        self.unretrieved: list[str] = []
        self.memory = Memory()

    def request_failed(self, request: WorkRequest, raw: tuple[int, ...]) -> Exception:
        assert not request.done()
        return completion_error(raw[1], str(request), vendor_err=raw[3], qp_num=raw[6])

    def request_ended(self, request: WorkRequest) -> None:
        assert request.done()
        self.users_at_end.append(self.memory.users)
        self.ended.append(request)

    def request_unretrieved(self, request: WorkRequest) -> None:
        self.unretrieved.append(type(request.exception()).__name__)

    def run_ended(self, earlier: WorkRequest, last: WorkRequest) -> None:
        raise AssertionError("no request of these tests is unsignaled")

    def post(self) -> WorkRequest:
        request = WorkRequest(self, "RDMA_WRITE", 64, [self.memory], REMOTE)
        request.wr_id = 1 << 32
        return request


async def test_awaiting_gives_the_completion() -> None:
    owner = Owner()
    request = owner.post()
    assert not request.done()
    async with anyio.create_task_group() as group:
        results = []

        async def wait() -> None:
            results.append(await request)

        group.start_soon(wait)
        await settle()
        assert results == []
        request._complete(completion())
    assert [result.byte_len for result in results] == [64]
    assert results[0].ok
    assert owner.ended == [request]


async def test_any_number_of_tasks_await_it_any_number_of_times() -> None:
    request = Owner().post()
    results = []

    async def wait() -> None:
        results.append(await request)
        results.append(await request)

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(wait)
        await settle()
        request._complete(completion())
    assert len(results) == 6
    assert len(set(map(id, results))) == 1
    assert await request is results[0]


async def test_what_has_ended_is_awaited_without_waiting() -> None:
    request = Owner().post()
    request._complete(completion())

    async def wait() -> Any:
        return await request

    with pytest.raises(StopIteration) as stopped:
        wait().send(None)
    assert stopped.value.value is request.result()


async def test_failure_is_raised_in_every_waiting_task() -> None:
    owner = Owner()
    request = owner.post()
    caught = []

    async def wait() -> None:
        try:
            await request
        except WorkCompletionError as error:
            caught.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        group.start_soon(wait)
        await settle()
        request._complete(completion(WorkCompletionStatus.REM_ACCESS_ERR))
    assert len(caught) == 2
    assert alike(caught[0], caught[1])
    assert alike(caught[0], request.exception())
    assert type(caught[0]) is RemoteAccessError
    assert caught[0].vendor_err == 0x88
    assert "RDMA_WRITE of 64 bytes" in str(caught[0])
    with pytest.raises(RemoteAccessError):
        request.result()


async def test_its_end_without_a_completion_is_raised_with_its_cause() -> None:
    owner = Owner()
    request = owner.post()
    error = FlushedError(WorkCompletionStatus.WR_FLUSH_ERR, str(request))
    error.__cause__ = ClosedError("this connection was closed")
    request._fail(error)
    with pytest.raises(FlushedError) as caught:
        await request
    assert isinstance(caught.value.__cause__, ClosedError)
    assert owner.ended == [request]


async def test_raising_the_same_error_again_and_again_does_not_grow() -> None:
    request = Owner().post()
    request._complete(completion(WorkCompletionStatus.REM_ACCESS_ERR))
    lengths = set()
    for _ in range(20):
        with pytest.raises(RemoteAccessError) as caught:
            await request
        lengths.add(len(caught.traceback))
    assert len(lengths) == 1


async def test_before_its_end_there_is_no_result() -> None:
    request = Owner().post()
    with pytest.raises(RuntimeError, match="has not ended: await it"):
        request.result()
    assert request.exception() is None


# -- errors that are never retrieved --------------------------------------------------------------

FAILED = completion(WorkCompletionStatus.REM_ACCESS_ERR)


def holding(kept: WorkRequest) -> Callable[[WorkRequest], object]:
    """A callback that keeps the request alive."""
    return lambda _: kept


@pytest.mark.promise("Errors that were never retrieved are reported")
@pytest.mark.parametrize("in_a_cycle", [False, True])
async def test_each_unretrieved_error_is_reported_once(in_a_cycle: bool) -> None:
    owner = Owner()
    for _ in range(300):  # more than the engine keeps to be used again
        request = owner.post()
        if in_a_cycle:
            request.add_done_callback(holding(request))
            around: list[Any] = [request]
            around.append(around)
            del around
        request._complete(FAILED)
        owner.ended.clear()
        del request
        if in_a_cycle:
            gc.collect(1)  # young: a full collection looks through all that pytest holds
    assert owner.unretrieved == ["RemoteAccessError"] * 300


@pytest.mark.promise("Errors that were never retrieved are reported")
async def test_retrieved_error_is_not_reported() -> None:
    owner = Owner()
    for retrieve in ("await", "result", "exception", "cancelled await"):
        request = owner.post()
        if retrieve == "cancelled await":
            with anyio.CancelScope() as scope:
                scope.cancel()
                await request
        request._complete(FAILED)
        if retrieve == "await":
            with pytest.raises(RemoteAccessError):
                await request
        elif retrieve == "result":
            with pytest.raises(RemoteAccessError):
                request.result()
        elif retrieve == "exception":
            assert request.exception() is not None
        owner.ended.clear()
        del request
        gc.collect()
    assert owner.unretrieved == []


async def test_collected_success_does_not_hide_the_next_error() -> None:
    # The engine uses a request's memory again, and Python finalizes an object only once.
    owner = Owner()
    for _ in range(3):
        around: list[Any] = [owner.post()]
        around[0]._complete(completion())
        around.append(around)
        owner.ended.clear()
        del around
        gc.collect()
        owner.post()._complete(FAILED)
        owner.ended.clear()
    assert len(owner.unretrieved) == 3


async def test_error_of_a_run_is_reported_by_its_last_request() -> None:
    owner = Owner()
    run = [owner.post() for _ in range(3)]
    for request in run:
        request._set_run(run)
        request._fail(ClosedError("closed"))
    owner.ended.clear()
    del request, run
    gc.collect()
    assert owner.unretrieved == ["ClosedError"]


async def test_done_callback_does_not_retrieve_the_error() -> None:
    owner = Owner()
    request = owner.post()
    request.add_done_callback(lambda _: None)
    request._complete(FAILED)
    owner.ended.clear()
    del request
    gc.collect()
    assert owner.unretrieved == ["RemoteAccessError"]


# -- memory ---------------------------------------------------------------------------------------


@pytest.mark.promise("A buffer is held until its request completes")
@pytest.mark.parametrize("status", [0, int(WorkCompletionStatus.REM_ACCESS_ERR)])
async def test_memory_is_held_from_the_post_to_the_completion(status: int) -> None:
    owner = Owner()
    request = owner.post()
    assert owner.memory.users == 1
    request._complete(completion(status))
    assert owner.memory.history == ["hold", "release"]


async def test_memory_is_held_to_the_end_without_a_completion() -> None:
    owner = Owner()
    request = owner.post()
    request._fail(ClosedError("closed"))
    assert owner.memory.history == ["hold", "release"]


async def test_memory_is_released_before_callbacks() -> None:
    # A callback may close the region, or lease the block again.
    owner = Owner()
    request = owner.post()
    heard = []
    request.add_done_callback(lambda _: heard.append(owner.memory.users))
    request._complete(completion())
    assert heard == [0]
    assert owner.users_at_end == [0]


@pytest.mark.promise("A buffer is held until its request completes")
async def test_cancelling_the_await_leaves_it_in_flight_and_its_memory_held() -> None:
    owner = Owner()
    request = owner.post()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await request
    assert scope.cancelled_caught
    await settle()
    assert not request.done()
    assert owner.memory.history == ["hold"]
    assert owner.ended == []
    request._complete(completion())
    assert owner.memory.history == ["hold", "release"]
    assert (await request).ok  # the result is still there for others


async def test_one_cancelled_waiter_does_not_disturb_the_others() -> None:
    owner = Owner()
    request = owner.post()
    results = []
    scope = anyio.CancelScope()

    async def wait(own_scope: anyio.CancelScope) -> None:
        with own_scope:
            results.append(await request)

    async with anyio.create_task_group() as group:
        group.start_soon(wait, anyio.CancelScope())
        group.start_soon(wait, scope)
        group.start_soon(wait, anyio.CancelScope())
        await settle()
        scope.cancel()
        await settle()
        assert len(request._waiters) == 2  # a cancelled one leaves nothing behind
        request._complete(completion())
    assert len(results) == 2


async def test_completion_and_cancellation_in_the_same_round_end_the_request_once() -> None:
    for cancel_first in (True, False):
        owner = Owner()
        request = owner.post()
        scope = anyio.CancelScope()

        async def wait(request: WorkRequest, scope: anyio.CancelScope) -> None:
            with scope:
                await request

        async with anyio.create_task_group() as group:
            group.start_soon(wait, request, scope)
            await settle()
            if cancel_first:
                scope.cancel()
            request._complete(completion())
            scope.cancel()
        assert owner.memory.history == ["hold", "release"]
        assert owner.ended == [request]


async def test_a_request_that_the_device_did_not_take_holds_nothing() -> None:
    owner = Owner()
    request = owner.post()
    request._drop()
    assert owner.memory.history == ["hold", "release"]
    assert owner.ended == []  # its slot is the poster's to give back


async def test_what_was_held_is_let_go() -> None:
    memory = Memory()
    request = WorkRequest(Owner(), "SEND", 8, [memory])
    alive = weakref.ref(memory)
    del memory
    gc.collect()
    assert alive() is not None
    request._complete(completion())
    gc.collect()
    assert alive() is None


async def test_all_parts_are_held_and_released() -> None:
    parts = [Memory() for _ in range(4)]
    request = WorkRequest(Owner(), "SEND", 8, parts)
    assert [part.users for part in parts] == [1, 1, 1, 1]
    request._complete(completion())
    assert [part.history for part in parts] == [["hold", "release"]] * 4


# -- callbacks ------------------------------------------------------------------------------------


async def test_callbacks_are_called_once_in_order_and_at_once_after_the_end() -> None:
    request = Owner().post()
    called: list[str] = []
    request.add_done_callback(lambda _: called.append("first"))
    request.add_done_callback(lambda _: called.append("second"))
    assert called == []
    request._complete(completion())
    assert called == ["first", "second"]
    request.add_done_callback(lambda ended: called.append(f"late {ended is request}"))
    assert called == ["first", "second", "late True"]


async def test_inner_callback_is_replaced_and_called_first() -> None:
    called: list[int] = []
    request = Owner().post()
    request.add_done_callback(lambda _: called.append(1))
    request._set_on_done(lambda _: called.append(2))
    request._set_on_done(lambda _: called.append(3))
    assert called == []
    request._complete(completion())
    assert called == [3, 1]
    request._set_on_done(lambda _: called.append(4))
    assert called == [3, 1, 4]


async def test_raising_callback_is_logged_others_still_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    owner = Owner()
    request = owner.post()
    called: list[str] = []

    def fail(_: WorkRequest) -> None:
        raise RuntimeError("something broke in here")

    request.add_done_callback(fail)
    request.add_done_callback(lambda _: called.append("second"))

    async with anyio.create_task_group() as group:

        async def wait() -> None:
            await request
            called.append("waiter")

        group.start_soon(wait)
        await settle()
        request._complete(completion())
    assert called == ["second", "waiter"]
    assert "something broke in here" in caplog.text
    assert owner.memory.users == 0
    assert owner.ended == [request]


async def test_a_callback_can_be_forgotten() -> None:
    request = Owner().post()
    called: list[WorkRequest] = []
    request.add_done_callback(called.append)
    request.add_done_callback(called.append)
    assert request.remove_done_callback(called.append) == 2
    assert request.remove_done_callback(called.append) == 0
    request._complete(completion())
    assert called == []


@pytest.mark.parametrize("use_uvloop", [False, True], ids=["asyncio", "uvloop"])
def test_asyncio_waits_for_the_first_of_several(use_uvloop: bool) -> None:
    async def main() -> None:
        owner = Owner()
        first, second = owner.post(), owner.post()
        owner.loop.call_later(0, lambda: second._complete(completion()))
        waiting: Any = {first, second}
        done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert (done, pending) == ({second}, {first})
        assert first._callbacks == []  # asyncio has taken its callback back

    anyio.run(main, backend="asyncio", backend_options={"use_uvloop": use_uvloop})


async def test_a_callback_can_post_the_next_request() -> None:
    # As a pipeline does that keeps the queue full.
    owner = Owner()
    posted: list[WorkRequest] = []

    def again(_: WorkRequest) -> None:
        if len(posted) < 3:
            posted.append(owner.post())
            posted[-1].add_done_callback(again)

    request = owner.post()
    request.add_done_callback(again)
    request._complete(completion())
    while not posted[-1].done():
        posted[-1]._complete(completion())
    assert len(posted) == 3
    assert owner.memory.users == 0


# -- texts ----------------------------------------------------------------------------------------


async def test_it_says_what_it_is_and_how_it_stands() -> None:
    owner = Owner()
    request = owner.post()
    what = "RDMA_WRITE of 64 bytes (remote: 64 bytes at 0x1000, rkey 0x77)"
    assert str(request) == what
    assert repr(request) == f"<WorkRequest {what}, wr_id 0x100000000, in flight>"
    request._complete(completion())
    assert repr(request).endswith(", done>")
    failed = owner.post()
    failed._complete(completion(WorkCompletionStatus.REM_ACCESS_ERR))
    assert repr(failed).endswith(", failed: RemoteAccessError>")
    assert str(WorkRequest(owner, "SEND", 5, [])) == "SEND of 5 bytes"
