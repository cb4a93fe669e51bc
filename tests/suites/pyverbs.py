"""rdma-core's own tests of pyverbs, its binding for Python, on the software device:
python -m tests.suites.pyverbs [--write].

They run as under `aiordma exec`, with Debian's pyverbs. Nothing of them is kept in this repository.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from aiordma.cli.exec import FOLDER
from tests.suites.common import BUILD, fetch_commit, reason, write_page

__all__ = ("main",)

SOURCES = BUILD / "rdma-core"
REPOSITORY = "https://github.com/linux-rdma/rdma-core"
REVISION = "91392a91eb41affee3bd75dc7d03eb86b4854aea"
"""The commit v44.0: Debian 12 has that version of pyverbs."""
SECONDS = 600
DEVICES = ("software", "software_roce")

BY_HAND = "connects reliable queue pairs by hand (`ibv_modify_qp` to RTR)"
REASONS = {
    "*: *Failed to modify QP state to RTR*": BY_HAND,
    "*test_rdmacm_async_traffic_external_qp: *": "a client's own queue pair needs `rdma_establish`",
    "*test_imported_rc_ex_rdma_write: *": "imports another process's device (`ibv_import_device`)",
    "*.test_query_?*_qp: *IBV_QPS_INIT*": "expects a new queue pair in the state INIT, if the "
    "device is an iWARP device, and else in RESET",
}
"""For patterns of a test's name and its error: why it fails."""


def fetch() -> None:
    """Fetch pyverbs and its tests into build/suites.

    Raises:
        subprocess.CalledProcessError: they cannot be fetched.
    """
    BUILD.mkdir(parents=True, exist_ok=True)
    if not (BUILD / "pyverbs").exists():
        name = "python3-pyverbs"
        subprocess.run(["apt-get", "-q", "download", name], cwd=BUILD, check=True)
        archive = next(BUILD.glob(f"{name}_*.deb"))
        subprocess.run(["dpkg-deb", "-x", archive, BUILD / "pyverbs"], check=True)
    if not (SOURCES / "tests").exists():
        fetch_commit(SOURCES, REPOSITORY, REVISION, "tests")


def run(device: str) -> list[dict[str, str]]:
    """Run the tests on a device; return the lines of in_suite/pyverbs_tests.py."""
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(FOLDER),
        "AIORDMA_DEVICE": device,  # the connection manager's, too
        "PYTHONPATH": str(BUILD / "pyverbs/usr/lib/python3/dist-packages"),
    }
    script = Path(__file__).parent / "in_suite" / "pyverbs_tests.py"
    done = subprocess.run(
        ["/usr/bin/python3", script, SOURCES, device],
        cwd=SOURCES,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def why(row: dict[str, str]) -> str | None:
    """Return why a test fails, or None if that is not known."""
    return reason(REASONS, f"{row['test']}: {row['why']}")


def summary(device: str, rows: list[dict[str, str]]) -> str:
    """Return the results, in Markdown."""
    outcomes = Counter(row["outcome"] for row in rows)
    failed = Counter(str(why(row)) for row in rows if row["outcome"] == "failed")
    lines = [
        f"{len(rows)} tests of pyverbs 44 on `{device}`: {outcomes['passed']} passed, "
        f"{outcomes['failed']} failed, {outcomes['skipped']} skipped themselves, most of them "
        "tests of a driver.",
        "",
        f"| failed on {device} | tests |",
        "|---|---|",
        *(f"| {each} | {count} |" for each, count in failed.most_common()),
    ]
    return "\n".join(lines)


def main() -> int:
    """Run the tests, print the results, and write them into the page if that is wanted."""
    try:
        fetch()
    except subprocess.CalledProcessError as error:
        print(f"pyverbs was not fetched, and its tests do not run: {error}", file=sys.stderr)
        return 1
    all_rows = {device: run(device) for device in DEVICES}
    unknown = [
        row
        for rows in all_rows.values()
        for row in rows
        if row["outcome"] == "failed" and why(row) is None
    ]
    for row in unknown:
        print(f"{row['test']}: {row['why']}", file=sys.stderr)
    text = "\n\n".join(summary(device, rows) for device, rows in all_rows.items())
    print(text)
    if "--write" in sys.argv:
        write_page("exec", text)
    return int(bool(unknown))


if __name__ == "__main__":
    sys.exit(main())
