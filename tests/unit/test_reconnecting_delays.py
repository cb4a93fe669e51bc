"""The pauses of reconnecting(): exponential, bounded, random."""

from functools import partial
from typing import Any

import anyio
import pytest

import aiordma


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses of a loop whose connects fail."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    async def connect(*_: object, **__: object) -> aiordma.Connection:
        raise aiordma.UnreachableError("no answer")

    monkeypatch.setattr("aiordma._connection.reconnecting.anyio.sleep", sleep)
    monkeypatch.setattr("aiordma._connection.reconnecting.connect", connect)
    return found


async def _connect(**arguments: Any) -> None:
    async for session in aiordma.reconnecting("192.0.2.1", 1, **arguments):
        pytest.fail(f"{session!r} was not to be connected")


def _fail(attempts: int, first_delay: float, max_delay: float) -> None:
    with pytest.raises(aiordma.UnreachableError):
        anyio.run(
            partial(_connect, attempts=attempts, first_delay=first_delay, max_delay=max_delay)
        )


@pytest.mark.promise("Reconnecting retries no request")
def test_pauses_double_up_to_the_longest(
    pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiordma._connection.reconnecting.random.uniform", lambda _, most: most)
    _fail(7, 0.1, 1.0)
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])


@pytest.mark.promise("Reconnecting retries no request")
def test_pauses_are_random_in_their_upper_half(pauses: list[float]) -> None:
    _fail(501, 1.0, 1.0)
    assert all(0.5 <= pause <= 1 for pause in pauses)
    assert len(set(pauses)) > 400
