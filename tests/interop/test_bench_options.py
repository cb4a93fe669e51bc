"""perftest's options mean the same to `aiordma bench`: each is tried with both, on one device."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import aiordma
from tests.bench.perftest import against_itself, columns, run_perftest
from tests.devices import ADDRESS, DEVICE, DeviceUnderTest
from tests.docs.programs import ROOT
from tests.forked import python
from tests.ports import free_port

COMMAND = ("-c", "from aiordma.cli.main import main; main()", "bench", "local", "--no-tcp")
ITERATIONS, SIZE = 60, 64
LEFT, COUNT = 0, 1
"""Columns of perftest: #bytes, #iterations."""


def perftest(name: str, size: int, *words: str) -> list[float]:
    """Return the numbers of a program of perftest, with itself as its peer. One pair in about a
    hundred hangs in the emulated guest, with no program of ours: another try then."""
    for _ in range(3):
        with suppress(subprocess.TimeoutExpired):
            return run_perftest(name, ADDRESS, size, ITERATIONS, *words)
    return run_perftest(name, ADDRESS, size, ITERATIONS, *words)


def ours(tmp_path: Path, *words: str, size: int = SIZE) -> dict[str, Any]:
    file = tmp_path / "rows.json"
    chosen = ("--host", ADDRESS, "--device", DEVICE, "-s", str(size), "-n", str(ITERATIONS))
    done = subprocess.run(
        [*python(), *COMMAND, *chosen, *words, "--json", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(file.read_text())
    assert isinstance(row, dict)
    return row


@pytest.mark.capability("rnr")
@pytest.mark.capability("librdmacm")
@pytest.mark.parametrize("option", ["", "-I 32 -T 16", "-q 2 -b"])
def test_bandwidth_options_count_as_perftest_does(tmp_path: Path, option: str) -> None:
    words = option.split()
    theirs = perftest("ib_send_bw", SIZE, *words)
    row = ours(tmp_path, "-o", "send", "-d", "16", *words)
    assert theirs[LEFT] == row["size"]
    if "-b" in words:
        # Ours counts its own messages, and those of the server that come meanwhile: none, or many,
        # because it sends until the client has all of its own.
        assert theirs[COUNT] <= row["count"]
    else:
        assert row["count"] == theirs[COUNT]


@contextmanager
def interface_mtu(device: DeviceUnderTest, mtu: int) -> Iterator[None]:
    """Change the MTU of the device's interface, for the block."""
    (link,) = [
        each["netdev"]
        for each in json.loads(subprocess.check_output(["rdma", "-j", "link", "show"]))
        if each["ifname"] == device.name
    ]
    file = Path(f"/sys/class/net/{link}/mtu")
    before = file.read_text()
    file.write_text(str(mtu))
    try:
        yield
    finally:
        file.write_text(before)


@pytest.mark.capability("datagrams")
def test_path_mtu_is_that_of_the_interface(tmp_path: Path, device: DeviceUnderTest) -> None:
    with interface_mtu(device, 1500), aiordma.verbs.Device(device.name).open() as context:
        assert context.query_port().active_mtu.bytes == 1024
        # A datagram is one packet.
        assert ours(tmp_path, "-o", "datagrams", "-d", "1", size=1024)["count"] == ITERATIONS
        theirs = perftest("ib_send_bw", 4096)
        assert theirs[COUNT] == ours(tmp_path, "-o", "send", "-d", "16")["count"]


@pytest.mark.capability("datagrams")
@pytest.mark.capability("librdmacm")
def test_gid_index_and_service_level_are_taken_as_by_perftest(
    tmp_path: Path, device: DeviceUnderTest
) -> None:
    with aiordma.verbs.Device(device.name).open() as context:
        (index,) = [
            str(each.index)
            for each in context.gid_table()
            if (each.address, each.type) == (ADDRESS, aiordma.verbs.GidType.ROCE_V2)
        ]
    # Without -R, as with -R perftest ignores both.
    options = ("-x", index, "-S", "3")
    program = ["ib_send_lat", "-c", "UD", "-F", "-d", device.name, "-s", str(SIZE), "-n", "60"]
    port = ["-p", str(free_port())]
    theirs = columns(against_itself([*program, *options, *port], [ADDRESS], []))
    row = ours(tmp_path, "-o", "datagrams", "-d", "1", *options)
    assert (row["size"], row["count"]) == (theirs[LEFT], theirs[COUNT])


@pytest.mark.capability("rnr")
@pytest.mark.capability("librdmacm")
@pytest.mark.parametrize("option", ["-I 0 -T 16"])
def test_latency_options_count_as_perftest_does(tmp_path: Path, option: str) -> None:
    theirs = perftest("ib_send_lat", SIZE, *option.split())
    row = ours(tmp_path, "-o", "echo", "-d", "1", *option.split())
    assert (row["size"], row["count"]) == (theirs[LEFT], theirs[COUNT])
