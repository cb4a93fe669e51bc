"""The error of a name with several addresses, of those of its addresses."""

import copy
import errno
import pickle

import pytest

import aiordma
from aiordma._connection.several_addresses import first_bound, first_of_errors
from tests.internals import BACKLOG_IS_FULL, NOT_SERVING, SocketAddress


def rejected(said: bytes) -> aiordma.RejectedError:
    return aiordma.RejectedError(
        f"rejected: {said!r}", reason=28, private_data=said.ljust(64, b"\0")
    )


ANSWER = rejected(b"not today")
FULL = rejected(BACKLOG_IS_FULL)
NOT_YET = rejected(NOT_SERVING)
NOBODY = rejected(b"")
SLOW = aiordma.ConnectTimeoutError("slow")
NO_ROUTE = aiordma.RouteError("no route")
NOWHERE = aiordma.AddressError("nowhere")
NO_DEVICE = aiordma.DeviceRequirementError("no device")


@pytest.mark.parametrize(
    ("errors", "chosen"),
    [
        ([NO_DEVICE, NOWHERE, NOBODY, FULL, ANSWER], ANSWER),
        ([NO_DEVICE, NOWHERE, NOBODY, SLOW, FULL], FULL),
        ([NOBODY, NOT_YET], NOT_YET),
        ([NO_DEVICE, NOWHERE, NOBODY, SLOW], NOBODY),
        ([NO_DEVICE, SLOW, NOBODY], SLOW),
        ([NOWHERE, NO_ROUTE], NO_ROUTE),
        ([NO_DEVICE, NOWHERE], NOWHERE),
        ([NO_DEVICE], NO_DEVICE),
    ],
)
def test_error_nearest_to_the_peers_program_is_raised(
    errors: list[Exception], chosen: Exception
) -> None:
    found = first_of_errors(list(map(copy.copy, errors)))
    assert type(found) is type(chosen)
    texts = str(found).split("; another address: ")
    assert texts[0] == str(chosen)
    assert sorted(texts) == sorted(map(str, errors))
    assert vars(found) == vars(chosen)


def test_same_text_is_not_repeated() -> None:
    assert str(first_of_errors([copy.copy(SLOW), copy.copy(SLOW)])) == "slow"


def test_joined_text_survives_copies() -> None:
    error = first_of_errors([copy.copy(NOBODY), copy.copy(SLOW)])
    for again in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert str(again) == str(error) == f"{NOBODY}; another address: slow"
        assert isinstance(again, aiordma.RejectedError)
        assert (again.errno, again.strerror) == (NOBODY.errno, str(error))


# -- local addresses ------------------------------------------------------------------------------

TAKEN, FOREIGN, GOOD = ("127.0.0.2", 4711), ("192.0.2.7", 4711), ("127.0.0.3", 4711)


def unbound(number: int | None, text: str) -> aiordma.AddressError:
    error = aiordma.AddressError(text)
    error.errno = number
    return error


async def bound(errors: dict[SocketAddress, Exception], *local: SocketAddress) -> SocketAddress:
    async def connect(source: SocketAddress | None) -> SocketAddress:
        assert source is not None
        if source in errors:
            raise errors[source]
        return source

    return await first_bound(local, connect)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "error",
    [
        unbound(errno.EADDRINUSE, "taken"),
        unbound(errno.EADDRNOTAVAIL, "no address of this machine"),
        unbound(errno.ENODEV, "no RDMA device has it"),
        aiordma.DeviceRequirementError("no permitted device has it"),
    ],
    ids=["taken", "foreign", "no device", "not permitted"],
)
async def test_local_address_that_cannot_be_bound_is_passed_over(error: Exception) -> None:
    assert await bound({TAKEN: error}, TAKEN, GOOD) == GOOD


@pytest.mark.anyio
async def test_every_reason_against_a_local_address_is_in_the_text() -> None:
    errors: dict[SocketAddress, Exception] = {
        TAKEN: unbound(errno.EADDRINUSE, "taken"),
        FOREIGN: unbound(None, "foreign"),
    }
    with pytest.raises(aiordma.AddressError) as caught:
        await bound(errors, TAKEN, FOREIGN)
    assert str(caught.value) == "taken; another local address: foreign"


@pytest.mark.anyio
async def test_other_errors_of_an_own_local_address_are_final() -> None:
    for error in (unbound(errno.ENETUNREACH, "no route"), copy.copy(NOBODY)):
        with pytest.raises(type(error), match=str(error)):
            await bound({TAKEN: error}, TAKEN, GOOD)
