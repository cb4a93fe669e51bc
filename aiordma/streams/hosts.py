"""Which hosts an event loop reaches over RDMA."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from ipaddress import ip_address, ip_network

from aiordma._base.arguments import shown, wrong_type
from aiordma._base.errors import RdmaConnectionError
from aiordma._base.rejections import PLAIN_TCP

__all__ = ("HostRule", "explaining_tcp")

_EXPECTED = "names with wildcards, addresses and networks, as a text or a list of texts"
_NAME = re.compile(r"[\w.*?!\[\]-]+")
_IPV6 = re.compile(r"[0-9A-Fa-f:.*?!\[\]-]*(%[\w.*?!\[\]-]+)?")
_WILD = re.compile(r"[*?\[]")
_NUMBERS = re.compile(r"[\d.]+")
# "*:*" would match all IPv6 addresses, and no other host, which nobody means by it.
_WITH_PORT = re.compile(r"\[[^]]*:[^]]*\](:\d*)?|[^:]*:\d*|(\*|[^:]*\.[^:]*):[\d*?!\[\]-]*")
_LAWFUL = (
    "give names with wildcards, addresses and networks (192.0.2.0/24), separated by commas, and "
    "no ports, brackets or URLs, as a host is reached over RDMA at every port"
)


class HostRule:
    """Names hosts by patterns.

    Args:
        hosts: the patterns, as a list or separated by commas: names with wildcards, as of fnmatch,
            addresses and networks.
        where: the beginning of the errors: the variable, or the function and its parameter.

    Raises:
        TypeError: the patterns are not texts.
        ValueError: no host can match a pattern.
    """

    def __init__(self, hosts: str | Iterable[str], where: str) -> None:
        if isinstance(hosts, bytes | bytearray) or not isinstance(hosts, Iterable):
            raise wrong_type(hosts, where, _EXPECTED)
        given = hosts.split(",") if isinstance(hosts, str) else list(hosts)
        for each in given:
            if not isinstance(each, str):
                raise wrong_type(each, f"an item of {where}", _EXPECTED)
        self._patterns: tuple[str, ...] = tuple(each.strip() for each in given if each.strip())
        for pattern in self._patterns:
            if not _can_match(pattern):
                text = f"{where}={shown(hosts)}: {shown(pattern)} matches no host: {_LAWFUL}"
                raise ValueError(text)

    def names(self, host: str) -> bool:
        """Return whether a pattern matches the host, a name or an address.

        Raises: nothing.
        """
        return any(_matches(host, pattern) for pattern in self._patterns)


@contextmanager
def explaining_tcp(variable: str) -> Iterator[None]:
    """Add to the text of an error of a connect what to do if the peer is a plain TCP server, as it
    may be.

    Args:
        variable: the environment variable that has a rule.
    """
    try:
        yield
    except RdmaConnectionError as error:
        if PLAIN_TCP in str(error):
            cure = f"to reach it over TCP, list only other hosts in {variable}, or in hosts="
            error.args = (f"{error} ({cure} of new_event_loop)",)
        raise


def _matches(host: str, pattern: str) -> bool:
    try:
        return ip_address(host.partition("%")[0]) in ip_network(pattern, strict=False)
    except ValueError:  # one of them is a name
        return fnmatchcase(host.lower(), pattern.lower())


def _can_match(pattern: str) -> bool:
    """Return whether a host can match the pattern. Without this, the hosts that the program means
    would silently be reached by TCP."""
    with suppress(ValueError):
        ip_network(pattern, strict=False)
        return True
    if ":" in pattern:  # an IPv6 address, which is a pattern by its wildcards
        is_address = _IPV6.fullmatch(pattern) and _WILD.search(pattern)
        return bool(is_address) and not _WITH_PORT.fullmatch(pattern)
    return bool(_NAME.fullmatch(pattern)) and not _NUMBERS.fullmatch(pattern)
