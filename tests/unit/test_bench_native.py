"""`make bench` on this machine: every row that is soon measured is, by the command that it uses."""

import json
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from aiordma import ConnectionOptions, connect
from tests.bench import connections, shared_server
from tests.bench.parts import PARTS, Plan, words
from tests.unit.sources import ROOT

pytestmark = pytest.mark.slow

SOON = "[ns]*/[!i]*"  # all but native/idle_wakeups, which idles for half a minute


@pytest.mark.parametrize(
    ("part", "pattern"),
    [("native", SOON), ("beside_c", ""), ("beside_tcp", ""), ("connects", "")],
    ids=lambda name: name,
)
def test_each_row_is_measured(part: str, pattern: str, tmp_path: Path) -> None:
    (chosen,) = (each for each in PARTS if each.name == part)
    plan, file = Plan(1, 0.05, pattern), tmp_path / "rows.json"
    done = subprocess.run(
        [sys.executable, *words(chosen, plan, file)[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert [row["name"] for row in found] == [row.name for row in chosen.rows(plan)]
    for row in found:
        assert None not in (row["value"], row["ratio"]), row["note"]
        assert row["rounds"] == 1
        assert row["value"] > 0, row
        assert row["ratio"] > 0, row


@pytest.mark.anyio
async def test_the_server_of_a_thousand_connections_echoes() -> None:
    with shared_server.serving("127.0.0.1", "software", 0.0) as ports:
        for size in (1, 3):  # the second time, the first client has gone
            async with AsyncExitStack() as stack:
                made = [
                    await stack.enter_async_context(
                        await connect(
                            "127.0.0.1",
                            ports.rdma,
                            device="software",
                            receive_buffers=0,
                            options=ConnectionOptions(
                                max_recv_wr=connections.WINDOW, max_send_wr=connections.WINDOW + 1
                            ),
                        )
                    )
                    for _ in range(size)
                ]
                each = [made[i % size] for i in range(connections.WINDOW)]
                places = connections._places(made[0], each)
                found = await connections._echoes(places, 0.05, ports.pid)
                assert found.value
                assert found.cpu_us
