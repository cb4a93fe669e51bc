"""Runs a state machine against a library that is broken on purpose, and prints what it finds:
`python -m tests.faults.broken NAME`, or `... NAME simulated`."""

import os
import sys
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from aiordma import Connection, WorkRequest
from aiordma.types import Chain, Grant
from tests.faults.machine import Machine, unwatched_objects
from tests.internals import Teardown, endpoint
from tests.simulation.hosts import SimulatedMachine

EXAMPLES = 200
SEEDS = {
    "forget_requests": 6,
    "give_a_slot_twice": 3,
    "keep_the_window": 3,
    "release_at_the_post": 0,
}
"""Seeds that find a broken library soon: of the first eight, the others need up to ten times as
long."""


def release_at_the_post() -> None:
    """Release the memory of a request when it has been posted, not when it completes."""

    def releasing(post: Callable[..., WorkRequest]) -> Callable[..., WorkRequest]:
        def post_and_release(*arguments: Any) -> WorkRequest:
            request = post(*arguments)
            request._drop()
            return request

        return post_and_release

    for kind in (Connection, Chain):
        for name in ("post_send", "post_write", "post_read"):
            setattr(kind, name, releasing(getattr(kind, name)))


def give_a_slot_twice() -> None:
    """Give the slot of a READ back twice."""
    owner: Any = endpoint.Endpoint
    ended = owner.request_ended

    def give_twice(self: Any, request: Any) -> None:
        ended(self, request)
        if "READ" in request.operation:
            self.work.sends.slots.free += 1

    owner.request_ended = give_twice


def forget_requests() -> None:
    """Do not fail the requests of a connection that has ended, and do not wait for their
    completions: on a quiet machine, the device nearly always has them in time."""
    module: Any = endpoint
    module.fail_all = lambda requests, explain: None
    teardown: Any = Teardown
    set_timer = teardown.set_timer

    def set_flush_timer(self: Any, name: str, seconds: float, callback: Any) -> None:
        set_timer(self, name, 0 if name == endpoint._FLUSHED else seconds, callback)

    teardown.set_timer = set_flush_timer


def keep_the_window() -> None:
    """Report the end of a grant without ending the access."""
    grant: Any = Grant

    def start_ending(self: Any) -> None:
        self._finish(None)

    grant._start_ending = start_ending


BROKEN: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (release_at_the_post, give_a_slot_twice, forget_requests, keep_the_window)
}


class FirstFailure(list[Exception]):
    """Prints the first failure and ends the process, which has a library that cannot close."""

    def append(self, failure: Exception) -> None:
        print(repr(failure), flush=True)
        os._exit(0)


def main(name: str, is_simulated: bool = False) -> None:
    """Break the library, run, and print the first failure."""
    BROKEN[name]()
    Machine.failures = FirstFailure()
    run = settings(
        max_examples=EXAMPLES,
        stateful_step_count=50,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with unwatched_objects():
        if is_simulated:
            run_state_machine_as_test(seed(0)(SimulatedMachine), settings=run)
        else:
            run_state_machine_as_test(seed(SEEDS[name])(Machine), settings=run)
    print("nothing was found")


if __name__ == "__main__":
    main(sys.argv[1], "simulated" in sys.argv[2:])
