"""From names to addresses, without blocking the loop, and librdmacm's own view of both."""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio

from aiordma._native import ffi, lib
from aiordma.enums import PortSpace, QueuePairType
from aiordma.errors import AddressError, NoDeviceError
from aiordma.event_loop import current_event_loop
from aiordma.provider import Provider, rdma_core, software, usual_provider
from aiordma.socket_address import SocketAddress, pack_address, unpack_address
from aiordma.threads import start_call
from aiordma.verbs import Device

__all__ = ("ResolvedAddress", "devices", "numeric_address", "resolve")

Result = TypeVar("Result")

_SERVICES = {PortSpace.TCP: QueuePairType.RC, PortSpace.UDP: QueuePairType.UD}

# man getaddrinfo: what each of its codes says.
_REASONS = {
    socket.EAI_NONAME: "nobody has this name, or it is no numeric address where one was asked for",
    socket.EAI_AGAIN: "the name server does not answer for now: try again",
    socket.EAI_FAIL: "the name server failed for good",
    socket.EAI_SERVICE: "the service is neither a port number nor a name in /etc/services",
    socket.EAI_FAMILY: "this address family is not supported",
    socket.EAI_ADDRFAMILY: "the host has no address of this family",
    socket.EAI_NODATA: "the host has no address",
    socket.EAI_SOCKTYPE: "the port space has no such service",
    socket.EAI_MEMORY: "out of memory",
    socket.EAI_BADFLAGS: "the hints contradict each other",
}


@dataclass(frozen=True, slots=True)
class ResolvedAddress:
    """One answer of `resolve` (struct rdma_addrinfo), copied.

    Attributes:
        family: the address family of both ends.
        service: of the queue pair that would talk.
        port_space: where the port is.
        source: our end, if known: with passive=True, the address to listen on.
        destination: the peer, to connect to.
        source_name, destination_name: canonical names, where the library gave them.
        route: path records for an InfiniBand fabric, as bytes, if something resolved them.
        private_data: what a connect is to send first so that the peer understands it.
    """

    family: socket.AddressFamily
    service: QueuePairType
    port_space: PortSpace
    source: SocketAddress | None
    destination: SocketAddress | None
    source_name: str | None = None
    destination_name: str | None = None
    route: bytes = b""
    private_data: bytes = b""


async def resolve(
    host: str | None,
    service: str | int | None = None,
    *,
    passive: bool = False,
    numeric_host: bool = False,
    no_route: bool = False,
    family: socket.AddressFamily | None = None,
    port_space: PortSpace = PortSpace.TCP,
    device: str = "auto",
) -> list[ResolvedAddress]:
    """Resolve a name and a service as librdmacm does (man rdma_getaddrinfo): one address of the
    host, with what a local address and route service (ibacm) knows about the way, if one runs.

    `connect` and `listen` need none of this. Cancelled, it returns at once, and what was asked
    ends by itself, in the background.

    Args:
        host: a name or a numeric address; None: any of ours, with passive=True.
        service: a port, or a name from /etc/services; None is port 0.
        passive: for an address to listen on (RAI_PASSIVE).
        numeric_host: refuse names, so that nobody is asked (RAI_NUMERICHOST).
        no_route: ask nobody for the route (RAI_NOROUTE).
        family: only addresses of this family: AF_INET or AF_INET6 (RAI_FAMILY).
        port_space: TCP for connections, UDP for datagrams.
        device: whose connection manager to ask: "auto" is librdmacm where there is a real device,
            else the built-in software device's; "software" is that one, any other name librdmacm.

    Raises:
        AddressError: nothing was found; the message says why.
        ValueError: neither host nor service, a port out of range, or a text with a NUL.
        NoDeviceError: a real device is named, and rdma-core is not installed.
    """
    if host is None and service is None:
        raise ValueError("neither a host nor a service to resolve")
    if isinstance(service, int) and not 0 <= service <= 0xFFFF:
        raise ValueError(f"port {service} is not in 0..65535")
    if port_space not in _SERVICES:
        raise ValueError(f"port_space={port_space!r}: only TCP and UDP have addresses to resolve")
    provider = usual_provider(device)
    hints = ffi.new("struct rdma_addrinfo *")
    for wanted, flag in (
        (passive, lib.RAI_PASSIVE),
        (numeric_host, lib.RAI_NUMERICHOST),
        (no_route, lib.RAI_NOROUTE),
        (family is not None, lib.RAI_FAMILY),
    ):
        hints.ai_flags |= flag if wanted else 0
    hints.ai_family = socket.AF_UNSPEC if family is None else family
    hints.ai_port_space = port_space
    hints.ai_qp_type = _SERVICES[port_space]
    node, port = _text(host), _text(None if service is None else str(service))
    what = f"{'any host' if host is None else repr(host)}, {service!r}"
    return await _in_background(lambda: _resolve(provider, node, port, hints, what))


def _text(text: str | None) -> Any:
    if text is None:
        return ffi.NULL
    if "\0" in text:
        raise ValueError(f"{text!r} holds a NUL")
    return ffi.new("char[]", os.fsencode(text))


def _resolve(
    provider: Provider, node: Any, port: Any, hints: Any, what: str
) -> list[ResolvedAddress]:
    provider.use_manager()
    out = ffi.new("struct rdma_addrinfo **")
    code = provider.cm_getaddrinfo(node, port, hints, out)
    if code:
        raise _refusal(what, code, ffi.errno)
    try:
        found, entry = [], out[0]
        while entry:
            found.append(_copy(entry))
            entry = entry.ai_next
        return found
    finally:
        provider.cm_freeaddrinfo(out[0])


def _refusal(what: str, code: int, error: int) -> AddressError:
    # -1 is an rdma_ call's own failure, whose errno says why, and the C library's EAI_BADFLAGS.
    if code == socket.EAI_SYSTEM or (code == -1 and error):
        reason = os.strerror(error)
    else:
        reason = _REASONS.get(code, f"getaddrinfo's code {code}")
    return AddressError(f"{what} does not resolve: {reason}")


def _copy(entry: Any) -> ResolvedAddress:
    return ResolvedAddress(
        family=socket.AddressFamily(entry.ai_family),
        service=QueuePairType(entry.ai_qp_type),
        port_space=PortSpace(entry.ai_port_space),
        source=_address(entry.ai_src_addr, entry.ai_src_len),
        destination=_address(entry.ai_dst_addr, entry.ai_dst_len),
        source_name=_name(entry.ai_src_canonname),
        destination_name=_name(entry.ai_dst_canonname),
        route=_bytes(entry.ai_route, entry.ai_route_len),
        private_data=_bytes(entry.ai_connect, entry.ai_connect_len),
    )


def _bytes(pointer: Any, length: int) -> bytes:
    return bytes(ffi.buffer(ffi.cast("char *", pointer), length)) if length else b""


def _address(pointer: Any, length: int) -> SocketAddress | None:
    return unpack_address(_bytes(pointer, length)) if length else None


def _name(pointer: Any) -> str | None:
    return os.fsdecode(ffi.string(pointer)) if pointer else None


async def devices() -> list[Device]:
    """Return the devices that the connection manager can use (man rdma_get_devices), to be opened
    where one is wanted by itself: the real ones, and last the built-in software device. Those of
    `Device.names()` that are not among them speak no transport that it knows.

    librdmacm opens each of them at the first call, and keeps it open.
    """
    try:
        providers = [rdma_core(), software()]
    except NoDeviceError:
        providers = [software()]
    return await _in_background(
        lambda: [device for provider in providers for device in _devices(provider)]
    )


def _devices(provider: Provider) -> list[Device]:
    provider.use_manager()
    count = ffi.new("int *")
    listed = provider.get_devices(count)
    if listed == ffi.NULL:
        return []
    try:
        return [
            Device(ffi.string(provider.get_device_name(listed[i].device)).decode())
            for i in range(count[0])
        ]
    finally:
        provider.free_devices(listed)


async def _in_background(function: Callable[[], Result]) -> Result:
    """Run in a thread what leaves nothing behind. A cancelled caller does not wait for it."""
    returned = anyio.Event()
    results: list[Result] = []
    errors: list[BaseException] = []

    def then(error: BaseException | None) -> None:
        if error is not None:
            errors.append(error)
        returned.set()

    start_call(current_event_loop(), lambda: results.append(function()), then)
    await returned.wait()
    if errors:
        raise errors[0]
    return results[0]


async def numeric_address(host: str, family: int = socket.AF_UNSPEC) -> str:
    """Look a name up without blocking the loop; a numeric address comes back as it is, an
    interface behind a % as its index.

    Args:
        host: the name.
        family: AF_INET or AF_INET6 takes only such addresses; otherwise IPv4 goes first.

    Raises:
        AddressError: the name does not resolve.
    """
    try:
        numeric = unpack_address(pack_address(host, 0))
    except ValueError:
        numeric = None  # a name, or nonsense: the resolver says which
    if numeric is not None and family in (socket.AF_UNSPEC, _family(numeric[0])):
        return numeric[0]
    try:
        found = await anyio.getaddrinfo(host, None, family=family, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise AddressError(f"{host!r} does not resolve: {error}") from error
    # IPv4 first: RoCE's and soft-RoCE's usual GIDs; IPv6 where there is nothing else.
    addresses = sorted((entry[4] for entry in found), key=lambda address: len(address))
    address = addresses[0]
    scope = address[3] if len(address) == 4 else 0
    return f"{address[0].partition('%')[0]}%{scope}" if scope else str(address[0])


def _family(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
