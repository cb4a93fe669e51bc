"""A peer that vanishes without a word ends the connection: a black hole on the wire."""

import json
import subprocess
from collections.abc import Iterator

import pytest

import aiordma
from aiordma._base.provider import SOFTWARE
from tests.device.players import both_ways, connected
from tests.devices import DeviceUnderTest
from tests.forked import python
from tests.network import run_alone
from tests.unit.sources import ROOT

Found = dict[str, list[str]]

UP = "set -e; provider={driver}; guest=tests/vm/guest; . $guest/settled.sh; . $guest/veth.sh"
DOWN = """
ip rule add pref 0 lookup local
for pref in 1 1 2 2 3; do ip rule del pref $pref; done
ip link del veth1
"""
_SLOW = "for end in 1 2; do tc qdisc replace dev veth$end root netem rate 10mbit; done"
_CUT = "for end in 1 2; do tc qdisc replace dev veth$end root netem loss 100%; done"
_MEND = "for end in 1 2; do tc qdisc del dev veth$end root; done"

_ALONE = """
from tests.device.black_hole import main
from tests.network import ip

ip("link set lo up")
main("127.0.0.1", "127.0.0.2", "ip link set lo down", "ip link set lo up")
"""


def shell(script: str) -> None:
    subprocess.run(["sh", "-c", script], cwd=ROOT, check=True)


@pytest.fixture
def found(device: DeviceUnderTest) -> Iterator[Found]:
    """What became of a READ, a SEND and a WRITE of no bytes that were posted after the wire was
    cut, with the default options, and on siw of a READ that was cut half way; and of sides that
    only receive, with and without keepalive; without those whose connection did not end."""
    if device.name == SOFTWARE:
        yield json.loads(run_alone(_ALONE))
        return
    shell(UP.format(driver=device.driver))
    try:
        program = [*python(), "-m", "tests.device.black_hole"]
        # Where TCP retransmits, nothing of ours is to be acknowledged once a READ is half way.
        slow = _SLOW if device.lacks("acknowledged_sends") else ""
        program += ["10.2.2.2", "10.2.2.1", _CUT, _MEND, slow]
        ran = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stderr
        yield json.loads(ran.stdout)
    finally:
        shell(DOWN)


def test_a_black_hole_ends_every_connection(device: DeviceUnderTest, found: Found) -> None:
    half = ["HALF A READ"] if device.lacks("acknowledged_sends") else []
    idle = ["IDLE CLIENT", "IDLE SERVER"]
    assert list(found) == [*half, "READ", "SEND", "WRITE", *idle, "NO KEEPALIVE", "CLOSE"]
    assert found.pop("NO KEEPALIVE") == ["connected", ""]
    assert found.pop("CLOSE") == ["closed", ""]
    for kind in idle:
        became, text = found.pop(kind)
        assert became == "RetryExceededError"
        assert "retry_count=6" in text
        assert device.lacks("acknowledged_sends") or "keepalive" in text
    for kind, (became, text) in found.items():
        if not kind.endswith("READ") and device.lacks("acknowledged_sends"):
            assert became == "done"
            continue
        flushes = device.lacks("acknowledged_sends")
        assert became == ("PeerFlushedError" if flushes else "RetryExceededError")
        assert "retry_count=6" in text
        assert "ack_timeout=16" in text


@pytest.mark.anyio
async def test_an_empty_write_disturbs_no_living_peer() -> None:
    """It is what a dead peer is noticed by, and needs no memory of the peer's."""
    async with connected() as (client, server):
        for _ in range(3):
            await client.post_write(b"", aiordma.RemoteMemory(0, 0, 0))
        await both_ways(client, server)
        await server.post_write(b"", aiordma.RemoteMemory(0, 0, 0))
        await both_ways(server, client)
