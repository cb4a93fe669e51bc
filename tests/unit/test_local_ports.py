"""Which failed attempts to connect are made again, from another local port."""

import errno

import pytest

from aiordma import AddressError, RdmaConnectionError
from aiordma._connection.local_ports import MOST_ATTEMPTS, LocalPorts


def failed(number: int) -> RdmaConnectionError:
    error = RdmaConnectionError("connect")
    error.errno = number
    return error


IN_USE = failed(errno.EADDRINUSE)


@pytest.mark.parametrize("source", [None, ("10.1.1.1", 0)])
@pytest.mark.parametrize("number", [errno.EADDRINUSE, errno.EADDRNOTAVAIL])
def test_port_in_use_has_a_substitute_some_times(
    number: int, source: tuple[str, int] | None
) -> None:
    ports = LocalPorts(source)
    found = [ports.has_another(failed(number)) for _ in range(MOST_ATTEMPTS)]
    assert found == [True] * (MOST_ATTEMPTS - 1) + [False]


@pytest.mark.parametrize("error", [failed(errno.ECONNREFUSED), OSError(errno.EADDRINUSE, "")])
def test_other_errors_are_final(error: BaseException) -> None:
    assert not LocalPorts(None).has_another(error)


def test_foreign_source_address_has_no_substitute() -> None:
    error = AddressError("connect")
    error.errno = errno.EADDRNOTAVAIL
    assert not LocalPorts(("192.0.2.7", 0)).has_another(error)


def test_other_errors_take_no_attempt() -> None:
    ports = LocalPorts(None)
    for _ in range(MOST_ATTEMPTS):
        assert not ports.has_another(failed(errno.ECONNREFUSED))
    assert ports.has_another(IN_USE)


def test_port_of_the_programs_own_has_no_substitute() -> None:
    assert not LocalPorts(("10.1.1.1", 7471)).has_another(IN_USE)
