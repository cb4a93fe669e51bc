"""Queries a peer's connection manager for the queue pair of a port (SIDR)."""

import socket

import anyio

from aiordma._base.connection_parameters import ConnectionParameters
from aiordma._base.enums import CmEventType, PortSpace
from aiordma._base.errors import AddressError, ConnectTimeoutError, VerbsCallError
from aiordma._connection.event_waiter import EventWaiter
from aiordma._datagram.peer import DatagramPeer
from aiordma._runtime.address_lookup import numeric_address
from aiordma._runtime.identifiers import ROUTE_TIMEOUT_MS, drop, milliseconds
from aiordma._runtime.reactor import Reactor
from aiordma.verbs.identifier import Identifier


async def resolve_peer(
    reactor: Reactor,
    source: str,
    host: str,
    port: int,
    parameters: ConnectionParameters,
    timeout: float | None,
) -> DatagramPeer:
    """Return the peer that takes datagrams at a port. See `Datagram.resolve`.

    The query uses its own identifier, bound to the address `source`. The identifier is destroyed at
    the end in every case.
    """
    what = f"resolve {host}:{port}"
    timeout_ms = milliseconds(timeout)
    waiter = EventWaiter(what)
    identifier = Identifier(reactor.channel, PortSpace.UDP)
    reactor.subscribe(identifier, waiter.handle)
    try:
        with anyio.fail_after(timeout):
            family = socket.AF_INET6 if ":" in source else socket.AF_INET
            numeric = await numeric_address(host, family)
            identifier.resolve_address(numeric, port, (source, 0), timeout_ms)
            await waiter.until(CmEventType.ADDR_RESOLVED)
            identifier.resolve_route(min(timeout_ms, ROUTE_TIMEOUT_MS))
            await waiter.until(CmEventType.ROUTE_RESOLVED)
            identifier.connect(parameters)
            event = await waiter.until(CmEventType.ESTABLISHED)
    except VerbsCallError as error:
        raise AddressError._of_call(what, error) from error
    except TimeoutError:
        raise ConnectTimeoutError(f"{what}: no answer within {timeout:g} s") from None
    finally:
        await drop(reactor, identifier)
    if event.address is None:
        raise AddressError(f"{what}: the peer's answer has no address")
    return DatagramPeer(event.address, event.qp_num, event.qkey, event.private_data)
