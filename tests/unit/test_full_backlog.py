"""When a stream's listener is tried again whose backlog is full."""

import pytest

from aiordma import ConnectTimeoutError, RejectedError
from aiordma.streams.connecting import LEAST_LEFT_SECONDS, MOST_FULL_SECONDS, _FullBacklog
from tests.internals import BACKLOG_IS_FULL

FULL = RejectedError("full", reason=28, private_data=BACKLOG_IS_FULL)


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
@pytest.mark.parametrize("seconds", [0.3, 1.0, 1.5, 2.0, 30.0])
def test_attempts_go_on_until_the_time_limit(seconds: float) -> None:
    waits, left = _FullBacklog(), seconds
    attempts = 0
    while waits.has_another(FULL, left):
        assert 0 < waits._seconds <= min(left / 2, MOST_FULL_SECONDS)
        left -= waits._seconds
        attempts += 1
    assert left < LEAST_LEFT_SECONDS
    assert attempts < 100


def test_without_a_limit_every_attempt_has_another() -> None:
    waits = _FullBacklog()
    assert all(waits.has_another(FULL, None) for _ in range(1000))
    assert waits._seconds >= MOST_FULL_SECONDS / 2


@pytest.mark.parametrize(
    "error",
    [
        RejectedError("no", reason=28, private_data=b"no"),
        RejectedError("no", reason=28, private_data=b""),
        ConnectTimeoutError("slow"),
    ],
)
def test_other_errors_are_final(error: Exception) -> None:
    assert not _FullBacklog().has_another(error, 30.0)
