"""trace(): the requests of the device under test."""

import time

import pytest

import aiordma
from aiordma.types import TracedRequest
from tests.device.players import OWN_RECEIVES, REMOTE, connected
from tests.devices import DeviceUnderTest

pytestmark = pytest.mark.anyio


async def test_each_request_is_traced_with_its_device_and_latency(device: DeviceUnderTest) -> None:
    traced: list[TracedRequest] = []
    began = time.time_ns()
    with aiordma.trace(traced.extend):
        async with connected(client=OWN_RECEIVES, server=OWN_RECEIVES) as (client, server):
            memory = server.register(bytearray(64), REMOTE)
            receive = server.post_recv(bytearray(16))
            flushed = server.post_recv(bytearray(16))
            await client.send(b"hello")
            await receive
            await client.write(bytes(64), memory.remote())
            await client.read(bytearray(32), memory.remote()[:32])
    assert flushed.exception() is not None
    took = time.time_ns() - began
    succeeded = {(each.operation, each.bytes) for each in traced if each.status == "SUCCESS"}
    assert succeeded == {("SEND", 5), ("RECV", 5), ("RDMA_WRITE", 64), ("RDMA_READ", 32)}
    (other,) = [each for each in traced if each.status != "SUCCESS"]
    assert (other.operation, other.status in ("WR_FLUSH_ERR", "DISCARDED")) == ("RECV", True)
    for each in traced:
        assert each.device == device.name
        assert began - 1_000_000 <= each.posted_ns
        assert 0 <= each.latency_ns <= took + 1_000_000
        assert each.peer is not None
