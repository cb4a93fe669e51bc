"""A peer that vanishes without a word ends the connection: a black hole on the wire."""

import json
import subprocess
from typing import Any

import pytest

import aiordma
from aiordma import ConnectionOptions
from tests.device.black_hole import KEEPALIVE, LIMIT, THREADS_LATER, Found
from tests.device.players import both_ways, connected
from tests.devices import BUILT_IN, DeviceUnderTest
from tests.forked import python
from tests.internals import retry_seconds
from tests.network import run_alone
from tests.unit.sources import ROOT

pytestmark = pytest.mark.slow

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
from tests.device import black_hole
from tests.network import ip

ip("link set lo up")
up, down = "ip link set lo up", "ip link set lo down"
black_hole.{function}("127.0.0.1", "127.0.0.2", down, up{options})
"""

LATE = 3.0 if BUILT_IN else 10.0
"""Seconds beyond the stated bound that a test allows: the clocks of TCP and of the checks tick once
a second, and an emulated machine is slow. Without a bound, nothing ends within a minute."""


HUNG = LIMIT + THREADS_LATER + 70
"""Seconds: black_hole.py has ended itself by then, and said where it hung, also where an emulated
machine takes a minute to start Python."""


def shell(script: str) -> None:
    subprocess.run(["sh", "-c", script], cwd=ROOT, check=True, timeout=HUNG)


def play(device: DeviceUnderTest, function: str, *more: str) -> Any:
    """Run a function of black_hole.py over a wire of its own, and return what it found.

    Args:
        more: its further arguments on the veth pair.
    """
    if device.is_built_in:
        return play_alone(function)
    shell(UP.format(driver=device.driver))
    try:
        program = [*python(), "-m", "tests.device.black_hole", function]
        program += ["10.2.2.2", "10.2.2.1", _CUT, _MEND, *more]
        ran = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=HUNG)
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)
    finally:
        shell(DOWN)


def play_alone(function: str, options: str = "") -> Any:
    """As `play`, on the software device, with a loopback interface of its own."""
    return json.loads(run_alone(_ALONE.format(function=function, options=options)))


def cut_loopback(**options: Any) -> Found:
    """Return what black_hole.py finds on the software device with these options."""
    found: Found = play_alone("main", f", options={json.dumps(options)!r}")
    return found


def check_times(found: Found, options: ConnectionOptions) -> None:
    """Compare the times of the ends with the bounds that docs/dead-peers.md states."""
    peer_timeout = max(retry_seconds(options.retry_count, options.ack_timeout), 1)
    for kind, (_, _, seconds) in found.items():
        if kind == "CLOSE":
            bound = options.flush_timeout
        else:
            bound = peer_timeout + (KEEPALIVE if kind.startswith("IDLE") else 0)
        assert kind == "NO KEEPALIVE" or seconds <= bound + LATE, (kind, seconds)


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
def test_a_black_hole_ends_every_connection(device: DeviceUnderTest) -> None:
    """A READ, a SEND and a WRITE of no bytes that were posted after the wire was cut, with the
    default options, and on siw a READ that was cut half way; and sides that only receive, with and
    without keepalive. Those whose connection did not end are not found."""
    # Where TCP retransmits, nothing of ours is to be acknowledged once a READ is half way.
    slow = [_SLOW] if device.lacks("acknowledged_sends") else []
    found: Found = play(device, "main", *slow)
    half = ["HALF A READ"] if device.lacks("acknowledged_sends") else []
    idle = ["IDLE CLIENT", "IDLE SERVER"]
    assert set(found) == {*half, "READ", "SEND", "WRITE", *idle, "NO KEEPALIVE", "CLOSE"}
    check_times(found, ConnectionOptions())
    assert found.pop("NO KEEPALIVE")[0] == "connected"
    assert found.pop("CLOSE")[0] == "closed"
    for kind in idle:
        became, text, _ = found.pop(kind)
        assert became == "RetryExceededError"
        assert "retry_count=6" in text
        assert device.lacks("acknowledged_sends") or "keepalive" in text
    for kind, (became, text, _) in found.items():
        if not kind.endswith("READ") and device.lacks("acknowledged_sends"):
            assert became == "done"
            continue
        flushes = device.lacks("acknowledged_sends")
        assert became == ("PeerFlushedError" if flushes else "RetryExceededError")
        assert "retry_count=6" in text
        assert "ack_timeout=16" in text


@pytest.mark.promise("Reconnecting retries no request")
def test_reconnecting_outlives_a_black_hole(device: DeviceUnderTest) -> None:
    assert play(device, "reconnect") == ["RetryExceededError", "2"]


@pytest.mark.anyio
async def test_an_empty_write_disturbs_no_living_peer() -> None:
    """It is what a dead peer is noticed by, and needs no memory of the peer's."""
    async with connected() as (client, server):
        for _ in range(3):
            await client.post_write(b"", aiordma.RemoteMemory(0, 0, 0))
        await both_ways(client, server)
        await server.post_write(b"", aiordma.RemoteMemory(0, 0, 0))
        await both_ways(server, client)
