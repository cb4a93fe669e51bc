"""IPv6: connections over it, link-local addresses with their interface, both versions at once."""

import ipaddress
import socket
from typing import Any

import anyio
import pytest
from anyio.streams.stapled import MultiListener

import aiordma
from aiordma import streams
from tests.connections import connect_to
from tests.device.many_addresses import MANY, names
from tests.device.players import both_ways, one_loop
from tests.devices import ADDRESS, BUILT_IN, IPV6
from tests.network import run_alone

pytestmark = pytest.mark.anyio


LINK_SCOPE = 0x20


def link_local(name: str) -> str:
    """An interface's own address, which its MAC gives."""
    with open("/proc/net/if_inet6") as table:
        rows = [line.split() for line in table]
    (found,) = [
        str(ipaddress.IPv6Address(int(address, 16)))
        for address, _index, _bits, scope, _flags, interface in rows
        if interface == name and int(scope, 16) == LINK_SCOPE
    ]
    return found


async def meet(
    host: str, listener: aiordma.Listener, **options: Any
) -> tuple[tuple[str, int], tuple[str, int]]:
    """Connect, talk both ways, and return the ends as the server sees them: (its own, ours)."""
    client, server = await connect_to(listener, host, **options)
    async with client, server:
        assert client.peer_address is not None
        assert client.local_address is not None
        assert server.local_address is not None
        assert server.peer_address is not None
        await both_ways(client, server)
        # Which interface an address is on is its own side's to say.
        assert bare(server.peer_address) == bare(client.local_address)
        assert bare(server.local_address) == bare(client.peer_address)
        return server.local_address, server.peer_address


def bare(address: tuple[str, int]) -> tuple[str, int]:
    return address[0].partition("%")[0], address[1]


async def test_a_connection_over_ipv6() -> None:
    async with await aiordma.listen(IPV6, 0) as listener:
        local, peer = await meet(IPV6, listener)
        assert local == (IPV6, listener.port)
        assert peer[0] == IPV6


async def meet_at_link_local_addresses(name: str) -> None:
    address, index = link_local(name), socket.if_nametoindex(name)
    for scope in (name, index):
        host = f"{address}%{scope}"
        async with await aiordma.listen(host, 0) as listener:
            assert listener.local_address == (f"{address}%{index}", listener.port)
            local, peer = await meet(host, listener)
            assert bare(local) == (address, listener.port)
            assert bare(peer)[0] == address


ON_AN_INTERFACE_OF_ITS_OWN = """
import anyio
from tests.device.test_ipv6 import meet_at_link_local_addresses
from tests.network import ethernet

anyio.run(meet_at_link_local_addresses, ethernet())
"""


@one_loop
async def test_a_link_local_address_has_its_interface_behind_it() -> None:
    if BUILT_IN:  # it is on all interfaces, of which a machine may have none
        await anyio.to_thread.run_sync(run_alone, ON_AN_INTERFACE_OF_ITS_OWN)
    else:
        await meet_at_link_local_addresses("dummy0")


@one_loop
async def test_a_source_address_is_ipv6_too() -> None:
    async with await aiordma.listen(IPV6, 0) as listener:
        _, peer = await meet(IPV6, listener, source=(IPV6, 23458))
        assert peer == (IPV6, 23458)
        with pytest.raises(aiordma.AddressError, match="has no IPv6 address to connect from"):
            await aiordma.connect(IPV6, listener.port, source=(ADDRESS, 0))


@one_loop
@pytest.mark.capability("ipv4_at_ipv6_wildcard")
async def test_the_wildcard_of_ipv6_takes_ipv4_too() -> None:
    async with await aiordma.listen("::", 0) as listener:
        await meet(IPV6, listener)
        await meet(ADDRESS, listener)
        with pytest.raises(aiordma.VerbsCallError, match="ipv6_only"):
            await aiordma.listen("0.0.0.0", listener.port)


@one_loop
async def test_one_port_of_each_version_with_ipv6_only() -> None:
    async with (
        await aiordma.listen("::", 0, ipv6_only=True) as six,
        await aiordma.listen("0.0.0.0", six.port) as four,
    ):
        assert (await meet(IPV6, six))[1][0] == IPV6
        assert (await meet(ADDRESS, four))[1][0] == ADDRESS


@one_loop
async def test_ipv6_only_is_a_bool_or_none() -> None:
    wrong: Any = "no"
    with pytest.raises(TypeError, match=r"listen\(\): ipv6_only='no'"):
        await aiordma.listen("::", 0, ipv6_only=wrong)


@one_loop
@pytest.mark.parametrize("host", ["0.0.0.0", ADDRESS, "localhost"])
async def test_ipv6_only_is_for_ipv6_addresses(host: str) -> None:
    with pytest.raises(ValueError, match="ipv6_only=True"):
        await aiordma.listen(host, 0, ipv6_only=True)


@one_loop
async def test_listener_of_a_name_has_its_first_ipv4_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names(monkeypatch, IPV6, ADDRESS)
    async with aiordma.listen(MANY, 0) as listener, streams.listen_stream(MANY, 0) as stream:
        assert listener.local_address == (ADDRESS, listener.port)
        assert stream.local_address == (ADDRESS, stream.port)
        with pytest.raises(aiordma.RejectedError):
            await aiordma.connect(IPV6, listener.port)
    names(monkeypatch, IPV6)
    async with aiordma.listen(MANY, 0) as listener:
        assert listener.local_address == (IPV6, listener.port)


@one_loop
async def test_listeners_of_all_addresses_serve_together() -> None:
    async def answer(stream: streams.Stream) -> None:
        async with stream:
            await stream.send(await stream.receive())

    listeners = [await streams.listen_stream(host, 0) for host in (ADDRESS, IPV6)]
    async with MultiListener(listeners) as both, anyio.create_task_group() as group:
        group.start_soon(both.serve, answer)
        for listener, host in zip(listeners, (ADDRESS, IPV6), strict=True):
            async with streams.connect_stream(host, listener.port) as client:
                await client.send(b"hello")
                assert await client.receive() == b"hello"
        group.cancel_scope.cancel()
