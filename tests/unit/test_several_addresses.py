"""The error of a name with several addresses, of those of its addresses."""

import copy
import pickle

import pytest

import aiordma
from aiordma._base.errors import BACKLOG_IS_FULL, NOT_SERVING
from aiordma._connection.several_addresses import first_of_errors


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
