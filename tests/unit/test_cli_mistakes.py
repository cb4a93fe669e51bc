"""A user's mistake never shows a traceback: status 2 if the command line or the environment cannot
be right, 1 if the machine or the peer refuses; one line says why."""

import os
import subprocess
from dataclasses import dataclass, field

import pytest

from tests.forked import CLIENT, server
from tests.unit.sources import ROOT

pytestmark = pytest.mark.slow

COMMAND = "from aiordma.cli.main import main; main()"
WITHOUT = "import sys; sys.modules[{!r}] = None; "
MISUSED, FAILED = 2, 1
ELSEWHERE = "198.51.100.7"
"""An address that this machine does not have."""
QUICK = "-o echo -s 64 -d 1 --seconds 0.05 --no-tcp"


@dataclass
class Mistake:
    """A command line, with its status, and a text that standard error must have."""

    words: str
    status: int
    part: str
    environment: dict[str, str] = field(default_factory=dict)
    without: str = ""
    """A package that is hidden."""

    def __str__(self) -> str:
        variables = "".join(f"{name}={value} " for name, value in self.environment.items())
        return f"{variables}{self.words}{self.without and f' without {self.without}'}"


def with_environment(status: int, part: str, **environment: str) -> list[Mistake]:
    """Return the mistake in each command that connects or listens."""
    commands = (
        "ping 127.0.0.1",
        "ping -s",
        "cp /etc/hosts 127.0.0.1",
        "cp --serve .",
        f"bench local {QUICK}",
        f"bench client 127.0.0.1 {QUICK}",
        "bench server",
    )
    return [Mistake(words, status, part, environment) for words in commands]


MISTAKES = [
    Mistake("dance", MISUSED, "No such command 'dance'"),
    Mistake("--dance", MISUSED, "--dance"),
    Mistake("bench dance", MISUSED, "No such command 'dance'"),
    # options
    Mistake("info --dance", MISUSED, "--dance"),
    Mistake("doctor --dance", MISUSED, "--dance"),
    Mistake("ping", MISUSED, "address"),
    Mistake("ping [::1]", FAILED, "without the brackets"),
    Mistake("cp host:file .", MISUSED, "cp only sends"),
    Mistake("ping -c -s", MISUSED, "not both"),
    Mistake("ping 192.0.2.1 -S 0", MISUSED, "-S"),
    Mistake("ping 192.0.2.1 -a 192.0.2.2", MISUSED, "two addresses"),
    Mistake("ping 127.0.0.1 -p 99999", MISUSED, "65535"),
    Mistake("ping 127.0.0.1 -t nan", MISUSED, "--timeout"),
    Mistake("ping 127.0.0.1 -t inf", MISUSED, "--timeout"),
    Mistake("ping 127.0.0.1 -i inf", MISUSED, "--interval"),
    Mistake("cp", MISUSED, "--serve"),
    Mistake("cp one", MISUSED, "--serve"),
    Mistake("cp --serve . file host", MISUSED, "--serve has no other arguments"),
    Mistake("cp --serve . --timeout 5", MISUSED, "--timeout is the sender's"),
    Mistake("cp /etc/hosts host --bind 127.0.0.1", MISUSED, "--bind is the receiver's"),
    Mistake("cp /etc/hosts :name", MISUSED, "has no host"),
    Mistake("cp /etc/hosts [::1", MISUSED, "[IPV6]"),
    Mistake("cp /etc/hosts 127.0.0.1 --port 99999", MISUSED, "65535"),
    Mistake("cp /etc/hosts 127.0.0.1 --timeout 0", MISUSED, "--timeout"),
    Mistake("cp /etc/hosts 127.0.0.1 --timeout inf", MISUSED, "--timeout"),
    Mistake("bench local -o dance", MISUSED, "'dance' is none of echo"),
    Mistake("bench local --loop dance", MISUSED, "'dance' is none of auto"),
    Mistake("bench server --loop dance", MISUSED, "'dance' is none of auto"),
    Mistake("bench client 127.0.0.1 --loop dance", MISUSED, "'dance' is none of auto"),
    Mistake("bench client 127.0.0.1 --port 99999", MISUSED, "65532"),
    Mistake("bench client 127.0.0.1 --port 65534", MISUSED, "65532"),
    Mistake("bench server --port 99999", MISUSED, "65532"),
    Mistake("bench server --port 65534", MISUSED, "65532"),
    Mistake("bench local --seconds -1", MISUSED, "--seconds"),
    Mistake("bench local --seconds nan", MISUSED, "--seconds"),
    Mistake("bench local --seconds inf", MISUSED, "--seconds"),
    Mistake("bench local --spin nan", MISUSED, "--spin"),
    Mistake("bench local -s 0", MISUSED, "size=0"),
    Mistake(f"bench client 127.0.0.1 --device  {QUICK}", MISUSED, "device=''"),
    # packages
    *(
        Mistake(f"bench {words} --loop {loop}", MISUSED, f"aiordma[{loop}]", {}, loop)
        for words in ("local", "server", "client 127.0.0.1")
        for loop in ("uvloop", "trio")
    ),
    *(Mistake("info", MISUSED, "aiordma[cli]", {}, name) for name in ("typer", "rich")),
    # the environment
    *with_environment(FAILED, "AIORDMA_DEVICE=rdma does not permit", AIORDMA_DEVICE="rdma"),
    *with_environment(FAILED, "AIORDMA_DEVICE names 'rxe77'", AIORDMA_DEVICE="rxe77"),
    *with_environment(MISUSED, "/missing/x cannot be written", AIORDMA_CAPTURE="/missing/x"),
    *(
        Mistake(words, MISUSED, "AIORDMA_CAPTURE", {"AIORDMA_CAPTURE": "/missing/x"})
        for words in ("info", "info software", "doctor")
    ),
    Mistake("ping 127.0.0.1", MISUSED, "AIORDMA_TRACE", {"AIORDMA_TRACE": "/missing/x"}),
    # the machine and the peer
    Mistake("info rxe77", FAILED, "rxe77"),
    Mistake("ping no-such-host.invalid", FAILED, "no-such-host.invalid"),
    Mistake("ping 127.0.0.1 -p 7999", FAILED, "127.0.0.1:7999"),
    Mistake("ping 127.0.0.1 --device rxe77", FAILED, "rxe77"),
    Mistake("ping 127.0.0.1 --device rdma", FAILED, 'device="rdma"'),
    Mistake(f"ping --serve -a {ELSEWHERE}", FAILED, ELSEWHERE),
    Mistake("cp /etc/hosts no-such-host.invalid", FAILED, "no-such-host.invalid"),
    Mistake("cp /etc/hosts 127.0.0.1 -p 7999", FAILED, "127.0.0.1:7999"),
    Mistake("cp /etc/hosts 127.0.0.1 --device rxe77", FAILED, "rxe77"),
    Mistake("cp /etc/hosts 127.0.0.1 --device rdma", FAILED, 'device="rdma"'),
    Mistake("cp --serve /missing", FAILED, "/missing"),
    Mistake("cp --serve /etc/hosts", FAILED, "Not a directory"),
    Mistake("cp --serve . --device rdma --bind 127.0.0.1", FAILED, 'device="rdma"'),
    Mistake(f"cp --serve . --bind {ELSEWHERE}", FAILED, ELSEWHERE),
    Mistake(f"bench local {QUICK} --host {ELSEWHERE}", FAILED, ELSEWHERE),
    Mistake(f"bench local {QUICK} --device rxe77", FAILED, "rxe77"),
    Mistake(f"bench local {QUICK} --json /missing/x", FAILED, "/missing/x"),
    Mistake(f"bench client 127.0.0.1 {QUICK} --json /", FAILED, "Is a directory"),
    Mistake(f"bench client 127.0.0.1 {QUICK} --port 7999", FAILED, "echo/64: connect to 127"),
    Mistake(f"bench client no-such-host.invalid {QUICK}", FAILED, "no-such-host.invalid"),
    Mistake(f"bench server --bind {ELSEWHERE}", FAILED, ELSEWHERE),
    Mistake("bench server --device rxe77", FAILED, "rxe77"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistake_has_a_reason_and_its_status(mistake: Mistake) -> None:
    code = (WITHOUT.format(mistake.without) if mistake.without else "") + COMMAND
    # The rest of the environment must not decide: a device, or what it requires. What a sanitizer
    # needs stays.
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("AIORDMA_") or name.startswith("AIORDMA_SANITIZE")
    }
    done = subprocess.run(
        [str(CLIENT), server(), "-c", code, *mistake.words.split(" ")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env=kept | mistake.environment,
    )
    assert done.returncode == mistake.status, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert mistake.part in done.stderr
    last = done.stderr.splitlines()[-1]
    if not last.startswith(("Error: ", "(the library itself")):
        assert done.stderr.splitlines() == [last]
        assert last.startswith("aiordma ")
