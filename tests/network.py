"""A network of its own for a program of a test: a namespace, with what the program makes in it."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.sources import ROOT

_ALONE = ("unshare", "--map-root-user", "--net")

ADDRESS_SECONDS = 10.0
"""Within which an interface that was taken up has its address."""

_HOW = (
    "run as root, or let users have them (sysctl user.max_user_namespaces and, on Debian and "
    "Ubuntu, kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns); a "
    "container needs CAP_SYS_ADMIN"
)


def run_alone(program: str) -> str:
    """Run a Python program as root of a network namespace, and return what it printed. There is
    nothing in that network but a loopback interface, which is down.

    Skips the test where no such namespace is to be had.
    """
    if shutil.which("ip") is None:
        pytest.skip("this machine lacks iproute2: apt-get install iproute2")
    tried = subprocess.run([*_ALONE, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"this machine lacks network namespaces ({tried.stderr.strip()}): {_HOW}")
    ran = subprocess.run(
        [*_ALONE, sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stderr) == (0, ""), f"status {ran.returncode}\n{ran.stderr}"
    return ran.stdout


def ip(*commands: str) -> None:
    """For such a program: change its network as `ip` does."""
    # gcc's sanitizers do not survive the start of every program.
    plainly = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run(
        ["ip", "-batch", "-"], input="\n".join(commands), text=True, check=True, env=plainly
    )


def ethernet() -> str:
    """For such a program: take up an interface with an IPv6 address of its own, which multicast
    groups are on; returns its name. What is sent to others on it is lost."""
    for who in ("all", "default"):  # no other interface could have its address
        Path(f"/proc/sys/net/ipv6/conf/{who}/accept_dad").write_text("0")
    ip(
        "link add ours type veth peer name theirs",
        "link set lo up",
        "link set theirs up",
        "link set ours up",
    )
    # The kernel gives an interface its address after it was taken up, when its link is.
    deadline = time.monotonic() + ADDRESS_SECONDS
    while not re.search(r"\bours$", Path("/proc/net/if_inet6").read_text(), re.MULTILINE):
        assert time.monotonic() < deadline, "the interface got no IPv6 address"
        time.sleep(0.01)
    return "ours"
