"""The addresses of a name, which are tried one after the other, and share the call's time limit."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import anyio

from aiordma._base.errors import (
    AddressError,
    DeviceRequirementError,
    RdmaConnectionError,
    cause_text,
    is_listeners_answer,
    is_programs_answer,
)

__all__ = ("SharedSeconds", "first_connected", "first_of_errors", "joined_error")

Address = TypeVar("Address")
Connected = TypeVar("Connected")


class SharedSeconds:
    """The time limit of steps that are taken for each address of a name. Each address gets an equal
    part of what those before it have left.

    Args:
        seconds: for all addresses together; None: no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self._left = seconds

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Subtract the time that the block takes."""
        began = anyio.current_time()
        try:
            yield
        finally:
            if self._left is not None:
                self._left -= anyio.current_time() - began

    def share(self, count: int) -> float | None:
        """Return the seconds of the next address if `count` are left to try; None: no limit."""
        if self._left is None:
            return None
        return float(f"{max(self._left, 0) / count:.3g}")  # the errors have it


def _distance(error: Exception) -> int:
    """Return how far from the peer's program an attempt ended: of several errors, that of the
    nearest one says most about why the program is not connected."""
    if is_programs_answer(error):
        return 0
    if is_listeners_answer(error):
        return 1
    if isinstance(error, DeviceRequirementError):
        return 4
    return 3 if isinstance(error, AddressError) else 2


def joined_error(errors: list[Exception], join: Callable[[list[str]], str]) -> Exception:
    """Return one error for those of all addresses: the one whose attempt came nearest to the peer's
    program, and of several such the first one. Its text becomes that of all errors.

    These are, from the nearest on: the answer of the peer's program, another rejection by the
    listener (its backlog is full), other errors of the peer or of the path to it, no device reaches
    the address, no permitted device does. So the one raised is worth another attempt if any is.

    Args:
        errors: at least one.
        join: makes the text of those of the errors, beginning with the one that is returned.
    """
    chosen = min(errors, key=_distance)
    texts = list(dict.fromkeys(map(cause_text, [chosen, *errors])))
    if len(texts) > 1:
        chosen.args = (join(texts),)
    return chosen


def first_of_errors(errors: list[Exception]) -> Exception:
    """Return one error for those of all addresses, as of `joined_error`."""
    return joined_error(errors, "; another address: ".join)


async def first_connected(
    addresses: Sequence[Address],
    connect: Callable[[Address, int], Awaitable[Connected]],
    failure: Callable[[list[Exception]], Exception] = first_of_errors,
) -> Connected:
    """Return what `connect` returns for the first of the addresses that can be connected.

    Args:
        addresses: at least one.
        connect: called with an address, and how many are left to try, with this one.
        failure: makes the error if no address can be connected, of the errors of all. The last one
            may be a program's answer, a rejection with private data: the peer was reached, and no
            further address is tried.

    Raises:
        Exception: that of `failure`; or of `connect`, if it is no error of the address.
    """
    errors: list[Exception] = []
    try:
        for index, address in enumerate(addresses):
            try:
                return await connect(address, len(addresses) - index)
            except (RdmaConnectionError, DeviceRequirementError) as error:
                errors.append(error)
                if is_programs_answer(error):
                    break
        raise failure(errors)
    finally:
        errors.clear()  # their tracebacks hold this frame
