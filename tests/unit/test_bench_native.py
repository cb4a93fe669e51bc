"""`make bench` on this machine: every row that is soon measured is, by the command that it uses."""

import json
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from aiordma import ConnectionOptions, connect
from tests.bench import connections, posting, shared_server
from tests.unit.sources import ROOT

pytestmark = pytest.mark.slow

SOON = "[ns]*/[!i]*"  # all but native/idle_wakeups, which idles for half a minute


def measured(part: str, rows: str, tmp_path: Path) -> list[str]:
    """Measure rows shortly; return their names."""
    file = tmp_path / "rows.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.parts", part, str(file), "1", "0.05", rows],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    for row in found:
        assert None not in (row["value"], row["ratio"]), row["note"]
        assert row["rounds"] == 1
        assert row["value"] > 0, row
        assert row["ratio"] > 0, row
    return [row["name"] for row in found]


def test_the_rows_of_this_machine_are_measured(tmp_path: Path) -> None:
    assert measured("native", SOON, tmp_path) == [
        "software/echo/64",
        "software/echo/64/events",
        "software/echo/64/beside_protocol",
        "software/echo/64/beside_uvloop_streams",
        "software/messages/64",
        "software/messages/64/events",
        "software/messages/64/busy",
        "software/messages/64/events/busy",
        "software/lag_beside_writers",
        "native/completed_await",
        "native/trace",
        "native/trace_file",
        "native/statistics",
        *(
            f"native/{kind}/{row}"
            for kind in posting.KINDS
            for row in ("completed_await", "beside_write")
        ),
        "native/post_beside_busy_thread",
    ]


def test_the_rows_beside_c_are_measured(tmp_path: Path) -> None:
    assert measured("beside_c", "*", tmp_path) == [
        "software/send_receive/64/polling",
        "software/send_receive/64/beside_events_in_c",
        "software/send_receive/64/events",
        "software/read/64",
        "software/write/64",
        "software/write/64/window64",
        "software/send/64/window64",
        "software/messages/64/beside_posts",
        "software/messages/64/window32",
        "software/echo/64/window32/beside_tcp",
        "software/views/65536",
        "software/views/65536/in_c",
        "software/write/64/post_in_c",
    ]


def test_rows_beside_plain_tcp_are_measured(tmp_path: Path) -> None:
    assert measured("beside_tcp", "*", tmp_path) == [
        "software/write/1048576",
        "software/write/1048576/in_c",
        "software/read/1048576",
        "software/read/1048576/in_c",
        "software/write/64/window64/two_connections",
        "software/write/1048576/two_connections",
        "software/echo/64/beside_stream",
        "software/echo/64/events/beside_stream",
        "software/echo/64/beside_stream/tcp",
    ]


def test_rows_of_short_connections_are_measured(tmp_path: Path) -> None:
    assert measured("connects", "*", tmp_path) == [
        "software/connect",
        "software/connect/open_domain",
        "software/connect/beside_tcp",
        "software/stream/connect",
        "software/connect/200_at_once",
        "software/connect/200_at_once/in_c",
    ]


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
                assert await connections._echoes(connections._places(made[0], each), 0.05) > 0
