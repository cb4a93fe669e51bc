"""Multicast groups: members, senders that are no members, leaving, and what is refused."""

import errno
from typing import Any

import anyio
import pytest

import aiordma
from aiordma.verbs import CmEventType
from aiordma.verbs.identifier import Event, Identifier
from tests.device.players import Outcome, one_loop, until
from tests.devices import ADDRESS, IPV6, DeviceUnderTest, own_group
from tests.internals import endpoint_of
from tests.network import run_alone

pytestmark = [pytest.mark.anyio, pytest.mark.capability("datagrams")]

GROUP, OTHER_GROUP = own_group(1), own_group(2)
IPV6_GROUP = "ff0e::1234"


def members() -> set[str]:
    """The IPv4 groups that the kernel has joined on the network."""
    with open("/proc/net/igmp") as table:
        words = [line.split()[0] for line in table if line.startswith("\t\t\t\t")]
    return {".".join(str(part) for part in bytes.fromhex(word)[::-1]) for word in words}


async def test_members_receive_and_can_reply_and_leave() -> None:
    async with (
        await aiordma.open_datagram(ADDRESS) as sender,
        await aiordma.open_datagram(ADDRESS) as member,
    ):
        group = await sender.join(GROUP, send_only=True)
        joined = await member.join(GROUP)
        assert joined.is_joined
        assert GROUP in members()
        await sender.send(b"to all", group, immediate=7)
        message = await member.receive()
        assert (message.data, message.immediate) == (b"to all", 7)
        await member.send(b"to one", message.source)
        assert (await sender.receive()).data == b"to one"  # and not what it sent itself
        await joined.leave()
        await joined.leave()
        assert not joined.is_joined
        assert GROUP not in members()
        await sender.send(b"to those who have not left", group)
        await sender.send(b"the next", sender.peer(member.gid, member.qp_num))
        assert (await member.receive()).data == b"the next"


@pytest.mark.promise("Cancellation loses no message and leaves nothing open")
async def test_a_cancelled_join_has_not_joined() -> None:
    async with await aiordma.open_datagram(ADDRESS) as socket:
        for delay in (0, 0.002, 0.01):
            with anyio.move_on_after(delay):
                await socket.join(GROUP)
                await anyio.sleep_forever()
            for group in list(endpoint_of(socket).groups.values()):
                await group.leave()
            assert GROUP not in members()
        group = await socket.join(GROUP)
        await socket.send(b"looped back", group)
        assert (await socket.receive()).data == b"looped back"


@one_loop
async def test_a_member_of_two_groups_leaves_one() -> None:
    async with (
        await aiordma.open_datagram(ADDRESS) as sender,
        await aiordma.open_datagram(ADDRESS) as member,
    ):
        ways = [await sender.join(name, send_only=True) for name in (GROUP, OTHER_GROUP)]
        joined = [await member.join(name) for name in (GROUP, OTHER_GROUP)]
        for way in ways:
            await sender.send(way.address.encode(), way)
        received = [(await member.receive()).data.decode() for _ in ways]
        assert received == [GROUP, OTHER_GROUP]
        await joined[0].leave()
        for way in ways:
            await sender.send(way.address.encode(), way)
        assert (await member.receive()).data.decode() == OTHER_GROUP


@pytest.mark.promise("A datagram arrives whole or not at all")
@one_loop
async def test_closing_the_socket_leaves_its_groups() -> None:
    async with await aiordma.open_datagram(ADDRESS) as socket:
        group = await socket.join(GROUP)
    assert not group.is_joined
    assert GROUP not in members()
    with pytest.raises(aiordma.ClosedError, match=f"the group {GROUP} has been left"):
        _ = group.peer


@one_loop
async def test_a_group_that_was_left_takes_no_datagrams_and_can_be_joined_again() -> None:
    async with await aiordma.open_datagram(ADDRESS) as socket:
        group = await socket.join(GROUP)
        await group.leave()
        with pytest.raises(aiordma.ClosedError, match="has been left"):
            await socket.send(b"", group)
        await socket.send(b"again", await socket.join(GROUP))
        assert (await socket.receive()).data == b"again"


@one_loop
@pytest.mark.parametrize(
    ("address", "text"),
    [
        (ADDRESS, r"join\(\): group='[\d.]+': expected a multicast address"),
        ("all.the.others", r"join\(\): group='all.the.others': expected a numeric"),
        ("ff02::1", r"join\(\): group='ff02::1': expected an IPv4 group"),
        (GROUP, r"join\(\): group='[\d.]+' is joined already"),
    ],
    ids=lambda value: "a group" if value == GROUP else None,
)
async def test_what_cannot_be_joined_is_refused(address: str, text: str) -> None:
    async with await aiordma.open_datagram(ADDRESS) as socket:
        await socket.join(GROUP)
        with pytest.raises(ValueError, match=text):
            await socket.join(address)


def _ask_nobody(*_: Any, **__: Any) -> None:
    """In place of a join: no event follows."""


def _refuse(*_: Any, **__: Any) -> None:
    raise aiordma.VerbsCallError(errno.EINVAL, "rdma_join_multicast_ex")


def _error(group: aiordma.types.MulticastGroup) -> Event:
    """What the network says when it ends a membership, or grants none."""
    return Event(
        type=CmEventType.MULTICAST_ERROR,
        status=-errno.ENETDOWN,
        key=group._identifier.key,
        new_key=0,
        private_data=b"",
        responder_resources=0,
        initiator_depth=0,
        retry_count=0,
        rnr_retry_count=0,
        qp_num=0,
    )


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
@one_loop
async def test_a_join_that_is_refused_or_not_confirmed_can_be_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with await aiordma.open_datagram(ADDRESS) as socket:
        with monkeypatch.context() as patch:
            patch.setattr(Identifier, "join_multicast", _ask_nobody)
            with pytest.raises(aiordma.ConnectTimeoutError, match=r"within 0\.1 s"):
                await socket.join(GROUP, timeout=0.1)
        with monkeypatch.context() as patch:
            patch.setattr(Identifier, "join_multicast", _refuse)
            with pytest.raises(aiordma.MulticastError, match="rdma_join_multicast_ex"):
                await socket.join(GROUP)
        with monkeypatch.context() as patch:
            patch.setattr(Identifier, "join_multicast", _ask_nobody)
            outcome = Outcome()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(outcome.of, lambda: socket.join(GROUP))
                await until(lambda: bool(endpoint_of(socket).groups))
                (group,) = endpoint_of(socket).groups.values()
                group._handle(_error(group))
        assert isinstance(outcome.error, aiordma.MulticastError)
        assert "Network is down" in str(outcome.error)
        await socket.join(GROUP)


@one_loop
async def test_closing_the_socket_ends_a_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Identifier, "join_multicast", _ask_nobody)
    outcome = Outcome()
    socket = await aiordma.open_datagram(ADDRESS)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outcome.of, lambda: socket.join(GROUP, timeout=None))
        await until(lambda: bool(endpoint_of(socket).groups))
        await socket.aclose()
    assert isinstance(outcome.error, aiordma.ClosedError)


@one_loop
async def test_a_group_that_the_network_takes_away_is_an_error_to_send_to() -> None:
    async with await aiordma.open_datagram(ADDRESS) as socket:
        group = await socket.join(GROUP)
        group._handle(_error(group))
        assert not group.is_joined
        with pytest.raises(aiordma.MulticastError, match=f"the group {GROUP}: .*Network is down"):
            await socket.send(b"", group)


IPV6_MEMBERS = """
import anyio
import aiordma
from tests.device.test_multicast import IPV6_GROUP
from tests.network import ethernet, ip

async def main():
    async with (
        await aiordma.open_datagram("fd00::1") as one,
        await aiordma.open_datagram("fd00::1") as other,
    ):
        await other.join(IPV6_GROUP)
        await one.send(b"to all", await one.join(IPV6_GROUP, send_only=True))
        message = await other.receive()
        await other.send(b"to one", message.source)
        assert (await one.receive()).data == b"to one"

ip(f"address add fd00::1/64 dev {ethernet()}")
anyio.run(main)
"""


@pytest.mark.capability("ipv6_multicast")
def test_members_of_an_ipv6_group_receive_and_can_reply() -> None:
    run_alone(IPV6_MEMBERS)  # its machine may have no interface that leads to such groups


@one_loop
async def test_ipv6_groups_are_joined_or_refused_by_name(device: DeviceUnderTest) -> None:
    refusal: type[aiordma.RdmaError] = aiordma.MulticastError
    text = "Network is unreachable"  # the loopback interface leads to none
    if device.lacks("ipv6_multicast"):
        refusal, text = aiordma.NotSupportedError, f"group {IPV6_GROUP}: the kernel"
    async with await aiordma.open_datagram(IPV6) as socket:
        for send_only in (False, True):
            with pytest.raises(refusal, match=text):
                await socket.join(IPV6_GROUP, send_only=send_only)
