"""Which hosts an event loop reaches over RDMA."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
            fault = _fault(pattern)
            if fault is not None:
                raise ValueError(f"{where}={shown(hosts)}: {shown(pattern)} {fault}")

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


def _fault(pattern: str) -> str | None:
    """Return why no host can match the pattern, or None. Without this, the hosts that the program
    means would silently be reached by TCP."""
    try:
        ip_network(pattern, strict=False)
    except ValueError:
        pass
    else:
        return None
    if "://" in pattern:
        return "is a URL: give the host's name or address only"
    if "/" in pattern:
        return "is not a network, which is an address and the length of its prefix: 192.0.2.0/24"
    if re.fullmatch(r"[\d.]+", pattern):
        return "is neither an IPv4 address, which has four numbers up to 255, nor a name"
    if re.fullmatch(r"\[[^]]*:[^]]*\](:\d*)?", pattern):
        return "has an IPv6 address in brackets: leave out the brackets, and the port"
    # "*:*" would match all IPv6 addresses, and no other host, which nobody means by it.
    if re.fullmatch(r"[^:]*:\d*|(\*|[^:]*\.[^:]*):[\d*?!\[\]-]*", pattern):
        return "has a port: leave it out, as a host is reached over RDMA at every port"
    if ":" in pattern:
        # Of IPv6 addresses, others than those above are patterns by their wildcards.
        if _IPV6.fullmatch(pattern) and _WILD.search(pattern):
            return None
        return "is not an IPv6 address"
    if not _NAME.fullmatch(pattern):
        return "is not a name: several are separated by commas"
    return None
