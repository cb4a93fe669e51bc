"""Which attempts to connect or to listen are worth another local port."""

import errno

from aiordma._base.errors import AddressError, RdmaConnectionError, VerbsCallError

MOST_ATTEMPTS = 8
"""How many local ports are tried for a connection or a listener."""

_IN_USE = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
"""The second one: the port can be shared, but the same connection is still in TIME_WAIT."""


class LocalPorts:
    """The attempts of one connect or listen. The kernel's connection manager chooses the local port
    at random, without regard to TCP. siw binds a socket of TCP to it: this fails if another socket
    has it, and what is prepared anew gets another one.

    Args:
        source: the local (host, port). A port that the program chose, so not 0, has no substitute.
    """

    def __init__(self, source: tuple[str, int] | None) -> None:
        self._source = source
        self._failed = 0

    def has_another(self, error: BaseException) -> bool:
        """Count an attempt that failed because of its port, and return whether to prepare another
        one."""
        if not isinstance(error, (RdmaConnectionError, VerbsCallError)):
            return False
        if error.errno not in _IN_USE:
            return False
        if isinstance(error, AddressError) and error.errno == errno.EADDRNOTAVAIL:
            return False  # the source is an address of another machine
        self._failed += 1
        return (self._source is None or self._source[1] == 0) and self._failed < MOST_ATTEMPTS
