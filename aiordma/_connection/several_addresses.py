"""The addresses of a name, which are tried one after the other, and share the call's time limit."""

import errno
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from aiordma._base.errors import AddressError, DeviceRequirementError, cause_text
from aiordma._base.hints import is_own_address
from aiordma._base.rejections import is_listeners_answer, is_programs_answer
from aiordma._base.socket_address import SocketAddress

_OF_BINDS = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.ENODEV)
"""Errnos of local addresses that cannot be bound. ENODEV: no RDMA device has it."""

Connected = TypeVar("Connected")


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


class Routes:
    """The numeric addresses of a peer, each with the local address to connect from.

    Args:
        found: the peer's.
        local: the local (host, port) that the program gave, resolved; None: any.
        target: returns the peer's name and port with an address, for the errors.
        argument: the program's argument with the local address, for the errors.
        failure: makes one error of those of all addresses.

    Attributes:
        target: see above.
        addresses: those of the peer's that can be tried: all, or those of whose family there is a
            local address.
    """

    def __init__(
        self,
        found: Sequence[str],
        local: Sequence[SocketAddress] | None,
        target: Callable[[str], str],
        argument: str,
        failure: Callable[[list[Exception]], Exception] = first_of_errors,
    ) -> None:
        self._local = local
        self.target = target
        self._argument, self._failure = argument, failure
        self.addresses: list[str] = []
        self._without: list[str] = []
        for each in found:
            (self.addresses if self.locals(each) else self._without).append(each)

    def locals(self, address: str) -> Sequence[SocketAddress | None]:
        """Return the local (host, port) to try for an address of the peer's; None: any."""
        if self._local is None:
            return [None]
        return [each for each in self._local if _is_ipv6(each[0]) is _is_ipv6(address)]

    def failure(self, errors: list[Exception]) -> Exception:
        """Make one error of those of the addresses that were tried, and of the others."""
        return self._failure([*errors, *map(self._unmatched, self._without)])

    def _unmatched(self, address: str) -> Exception:
        family = "IPv6" if _is_ipv6(address) else "IPv4"
        return AddressError(
            f"connect to {self.target(address)}: {self._argument} has no {family} address to "
            "connect from"
        )


def _is_ipv6(address: str) -> bool:
    return ":" in address


async def first_bound(
    local: Sequence[SocketAddress | None],
    connect: Callable[[SocketAddress | None], Awaitable[Connected]],
) -> Connected:
    """Return what `connect` returns for the first of the local addresses that can be bound: the
    others are another machine's, or their port is taken, or no permitted device has them. As
    asyncio's `create_connection`, it tries no other one after any other error.

    Args:
        local: of `Routes.locals`: at least one.
        connect: called with a local address.

    Raises:
        Exception: of `connect`. If no address can be bound, its text is that of all of them.
    """
    errors: list[Exception] = []
    try:
        for each in local:
            try:
                return await connect(each)
            except DeviceRequirementError as error:
                errors.append(error)
            except AddressError as error:
                is_own = each is None or is_own_address(each[0])
                if is_own and error.errno not in _OF_BINDS:
                    raise
                errors.append(error)
        raise joined_error(errors, "; another local address: ".join)
    finally:
        errors.clear()  # their tracebacks hold this frame
