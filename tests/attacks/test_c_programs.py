"""C programs on the software device that break the rules: they harm themselves only."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from aiordma.cli.exec import FOLDER
from tests.attacks.good_client import GoodClient
from tests.attacks.services import serve_echo
from tests.attacks.victim import Victim
from tests.unit.sources import ROOT

KINDS = {
    "killed": {-signal.SIGKILL},
    "corrupts": {1, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS},  # its queue pair's memory
    "closes": {1, -signal.SIGALRM},  # all of its descriptors
    "requests": {0},  # with memory that is not its own
    "nulls": {0, 1, -signal.SIGSEGV, -signal.SIGABRT},  # and pointers to something else
    "forks": {0},
}
"""What tests/native/wild.c does, and how it may end."""


@pytest.fixture(scope="module")
def wild(tmp_path_factory: pytest.TempPathFactory) -> Path:
    binary = tmp_path_factory.mktemp("wild") / "wild"
    source = ROOT / "tests/native/wild.c"
    without = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = ("gcc", "-O1", source, "-o", binary, "-lrdmacm", "-libverbs")
    done = subprocess.run(command, env=without, capture_output=True, text=True)
    if "rdma_cma.h: No such file" in done.stderr:
        pytest.skip("needs rdma-core's headers: apt-get install libibverbs-dev librdmacm-dev")
    assert done.returncode == 0, done.stderr
    return binary


@pytest.mark.parametrize("kind", KINDS)
def test_wild_program_harms_itself_only(kind: str, wild: Path) -> None:
    with Victim(serve_echo) as victim, GoodClient(victim.port) as client:
        for _ in range(3):
            done = subprocess.run(
                [wild, str(victim.port), kind],
                env={"LD_LIBRARY_PATH": str(FOLDER)},
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode in KINDS[kind], done.stderr
            assert ("went on" in done.stdout) == (kind == "forks")
            client.must_progress()
