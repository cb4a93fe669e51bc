"""A datagram socket's end ends what waits for a peer's answer."""

import anyio
import pytest

import aiordma
from tests.device.players import Outcome, silent_taker, until
from tests.devices import ADDRESS
from tests.internals import endpoint_of, fail, resolution

pytestmark = [pytest.mark.anyio, pytest.mark.capability("datagrams")]


@pytest.mark.parametrize("step", ["looking up the name", "waiting for the answer"])
async def test_close_ends_pending_resolves(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looking_up = anyio.Event()

    async def never(*_: object) -> str:
        looking_up.set()
        await anyio.sleep_forever()
        raise AssertionError

    if step == "looking up the name":
        monkeypatch.setattr(resolution, "numeric_address", never)
    socket = await aiordma.open_datagram(ADDRESS)
    outcomes = [Outcome(), Outcome()]
    with silent_taker() as peer:
        async with anyio.create_task_group() as tasks:
            for outcome in outcomes:
                tasks.start_soon(outcome.of, lambda: socket.resolve(*peer, timeout=None))
            await until(lambda: len(endpoint_of(socket)._resolving) == 2)
            if step == "looking up the name":
                await looking_up.wait()
            else:
                await anyio.sleep(0.1)
            await socket.aclose()
    for outcome in outcomes:
        assert isinstance(outcome.error, aiordma.ClosedError)
        assert "this datagram socket is closed" in str(outcome.error)
    with pytest.raises(aiordma.ClosedError):
        await socket.resolve(ADDRESS, 4711)


async def test_socket_failure_ends_pending_resolves() -> None:
    outcome = Outcome()
    with silent_taker() as peer:
        async with (
            await aiordma.open_datagram(ADDRESS) as socket,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(outcome.of, lambda: socket.resolve(*peer, timeout=None))
            await until(lambda: bool(endpoint_of(socket)._resolving))
            fail(socket, aiordma.DeviceRemovedError("the device is gone"))
    assert isinstance(outcome.error, aiordma.DeviceRemovedError)


async def test_a_cancelled_resolve_is_a_cancellation_and_not_the_sockets_end() -> None:
    with silent_taker() as peer:
        async with await aiordma.open_datagram(ADDRESS) as socket:
            with anyio.move_on_after(0.05) as scope:
                await socket.resolve(*peer, timeout=None)
            assert scope.cancelled_caught
            assert not endpoint_of(socket)._resolving
            assert (await socket.resolve(ADDRESS, socket.port)).qp_num == socket.qp_num
