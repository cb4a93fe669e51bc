"""Looking up names: what is refused before anybody is asked, the C library's answers in words, and
that a numeric address stays what it is."""

import errno
import os
import socket
import threading
from typing import Any

import anyio
import pytest

from aiordma import AddressError, resolve
from aiordma._runtime import address_lookup
from aiordma._runtime.address_lookup import numeric_address
from aiordma.types import ResolvedAddress
from aiordma.verbs import PortSpace, QueuePairType
from tests.internals import Provider, ffi, lib, pack_address

pytestmark = pytest.mark.anyio

LOOPBACK = socket.if_nametoindex("lo")


@pytest.mark.parametrize(
    ("host", "found"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8::1", "2001:db8::1"),
        ("fe80::1%lo", f"fe80::1%{LOOPBACK}"),
        (f"fe80::1%{LOOPBACK}", f"fe80::1%{LOOPBACK}"),
    ],
)
async def test_a_numeric_address_stays_what_it_is(host: str, found: str) -> None:
    assert await numeric_address(host) == found


async def test_only_addresses_of_the_family_asked_for() -> None:
    assert await numeric_address("192.0.2.1", socket.AF_INET) == "192.0.2.1"
    with pytest.raises(AddressError, match=r"192\.0\.2\.1.*does not resolve"):
        await numeric_address("192.0.2.1", socket.AF_INET6)


async def test_ipv4_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def both(*_arguments: Any, **_options: Any) -> list[Any]:
        entry = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::1", 0, 0, 0))
        return [entry, (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    assert await numeric_address("both.example") == "192.0.2.1"


@pytest.mark.parametrize(
    ("arguments", "options", "problem"),
    [
        ((None,), {}, r"resolve\(\): host=None and service=None: expected"),
        (("192.0.2.1", 65536), {}, r"service=65536 is not in 0\.\.65535"),
        (("192.0.2.1", -1), {}, r"service=-1 is not in 0\.\.65535"),
        (("192.0.2.1", "70000"), {}, "service='70000': expected a port in 0..65535"),
        (("192.0.2.1\0",), {}, "holds a NUL"),
        (("192.0.2.1", "1\0"), {}, "holds a NUL"),
        (
            ("192.0.2.1",),
            {"port_space": PortSpace.IB},
            r"resolve\(\): port_space=.*: expected TCP or UDP",
        ),
    ],
)
async def test_bad_arguments_are_refused_by_name(
    arguments: Any, options: dict[str, Any], problem: str, played: "Played"
) -> None:
    with pytest.raises(ValueError, match=problem):
        await resolve(*arguments, **options)
    assert played.asked == []


class Played:
    """librdmacm's rdma_getaddrinfo, which answers what the test chooses."""

    def __init__(self) -> None:
        self.asked: list[tuple[str | None, str | None, int, int, int, int]] = []
        self.code = self.error = 0
        self.freed = 0
        self.answer: Any = ffi.NULL
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.table = ffi.new("struct aiordma_provider *")
        types = dict(ffi.typeof("struct aiordma_provider").fields)
        self._kept = [
            ffi.callback(types["cm_getaddrinfo"].type, self._get),
            ffi.callback(types["cm_freeaddrinfo"].type, self._free),
        ]
        self.table.cm_getaddrinfo, self.table.cm_freeaddrinfo = self._kept

    def _get(self, node: Any, service: Any, hints: Any, out: Any) -> int:
        texts = [ffi.string(text).decode() if text else None for text in (node, service)]
        numbers = hints.ai_flags, hints.ai_family, hints.ai_port_space, hints.ai_qp_type
        self.asked.append((*texts, *numbers))
        self.may_answer.wait()
        out[0] = self.answer
        ffi.errno = self.error
        return self.code

    def _free(self, answer: Any) -> None:
        assert answer == self.answer
        self.freed += 1


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    library = Played()
    provider = Provider("played", library.table)
    monkeypatch.setattr(address_lookup, "usual_provider", lambda *_: provider)
    return library


async def test_hints_are_what_was_asked_for(played: Played) -> None:
    assert await resolve("h", "s") == []
    assert await resolve(None, 7, passive=True) == []
    await resolve("h", numeric_host=True, no_route=True, family=socket.AddressFamily.AF_INET6)
    await resolve("h", port_space=PortSpace.UDP)
    tcp, udp = (PortSpace.TCP, QueuePairType.RC), (PortSpace.UDP, QueuePairType.UD)
    flags = lib.RAI_NUMERICHOST | lib.RAI_NOROUTE | lib.RAI_FAMILY
    assert played.asked == [
        ("h", "s", 0, socket.AF_UNSPEC, *tcp),
        (None, "7", lib.RAI_PASSIVE, socket.AF_UNSPEC, *tcp),
        ("h", None, flags, socket.AF_INET6, *tcp),
        ("h", None, 0, socket.AF_UNSPEC, *udp),
    ]
    assert played.freed == 4


async def test_every_answer_is_copied_and_freed(played: Played) -> None:
    address = ffi.from_buffer(pack_address("192.0.2.1", 7471))
    name, route, data = (ffi.new("char[]", text) for text in (b"peer.example", b"way", b"hello"))
    second = ffi.new("struct rdma_addrinfo *")
    first = ffi.new("struct rdma_addrinfo *", {"ai_next": second})
    for entry in (first, second):
        entry.ai_family, entry.ai_qp_type = socket.AF_INET, QueuePairType.RC
        entry.ai_port_space = PortSpace.TCP
    first.ai_dst_addr, first.ai_dst_len = ffi.cast("struct sockaddr *", address), 16
    first.ai_dst_canonname = name
    first.ai_route, first.ai_route_len = route, 3
    first.ai_connect, first.ai_connect_len = data, 5
    second.ai_src_addr, second.ai_src_len = ffi.cast("struct sockaddr *", address), 16
    played.answer = first
    ours, theirs = None, ("192.0.2.1", 7471)
    common = (socket.AddressFamily.AF_INET, QueuePairType.RC, PortSpace.TCP)
    assert await resolve("peer.example", 7471) == [
        ResolvedAddress(*common, ours, theirs, None, "peer.example", b"way", b"hello"),
        ResolvedAddress(*common, theirs, None),
    ]
    assert played.freed == 1


@pytest.mark.parametrize(
    ("code", "error", "reason"),
    [
        (socket.EAI_NONAME, 0, "this name does not exist"),
        (socket.EAI_NONAME, errno.ENOENT, "this name does not exist"),
        (socket.EAI_SERVICE, 0, "/etc/services"),
        (socket.EAI_SYSTEM, errno.EMFILE, os.strerror(errno.EMFILE)),
        (-1, errno.ENODEV, os.strerror(errno.ENODEV)),
        (-1, 0, "hints contradict"),
        (-77, 0, "code -77"),
    ],
)
async def test_a_refusal_says_what_and_why(
    played: Played, code: int, error: int, reason: str
) -> None:
    played.code, played.error = code, error
    with pytest.raises(AddressError, match=f"'peer.example', 7471 does not resolve: .*{reason}"):
        await resolve("peer.example", 7471)
    assert played.freed == 0


@pytest.mark.promise("No coroutine waits for a peer or the network on the event loop's thread")
async def test_a_cancelled_question_ends_by_itself(played: Played) -> None:
    played.may_answer.clear()
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(resolve, "peer.example", 7471)
            while not played.asked:
                await anyio.sleep(0.01)
            scope.cancel()
    assert scope.cancelled_caught
    assert played.freed == 0  # it still waits, and we do not
    played.may_answer.set()
    while not played.freed:
        await anyio.sleep(0.01)
