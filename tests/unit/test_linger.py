"""How long sends in flight may still be acknowledged after the peer's disconnect."""

from types import SimpleNamespace
from typing import Any

import pytest

from aiordma import ConnectionOptions, WorkRequest
from aiordma._endpoint import endpoint as endpoint_module
from aiordma._endpoint.endpoint import Endpoint
from aiordma._endpoint.handshake import Handshake
from aiordma._runtime.device_statistics import HubCounters
from aiordma.verbs import CmEventType
from aiordma.verbs.event_channel import Event
from tests.internals import ConnectionState, Drain, InFlightTable, Phase
from tests.unit.numbers_device import Loop

pytestmark = pytest.mark.anyio

DISCONNECTED = Event(CmEventType.DISCONNECTED, 0, 1, 0, b"", 0, 0, 0, 0, 0)
REMOVED = Event(CmEventType.DEVICE_REMOVAL, 0, 1, 0, b"", 0, 0, 0, 0, 0)
SUCCESS = (1 << 32, *[0] * 13)


class Pair:
    """An established endpoint without a queue pair, and its requests in flight."""

    def __init__(self, *, is_iwarp: bool = False, **options: float) -> None:
        self.loop = Loop()
        hub: Any = SimpleNamespace(
            loop=self.loop,
            is_iwarp=is_iwarp,
            poller=Drain(None, 0, 0, InFlightTable()),
            domain=None,
            pool=None,
            drain=lambda: None,
            drain_all=lambda: None,
            in_flight=SimpleNamespace(take=lambda _: None),
            on_failure=set(),
            forget_queue_pair=lambda _: None,
            context=SimpleNamespace(device_name="numbers0"),
            take_unused=lambda: lambda: None,
            counters=HubCounters("numbers0", Drain(None, 0, 0, InFlightTable())),
        )
        identifier: Any = SimpleNamespace(
            disconnect=lambda: None, _local=lambda: bytes(28), peer_address=("192.0.2.1", 7471)
        )
        reactor: Any = SimpleNamespace(
            loop=self.loop,
            blocks=False,
            enter=lambda _: None,
            unsubscribe=lambda _: None,
            destroy=lambda *_: None,
        )
        chosen = ConnectionOptions(**{"linger": 3.0, **options})  # type: ignore[arg-type]
        loop: Any = self.loop
        handshake = Handshake(loop, ConnectionState.ESTABLISHED)
        self.endpoint = Endpoint(reactor, hub, identifier, chosen, handshake)
        queue_pair: Any = SimpleNamespace(key=1)
        self.endpoint.pair.raw = queue_pair

    def post(self, *, is_receive: bool = False) -> WorkRequest:
        endpoint = self.endpoint
        assert (
            endpoint.work.receives.slots if is_receive else endpoint.work.sends.slots
        ).try_take()
        request = WorkRequest(endpoint, "SEND", 8, (), is_receive=is_receive)
        request.wr_id = 1 << 32
        endpoint.work.requests.add(request)
        return request

    @property
    def flushes(self) -> list[float]:
        """The delays after which the endpoint destroys its queue pair."""
        return self._delays(endpoint_module._FLUSHED)

    @property
    def lingers(self) -> list[float]:
        """The delays after which the endpoint ends."""
        return self._delays(endpoint_module._LINGER)

    def _delays(self, name: str) -> list[float]:
        timers: Any = self.endpoint.teardown._timers
        return [timers[name].delay] if name in timers else []


@pytest.mark.promise("Every posted request completes or fails")
async def test_sends_in_flight_get_the_linger_time() -> None:
    pair = Pair()
    pair.post()
    pair.endpoint.handle_event(DISCONNECTED)
    assert pair.lingers == [3.0]
    assert pair.endpoint.teardown.phase is Phase.OPEN


@pytest.mark.promise(
    "Every posted request completes or fails",
    "Every wait has a bound, except waits for the peer's program",
)
async def test_each_acknowledgement_starts_the_linger_time_anew() -> None:
    pair = Pair()
    first, second, receive = pair.post(), pair.post(), pair.post(is_receive=True)
    pair.endpoint.handle_event(DISCONNECTED)
    before = len(pair.loop.timers)
    receive._complete(SUCCESS)
    assert len(pair.loop.timers) == before  # a receive says nothing about the sends
    first._complete(SUCCESS)
    assert pair.lingers == [3.0]
    assert len(pair.loop.timers) == before + 1
    second._complete(SUCCESS)
    assert pair.lingers == [0]  # nothing is left to wait for


async def test_no_timer_lingers_once_the_endpoint_ends() -> None:
    pair = Pair()
    first, second = pair.post(), pair.post()
    pair.endpoint.handle_event(DISCONNECTED)
    pair.endpoint.teardown.close()
    assert pair.lingers == []
    first._complete(SUCCESS)
    second._complete(SUCCESS)
    assert pair.lingers == []


async def test_without_sends_in_flight_it_ends_at_once() -> None:
    pair = Pair()
    pair.post(is_receive=True)
    pair.endpoint.handle_event(DISCONNECTED)
    assert pair.endpoint.teardown.phase > Phase.OPEN


@pytest.mark.promise("Every posted request completes or fails")
async def test_iwarp_does_not_linger() -> None:
    # Acknowledgement and disconnect come in one TCP stream, in order.
    pair = Pair(is_iwarp=True)
    pair.post()
    pair.endpoint.handle_event(DISCONNECTED)
    assert pair.endpoint.teardown.phase > Phase.OPEN


async def test_removed_device_does_not_linger() -> None:
    pair = Pair()
    pair.post()
    pair.endpoint.handle_event(REMOVED)
    assert pair.endpoint.teardown.phase > Phase.OPEN


@pytest.mark.promise("Every posted request completes or fails")
@pytest.mark.parametrize(("options", "seconds"), [({}, 0.5), ({"flush_timeout": 7.0}, 7.0)])
async def test_flush_timeout_bounds_the_flush(options: Any, seconds: float) -> None:
    pair = Pair(**options)
    first, second = pair.post(), pair.post(is_receive=True)
    pair.endpoint.teardown.close()
    assert pair.flushes == [0]  # in the next turn, nothing uses the queue pair
    pair.loop.fire()
    assert pair.flushes == [seconds]
    first._complete(SUCCESS)
    assert pair.flushes == [seconds]
    second._complete(SUCCESS)
    assert pair.flushes == [0]  # the last flushed request ends the wait
