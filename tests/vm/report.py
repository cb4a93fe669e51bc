"""How the test bed speaks: a prefix on standard error; an exception for what the user can fix."""

import sys
from collections.abc import Callable


class TestBedError(Exception):
    """The test bed cannot go on. The message says what is missing and what to do about it."""

    __test__ = False  # pytest: the name begins with "Test", it is not one


def say(message: str) -> None:
    """Print one line of the test bed's own, apart from the command's output (standard output)."""
    print(f"vm: {message}", file=sys.stderr, flush=True)


def status_of(task: Callable[[], int]) -> int:
    """Run a command's task; returns its exit status, after a line about what ended it early."""
    try:
        return task()
    except TestBedError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130
