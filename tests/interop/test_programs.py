"""What runs the C programs never hangs, and shows what they wrote."""

import pytest

from tests.interop.programs import running
from tests.ports import free_port

pytestmark = [pytest.mark.anyio, pytest.mark.natively]


async def test_a_program_that_hangs_is_killed_and_shown() -> None:
    with pytest.raises(AssertionError, match="1 s are over") as caught:
        async with running("sh", "-c", "echo as far as here; exec sleep 1000", within=1):
            pass
    assert "as far as here" in caught.value.__notes__[0]
    assert "`sh -c" in caught.value.__notes__[0]


async def test_a_program_that_fails_is_shown() -> None:
    with pytest.raises(AssertionError, match="the status is not 0") as caught:
        async with running("sh", "-c", "echo no luck >&2; exit 3"):
            pass
    assert "ended with status 3, having written:\nno luck" in caught.value.__notes__[0]


async def test_what_fails_beside_a_program_shows_the_program() -> None:
    async def fail() -> None:
        async with running("sh", "-c", "echo still here; exec sleep 1000") as program:
            await program.has_written("still here")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        await fail()
    assert "still runs, having written:\nstill here" in caught.value.__notes__[0]


async def test_waiting_for_a_program_that_has_ended_ends() -> None:
    with pytest.raises(AssertionError, match="ended with status 0"):
        async with running("true") as program:
            await program.listens(free_port())
    with pytest.raises(AssertionError, match="ended with status 0"):
        async with running("echo", "something else") as program:
            await program.has_written("that")
