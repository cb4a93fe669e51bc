"""open_datagram(): a datagram socket at a port of a local address."""

from dataclasses import fields

from aiordma._base.arguments import whole_number
from aiordma._base.connection_parameters import (
    MAX_DATAGRAM_ACCEPT_PRIVATE_DATA,
    check_private_data,
)
from aiordma._base.enums import PortSpace
from aiordma._base.errors import NotSupportedError
from aiordma._base.opening import opens
from aiordma._base.options import (
    ConnectionKeywords,
    ConnectionOptions,
)
from aiordma._base.provider import Provider
from aiordma._connection.domain import DomainArgument, DomainChoice
from aiordma._datagram.datagram import Datagram
from aiordma._datagram.endpoint import DatagramEndpoint
from aiordma._datagram.peer import MOST_QKEY, UDP_QKEY
from aiordma._runtime.address_lookup import checked_host, checked_port, device_address
from aiordma._runtime.device_choice import with_device
from aiordma._runtime.identifiers import hub_of, new_identifier
from aiordma.verbs.address import MOST_GID_INDEX, MOST_SERVICE_LEVEL

_EFFECTIVE = (
    "receive_buffers",
    "max_send_wr",
    "max_recv_wr",
    "max_send_sge",
    "max_recv_sge",
    "max_inline_data",
    "comp_vector",
    "cqe",
    "flush_timeout",
)
"""The options that a datagram socket has."""


@opens
async def open_datagram(
    host: str,
    port: int = 0,
    *,
    device: str = "auto",
    receive_buffers: int | None = None,
    gid_index: int | None = None,
    service_level: int | None = None,
    most_handles: int = 256,
    qkey: int = UDP_QKEY,
    private_data: bytes = b"",
    domain: DomainArgument = None,
    options: ConnectionOptions | None = None,
) -> Datagram:
    """Open a datagram socket: one UD queue pair at a port of a local address.

    A peer that resolves the port receives the queue pair's number. It resolves with
    `Datagram.resolve`, or with rdma_resolve_addr and rdma_connect in the UDP port space.

    Args:
        host: a local address, which determines the device. "0.0.0.0" is not possible, because a
            queue pair belongs to one device.
        port: the port in RDMA's UDP port space; 0 is any free port (`socket.port`).
        device: "auto" is the real RDMA device that has the address, otherwise the built-in device
            "software"; or the name or the class of the device, as of `connect`.
        receive_buffers: the number of receives that are posted for you. If a datagram arrives while
            all of them hold datagrams that you have not received, it is silently dropped. 0: you
            post receives with `post_recv`. None: that of `options`, or 64 without them.
        gid_index: the index of the local GID, which is `Datagram.gid`, and the source of datagrams
            to peers of `resolve` and `peer`; None: the GID of the address `host` (on RoCE, of
            version 2). The source of a reply to `message.source` is the GID that the message was
            sent to.
        service_level: the service level of datagrams to all peers except groups, 0..15
            (InfiniBand's SL; on RoCE the priority of a VLAN). None: for peers of `resolve`, that of
            the resolved path; for `message.source`, that of the message; for peers of `peer`, 0.
            The software device does not send it.
        most_handles: the maximum number of peers with a cached address handle, and of remembered
            senders.
        qkey: the queue pair's key: datagrams with a different key are dropped. With a key other
            than the port space's default, no peer can resolve this socket, because the connection
            manager sends the default. Peers then need the address, number and key from another
            source.
        private_data: up to 136 bytes for peers that resolve this socket
            (`DatagramPeer.private_data`).
        domain: the protection domain: None shares one with everything else on this event loop and
            device, "each" makes one for this socket alone, and a Domain of `open_domain` is used
            with its device.
        options: max_recv_wr, max_send_wr, max_recv_sge (without the header), max_send_sge,
            max_inline_data, comp_vector, cqe and flush_timeout: see ConnectionOptions. None: the
            defaults, with 4 for both max_*_sge.

    Raises:
        NotSupportedError: the device does not support datagrams.
        AddressError: the host's name does not resolve, or the address belongs to another device
            than the required one.
        NoDeviceError: a real device is required by name, and there is no such device.
        DeviceRequirementError: `device` does not permit the device that has the address.
        TypeError, ValueError: an argument is invalid; the message names it and the expected value.
        VerbsCallError: the address or port is not available; the message says why.
        ClosedError, EventLoopError: `domain` is closed, or belongs to another event loop.
        ForkError: this process is a forked child of a process that used real devices.

    Cancellation: nothing is left.

    See: man rdma_bind_addr, rdma_listen.
    """
    call = "open_datagram"
    host, port = checked_host(host, "host", call), checked_port(port, "port", call)
    given = ConnectionKeywords()
    if receive_buffers is not None:
        given["receive_buffers"] = receive_buffers
    default = ConnectionOptions(receive_buffers=64, max_send_sge=4, max_recv_sge=4)
    chosen = ConnectionOptions._chosen(open_datagram, options, given, default)
    _check_effect(chosen, call)
    private_data = check_private_data(
        private_data,
        MAX_DATAGRAM_ACCEPT_PRIVATE_DATA,
        "the answer to those who resolve a datagram port",
        call,
    )
    qkey = whole_number(qkey, "qkey", 0, MOST_QKEY, call)
    most_handles = whole_number(most_handles, "most_handles", 1, 1 << 16, call)
    if gid_index is not None:
        gid_index = whole_number(gid_index, "gid_index", 0, MOST_GID_INDEX, call)
    if service_level is not None:
        service_level = whole_number(service_level, "service_level", 0, MOST_SERVICE_LEVEL, call)
    choice = DomainChoice(domain, call)
    requirement = choice.requirement(device)
    numeric = await device_address(host, call)

    async def attempt(provider: Provider) -> Datagram:
        async with new_identifier(provider, PortSpace.UDP) as (reactor, identifier):
            identifier.bind(numeric, port)
            hub = await hub_of(reactor, identifier, requirement, f"open_datagram({numeric!r})")
            if not hub.attributes.max_ah:
                # Devices without address handles (iWARP) have no UD queue pairs either.
                raise NotSupportedError(f"datagrams: {hub.context.device_name} has none (max_ah 0)")
            own = await choice.on(reactor, hub)
        # From here the endpoint owns the identifier.
        endpoint = DatagramEndpoint(
            reactor, hub, identifier, chosen, private_data, most_handles, own
        )
        reactor.subscribe(identifier, endpoint.handle_event)
        try:
            await endpoint.start(numeric, qkey, gid_index, service_level)
            return Datagram(endpoint, numeric)
        except BaseException:
            await endpoint.aclose()
            raise

    return await with_device(requirement, numeric, attempt)


def _check_effect(options: ConnectionOptions, call: str) -> None:
    """Refuse options that have no effect on a datagram socket."""
    for each in fields(options):
        value = getattr(options, each.name)
        if each.name not in _EFFECTIVE and value != each.default:
            raise ValueError(
                f"{call}(): options has {each.name}={value!r}: datagram sockets have only "
                f"{', '.join(_EFFECTIVE)}"
            )
