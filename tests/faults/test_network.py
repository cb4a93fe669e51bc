"""Faults of the network and of the machine, on a device of the kernel's: a wire (netem on a veth
pair) that loses, delays, reorders, doubles and changes packets; a link that goes down and comes
back; a device that is deleted; a limit on pinned memory.

What else can happen to a peer: test_peers.py, tests/device/test_dead_peers.py (black holes).
"""

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.device.test_dead_peers import DOWN, UP, shell
from tests.devices import DeviceUnderTest
from tests.forked import python
from tests.unit.sources import ROOT

from .transfers import TRANSFERS

pytestmark = pytest.mark.capability("wire")

SERVER, CLIENT = "10.2.2.2", "10.2.2.1"
SECONDS = 300
"""The time within which a program has to end, in an emulated machine."""

WIRE = {
    "loss of 1 %": "loss 1%",
    "loss of 5 %": "loss 5%",
    "delay": "delay 20ms",
    "reordering": "delay 5ms reorder 25% 50%",
    "duplication": "duplicate 10%",
    "corruption": "corrupt 2%",
}

CUT = "ip link set veth1 down"
MEND = """
ip link set veth1 up
for end in 1 2; do
    other=$((3 - end))
    ip neighbour replace 10.2.2.$other dev veth$end nud permanent \
        lladdr "$(cat /sys/class/net/veth$other/address)"
    ip route replace 10.2.2.$other dev veth$end table 10$end
done
"""


def ran(*words: str) -> Any:
    """Run one of our programs; return what it printed."""
    command = [*python(), "-m", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="class")
def wire(device: DeviceUnderTest) -> Iterator[None]:
    """Two devices with a wire between them: new ones for each test, and one pair for a class."""
    reason = device.lacks("wire")
    if reason:
        pytest.skip(reason)
    shell(UP.format(driver=device.driver))
    yield
    shell(DOWN)


class TestBadWire:
    @pytest.mark.promise("Faults of the network change no byte")
    @pytest.mark.parametrize("fault", WIRE)
    def test_every_byte_arrives(self, fault: str, wire: None) -> None:
        found = ran("tests.faults.transfers", SERVER, CLIENT, json.dumps({fault: WIRE[fault]}))
        assert found == {fault: dict.fromkeys(TRANSFERS, "ok")}


@pytest.mark.promise("Faults of the network change no byte")
@pytest.mark.capability("outlives_link_down")
def test_transfer_goes_on_when_the_link_comes_back(wire: None) -> None:
    found = ran("tests.faults.links", "back", SERVER, CLIENT, CUT, MEND)
    assert found == {"transfer": ["went on"], "again": ["works"]}


@pytest.mark.promise(
    "Faults of the network change no byte",
    "A peer that has gone is a PeerGoneError, or the end of the stream",
)
def test_lost_link_ends_its_connections(wire: None, device: DeviceUnderTest) -> None:
    found = ran("tests.faults.links", "lost", SERVER, CLIENT, CUT, "")
    assert len(found) == 4
    for outcome in found.values():
        assert "RdmaError" in outcome or outcome[0] == "EndOfStream", found
    # If the last words of the client's kernel meet a request, siw does not say whose fault it is.
    unnamed = device.lacks("resets_named") and "LocalQueuePairError" in found["server's transfer"]
    assert unnamed or "PeerGoneError" in found["server's transfer"], found
    local = [outcome for outcome in found.values() if "LocalQueuePairError" in outcome]
    assert all("interface is down" in outcome[-1] for outcome in local)


@pytest.mark.promise("Faults of the network change no byte")
@pytest.mark.capability("removal_reported")
def test_deleted_device_ends_its_connections(wire: None, device: DeviceUnderTest) -> None:
    delete = f"rdma link delete {device.driver}1"
    found = ran("tests.faults.links", "lost", SERVER, CLIENT, delete, "")
    assert len(found) == 4
    for outcome in found.values():
        assert "PeerGoneError" in outcome or outcome[0] == "EndOfStream", found
    assert "DeviceRemovedError" in found["client's receive"]


@pytest.mark.promise("Faults of the network change no byte")
@pytest.mark.parametrize(
    "cut",
    [
        pytest.param("ip link set veth{end} down", id="link"),
        pytest.param(
            "rdma link delete {driver}1",
            id="device",
            marks=pytest.mark.capability("removal_reported"),
        ),
    ],
)
def test_rails_go_on_when_one_of_two_devices_breaks(
    cut: str, wire: None, device: DeviceUnderTest
) -> None:
    # The peer's end of the wire: with no route here, rxe can hang. This one: what is complete on
    # siw may still be on its way (docs/devices.md).
    end = 2 if device.driver == "rxe" else 1
    cut = cut.format(driver=device.driver, end=end)
    found = ran("tests.faults.rails", device.address, SERVER, CLIENT, cut)
    assert list(found["broken"]) == ["1"]
    assert "RdmaError" in found["broken"]["1"]
    assert found["moved"] == 200_000


@pytest.mark.promise("Faults of the network change no byte")
def test_memlock_limit_is_named(device: DeviceUnderTest) -> None:
    found = ran("tests.faults.pinning", device.address)
    for call, limit in (("connect", "128 KiB"), ("register", "8192 KiB")):
        assert "RLIMIT_MEMLOCK" in found[call], found
        assert limit in found[call], found
    assert found["message"] == repr(bytes(5))
