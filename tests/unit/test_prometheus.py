"""The Prometheus collector has the numbers of `aiordma.statistics`."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

import aiordma
import aiordma.testing
from aiordma.integrations.prometheus import DeviceCollector
from tests.connections import connect_to

pytestmark = pytest.mark.anyio


async def test_the_collector_has_the_counters_of_each_device() -> None:
    registry = CollectorRegistry()
    registry.register(DeviceCollector())
    async with aiordma.testing.connected_pair() as (client, server):
        await client.send(b"hello")
        await server.receive()
        text = generate_latest(registry).decode()
        device = aiordma.statistics()["software"]
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    label = '{device="software"}'
    assert float(found[f"aiordma_bytes_sent_total{label}"]) == device.requests.bytes_sent >= 5
    assert float(found[f"aiordma_posted_receives_total{label}"]) == device.requests.posted_receives
    assert float(found[f"aiordma_queues{label}"]) == device.queues >= 2
    assert float(found[f"aiordma_in_flight{label}"]) == device.requests.in_flight
    assert float(found['aiordma_completed_total{device="software",opcode="RECV"}']) >= 1
    assert float(found[f"aiordma_wakes_total{label}"]) == device.wakes


async def test_collector_has_the_counters_of_each_listener() -> None:
    registry = CollectorRegistry()
    registry.register(DeviceCollector())
    async with aiordma.listen("127.0.0.1", 0, device="software") as listener:
        client, server = await connect_to(listener, "127.0.0.1")
        found = generate_latest(registry).decode().splitlines()
        label = f'{{listener="127.0.0.1:{listener.port}"}}'
        for name in ("connection_requests", "established"):
            assert f"aiordma_listener_{name}_total{label} 1.0" in found
        assert f"aiordma_listener_waiting{label} 0.0" in found
        await client.aclose()
        await server.aclose()
    assert label not in generate_latest(registry).decode()
