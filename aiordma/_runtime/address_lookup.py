"""Resolves names to addresses without blocking the loop, also by librdmacm, and lists devices."""

import ipaddress
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from aiordma._base.arguments import member, text, whole_number, wrong_type, wrong_value
from aiordma._base.enums import PortSpace, QueuePairType
from aiordma._base.errors import AddressError, NoDeviceError
from aiordma._base.hints import descriptors_hint
from aiordma._base.provider import Provider, rdma_core, software, usual_provider
from aiordma._base.socket_address import SocketAddress, pack_address, unpack_address
from aiordma._base.system import system
from aiordma._loop.event_loop import current_event_loop
from aiordma._loop.threads import PEERS, Once, start_call
from aiordma._native import ffi, lib
from aiordma.verbs import Device

Result = TypeVar("Result")

_SERVICE = "a port in 0..65535, or a name from /etc/services"
_SERVICES = {PortSpace.TCP: QueuePairType.RC, PortSpace.UDP: QueuePairType.UD}

# The meaning of the codes of getaddrinfo (man getaddrinfo).
_REASONS = {
    socket.EAI_NONAME: "this name does not exist, or is not numeric where that is required",
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
    """A result of `resolve` (struct rdma_addrinfo), copied.

    Attributes:
        family: the address family of both addresses.
        service: the service of the queue pair.
        port_space: the port space of the port.
        source: the local address, if known; with passive=True, the address to listen on.
        destination: the peer's address, to connect to.
        source_name, destination_name: canonical names, if the library returned them.
        route: path records for an InfiniBand fabric, as bytes, if they were resolved.
        private_data: data that a connect must send in front of its own private data.
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
    """Resolve a host and a service as librdmacm does, to one address of the host. If an address
    and route service (ibacm) runs on this machine, the result includes its path records.

    `connect` and `listen` do not need this.

    Args:
        host: a name or a numeric address; None: any local address, with passive=True.
        service: a port, or a name from /etc/services; None: port 0.
        passive: resolve an address to listen on (RAI_PASSIVE).
        numeric_host: accept only numeric addresses, and query no name server (RAI_NUMERICHOST).
        no_route: do not resolve the route (RAI_NOROUTE).
        family: only addresses of this family: AF_INET or AF_INET6 (RAI_FAMILY). None: both.
        port_space: TCP for connections, UDP for datagrams.
        device: selects the connection manager. "software": that of the built-in software device;
            another name: librdmacm; "auto": librdmacm if there is a real device, else that of the
            software device.

    Raises:
        AddressError: the host or the service does not resolve; the message says why.
        TypeError: an argument has the wrong type; the message names the expected one.
        ValueError: host and service are both None, a port is out of range, or a text contains a
            NUL.
        NoDeviceError: a real device is named, and rdma-core is not installed.
        VerbsCallError: no thread could be started.
        ForkError: this process is a forked child, and its parent has used real devices.

    Cancellation: the call returns at once; the lookup continues in a thread, without effect.

    See: man rdma_getaddrinfo.
    """
    if host is None and service is None:
        raise ValueError("resolve(): host=None and service=None: expected one of them, or both")
    call = "resolve"
    if host is not None:
        host = checked_host(host, "host", call)
    if service is not None:
        service = checked_service(service, "service", call)
    port_space = member(port_space, "port_space", PortSpace, call)
    if port_space not in _SERVICES:
        raise ValueError(f"{call}(): port_space={port_space!r}: expected TCP or UDP")
    if family is not None:
        family = member(family, "family", socket.AddressFamily, call)
    provider = usual_provider(device, call)
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


def _text(given: str | None) -> Any:
    return ffi.NULL if given is None else ffi.new("char[]", os.fsencode(given))


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
    # -1 is the failure of an rdma_ call, with errno set, or the C library's EAI_BADFLAGS.
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
    """Return the devices that the connection manager can use: the real devices, and last the
    built-in software device. Further devices in `Device.names()` have a transport that the
    connection manager does not support.

    librdmacm opens each of them at the first call, and keeps it open.

    Raises:
        VerbsCallError: no thread could be started.
        ForkError: this process is a forked child, and its parent has used real devices.
        ValueError: as of `Device.names`.

    Cancellation: the call returns at once; the lookup continues in a thread, without effect.

    See: man rdma_get_devices.
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
    """Run a function without lasting effects in a worker thread. A cancelled caller does not wait
    for it.

    Raises:
        VerbsCallError: no thread could be started.
    """
    loop = current_event_loop()
    returned = Once(loop)
    results: list[Result] = []
    errors: list[BaseException] = []

    def then(error: BaseException | None) -> None:
        if error is not None:
            errors.append(error)
        returned.set()

    withdraw = start_call(loop, lambda: results.append(function()), then, PEERS)
    try:
        await returned.wait()
        if errors:
            raise errors[0]
        return results[0]
    finally:
        withdraw()
        errors.clear()  # their tracebacks hold this frame


def checked_host(host: object, name: str, call: str) -> str:
    """Return a host's name or address, without checking that it exists.

    Raises:
        TypeError, ValueError: the value is not a text that could be a host.
    """
    return text(host, name, "a name or a numeric address such as '192.0.2.1'", call)


def checked_port(port: object, name: str, call: str) -> int:
    """Return a port's number.

    Raises:
        TypeError, ValueError: the value is not in 0..65535.
    """
    return whole_number(port, name, 0, 0xFFFF, call)


def checked_service(service: object, name: str, call: str) -> int | str:
    """Return a port's number, or the name of a service, without checking that the service exists.

    Raises:
        TypeError, ValueError: the value is neither a text nor a number in 0..65535, or it is the
            text of another number, which getaddrinfo would truncate.
    """
    if not isinstance(service, str):
        if isinstance(service, bool) or not hasattr(type(service), "__index__"):
            raise wrong_type(service, name, _SERVICE, call)
        return checked_port(service, name, call)
    service = text(service, name, _SERVICE, call)
    try:
        is_known = 0 <= int(service) <= 0xFFFF
    except ValueError:
        is_known = not service.isdecimal()  # a name, and not more digits than Python reads
    if not is_known:
        raise wrong_value(service, name, _SERVICE, call)
    return service


async def numeric_address(host: str, family: int = socket.AF_UNSPEC) -> str:
    """Resolve a name without blocking the loop. Return a numeric address unchanged, but with the
    index in place of an interface's name after a %.

    Args:
        host: the name.
        family: AF_INET or AF_INET6: only such addresses; otherwise IPv4 is preferred.

    Raises:
        AddressError: the name does not resolve.
    """
    return (await addresses_of(host, 0, family))[0][0]


async def device_address(host: str, call: str) -> str:
    """Resolve a name as `numeric_address` does, to an address that belongs to one device.

    Raises:
        AddressError: the name does not resolve.
        ValueError: the address is every local address.
    """
    numeric = await numeric_address(host)
    if ipaddress.ip_address(numeric).is_unspecified:
        raise ValueError(
            f"{call}(): host={host!r}: expected the address of one device's interface (`rdma link` "
            "lists devices and their interfaces)"
        )
    return numeric


def known_address(host: str, port: int) -> SocketAddress | None:
    """Return a numeric address, with the index in place of an interface's name; None: it is a name,
    or invalid, which the resolver decides."""
    if "%" in host:
        return _parsed(host, port)  # anew: the index of an interface may change
    return _remembered(host, port)


def _parsed(host: str, port: int) -> SocketAddress | None:
    try:
        return unpack_address(pack_address(host, port))
    except ValueError:
        return None


_remembered = lru_cache(256)(_parsed)


async def addresses_of(
    host: str | None, port: int | str, family: int = socket.AF_UNSPEC, flags: int = 0
) -> list[SocketAddress]:
    """Resolve a name without blocking the loop, as `numeric_address` does, to all its addresses,
    those of IPv4 first, as they are the usual GIDs of RoCE and soft-RoCE.

    Args:
        host: the name; None: as of getaddrinfo, with AI_PASSIVE every local address.
        port: a number, or a name from /etc/services.
        family: AF_INET or AF_INET6: only such addresses.
        flags: of getaddrinfo.

    Raises:
        AddressError: the host or the port does not resolve.
    """
    if host is not None and isinstance(port, int):
        numeric = known_address(host, port)
        if numeric is not None and family in (socket.AF_UNSPEC, _family(numeric[0])):
            return [numeric]
    try:
        found = await _in_background(
            lambda: system.names.getaddrinfo(host, port, family, socket.SOCK_STREAM, 0, flags)
        )
    except (OSError, UnicodeError) as error:
        raise _unresolved(host, port, error) from error
    addresses = sorted((entry[4] for entry in found), key=len)
    return list(dict.fromkeys(_socket_address(address) for address in addresses))


def _socket_address(found: Any) -> SocketAddress:
    host, scope = str(found[0]), found[3] if len(found) == 4 else 0
    return (f"{host.partition('%')[0]}%{scope}" if scope else host), found[1]


def _unresolved(host: str | None, port: int | str, error: Exception) -> AddressError:
    what = f"{host!r}, {port!r}" if isinstance(port, str) else f"{host!r}"
    if host is not None and host.startswith("[") and host.endswith("]"):
        return AddressError(f"{what} does not resolve: give the address without the brackets")
    # The resolver treats a file that it cannot open as a missing file.
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as shortage:
        why = descriptors_hint(shortage.errno or 0)
        if why is not None:
            unresolved = AddressError(f"{what} does not resolve: {shortage.strerror}. {why}")
            unresolved.errno = shortage.errno
            return unresolved
    return AddressError(f"{what} does not resolve: {error}")


def _family(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
