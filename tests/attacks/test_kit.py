"""The parts of an attack, without one: a test that uses them can fail."""

import os
import signal

import pytest

from tests.attacks.good_client import GoodClient
from tests.attacks.services import serve_echo
from tests.attacks.victim import Ready, Victim


async def serve_nothing(ready: Ready) -> None:
    raise SystemExit("no service today")


def test_victim_that_dies_is_a_failure() -> None:
    victim = Victim(serve_echo)
    os.kill(victim.pid, signal.SIGKILL)
    os.waitid(os.P_PID, victim.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(AssertionError, match="ended with status -9"):
        victim.__exit__(None, None, None)


def test_victim_that_cannot_start_is_a_failure() -> None:
    with pytest.raises(AssertionError, match="no service today"):
        Victim(serve_nothing)


def test_client_that_fails_is_a_failure() -> None:
    victim = Victim(serve_echo)
    client = GoodClient(victim.port).__enter__()
    os.kill(victim.pid, signal.SIGKILL)
    os.waitid(os.P_PID, victim.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(AssertionError, match="good client failed"):
        client.must_progress(1 << 40)
    with pytest.raises(AssertionError, match="good client failed"):
        client.__exit__(None, None, None)
    with pytest.raises(AssertionError, match="ended with status -9"):
        victim.__exit__(None, None, None)
