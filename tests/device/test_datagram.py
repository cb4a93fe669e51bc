"""Datagram sockets: resolving, sending, replying, losing, and what is left afterwards."""

import errno
import gc
import ipaddress
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

import aiordma
from aiordma.verbs import AddressHandle, CmEventType, ProtectionDomain
from aiordma.verbs.identifier import Event
from tests.device.players import Outcome, one_loop, reactor_in_use, silent_taker, until
from tests.devices import ADDRESS, IPV6
from tests.internals import UDP_QKEY, address_handles, endpoint_of, identifier_of

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.capability("datagrams"),
    pytest.mark.loop_and_device,
]

OTHER_QKEY = 0x11111111


@asynccontextmanager
async def sockets(
    *, one: dict[str, Any] | None = None, other: dict[str, Any] | None = None
) -> AsyncIterator[tuple[aiordma.Datagram, aiordma.Datagram, aiordma.DatagramPeer]]:
    """Two sockets, and the second one as the first one's peer."""
    async with (
        await aiordma.open_datagram(ADDRESS, **(one or {})) as first,
        await aiordma.open_datagram(ADDRESS, **(other or {})) as second,
    ):
        yield first, second, first.peer(second.gid, second.qp_num, second.qkey)


# -- every loop -----------------------------------------------------------------------------------


async def test_a_datagram_and_its_answer() -> None:
    async with sockets(other={"private_data": b"who I am"}) as (one, other, _):
        peer = await one.resolve(ADDRESS, other.port)
        assert (peer.qp_num, peer.qkey) == (other.qp_num, UDP_QKEY)
        assert peer.private_data.rstrip(b"\0") == b"who I am"
        await one.send(b"hello", peer)
        message = await other.receive()
        assert (message.data, message.immediate) == (b"hello", None)
        assert message.sender_qp_num == message.source.qp_num == one.qp_num
        await other.send(b"and back", message.source, immediate=0xFEEDBEEF)
        answer = await one.receive()
        assert (answer.data, answer.immediate) == (b"and back", 0xFEEDBEEF)


async def test_many_at_once_go_as_receives_and_slots_allow() -> None:
    async with sockets(
        one={"options": aiordma.ConnectionOptions(max_send_wr=4)}, other={"receive_buffers": 50}
    ) as (one, other, peer):
        async with anyio.create_task_group() as senders:
            for number in range(50):
                senders.start_soon(one.send, bytes([number]), peer)
        numbers = [(await other.receive()).data[0] for _ in range(50)]
        assert sorted(numbers) == list(range(50))


async def test_close_ends_a_pending_receive() -> None:
    outcome = Outcome()
    socket = await aiordma.open_datagram(ADDRESS)
    async with anyio.create_task_group() as group:
        group.start_soon(outcome.of, socket.receive)
        await anyio.sleep(0.05)
        await socket.aclose()
    assert isinstance(outcome.error, aiordma.ClosedError)
    assert not reactor_in_use()


# -- what is sent ---------------------------------------------------------------------------------


@pytest.mark.promise("A datagram arrives whole or not at all")
@one_loop
async def test_every_length_up_to_the_mtu_arrives_and_no_longer_one_is_posted() -> None:
    async with sockets() as (one, other, peer):
        for length in (0, 1, 64, 65, one.mtu):
            data = bytes(range(256)) * 16
            await one.send(data[:length], peer)
            assert (await other.receive()).data == data[:length]
        for send in (one.send, one.post_ud_send):
            with pytest.raises(ValueError, match=f"the MTU of .*port is {one.mtu}"):
                await send(bytes(one.mtu + 1), peer)
        await one.send(b"the socket works on", peer)
        assert (await other.receive()).data == b"the socket works on"


@one_loop
async def test_registered_memory_and_gathered_parts_are_sent() -> None:
    async with sockets() as (one, other, peer):
        region = one.register(bytearray(b"0123456789" * 20))
        request = one.post_ud_sendv([region[10:110], b"plain", region[:5]], peer, immediate=0)
        assert request.operation == "SEND_WITH_IMM"
        await request
        message = await other.receive()
        assert message.data == b"0123456789" * 10 + b"plain" + b"01234"
        assert message.immediate == 0


@one_loop
async def test_a_full_send_queue_is_an_error_for_post_and_a_wait_for_send() -> None:
    async with sockets(one={"options": aiordma.ConnectionOptions(max_send_wr=2)}) as (
        one,
        other,
        peer,
    ):
        requests = [one.post_ud_send(b"posted", peer) for _ in range(2)]
        with pytest.raises(aiordma.QueueFullError):
            one.post_ud_send(b"one too many", peer)
        await one.send(b"waited", peer)
        for request in requests:
            await request
        assert [(await other.receive()).data for _ in range(3)] == [b"posted"] * 2 + [b"waited"]


@one_loop
@pytest.mark.parametrize("case", ["no peer", "no buffer", "immediate", "too many parts"])
async def test_a_refused_send_leaves_the_socket_as_it_was(case: str) -> None:
    async with sockets(one={"options": aiordma.ConnectionOptions(max_send_wr=1)}) as (
        one,
        other,
        peer,
    ):
        bad: dict[str, tuple[type[Exception], Callable[[], Any]]] = {
            "no peer": (TypeError, lambda: one.send(b"", ADDRESS)),  # type: ignore[arg-type]
            "no buffer": (TypeError, lambda: one.send("text", peer)),  # type: ignore[arg-type]
            "immediate": (ValueError, lambda: one.send(b"", peer, immediate=1 << 32)),
            "too many parts": (ValueError, lambda: one.sendv([b"part"] * 50, peer)),
        }
        kind, call = bad[case]
        with pytest.raises(kind):
            await call()
        await one.send(b"the only slot is free", peer)
        assert (await other.receive()).data == b"the only slot is free"


@one_loop
async def test_ipv6_carries_datagrams_and_their_answers() -> None:
    async with (
        await aiordma.open_datagram(IPV6) as one,
        await aiordma.open_datagram(IPV6) as other,
    ):
        await one.send(b"hello", await one.resolve(IPV6, other.port), solicited=True)
        message = await other.receive()
        assert message.source.address.gid == one.gid == ipaddress.ip_address(IPV6).packed
        await other.send(message.data + b" too", message.source)
        assert (await one.receive()).data == b"hello too"


# -- what is dropped ------------------------------------------------------------------------------


@pytest.mark.promise("A datagram arrives whole or not at all")
@one_loop
async def test_what_finds_no_receive_is_dropped_and_later_ones_arrive() -> None:
    async with sockets(other={"receive_buffers": 2}) as (one, other, peer):
        for number in range(5):
            await one.send(bytes([number]), peer)
        await anyio.sleep(0.3)  # all have come, and found what there was
        assert [(await other.receive()).data for _ in range(2)] == [b"\0", b"\1"]
        await one.send(b"later", peer)
        assert (await other.receive()).data == b"later"


@pytest.mark.promise("A datagram arrives whole or not at all")
@one_loop
async def test_another_qkey_is_dropped() -> None:
    async with sockets() as (one, other, peer):
        await one.send(b"wrong", one.peer(other.gid, other.qp_num, OTHER_QKEY))
        await one.send(b"right", peer)
        assert (await other.receive()).data == b"right"


@one_loop
async def test_a_socket_with_a_qkey_of_its_own_is_found_by_its_numbers_only() -> None:
    keyed = {"qkey": OTHER_QKEY}
    async with sockets(one=keyed, other=keyed) as (one, other, peer):
        await one.send(b"by numbers", peer)
        message = await other.receive()
        assert message.source.qkey == OTHER_QKEY
        await other.send(b"and back", message.source)
        assert (await one.receive()).data == b"and back"
        with pytest.raises(aiordma.UnreachableError, match="no program receives datagrams"):
            await one.resolve(ADDRESS, other.port)


# -- resolving ------------------------------------------------------------------------------------


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
@one_loop
async def test_resolving_says_what_failed() -> None:
    async with await aiordma.open_datagram(ADDRESS) as socket:
        with pytest.raises(aiordma.UnreachableError, match="no program receives datagrams"):
            await socket.resolve(ADDRESS, 4711)
        with pytest.raises(aiordma.AddressError, match="does not resolve"):
            await socket.resolve("no.such.host.invalid", 4711)
        no_answer = pytest.raises(aiordma.ConnectTimeoutError, match=r"no answer within 0\.2 s")
        with silent_taker() as peer, no_answer:
            await socket.resolve(*peer, timeout=0.2)
        with pytest.raises(ValueError, match="private_data of 181 bytes"):
            await socket.resolve(ADDRESS, socket.port, private_data=bytes(181))
        assert (await socket.resolve(ADDRESS, socket.port)).qp_num == socket.qp_num


@one_loop
async def test_a_closed_socket_refuses_everything() -> None:
    async with sockets() as (one, other, peer):
        await one.send(b"before", peer)
        await one.aclose()
        for call in (
            lambda: one.send(b"", peer),
            one.receive,
            lambda: one.resolve(ADDRESS, other.port),
            lambda: one.join("239.1.2.3"),
        ):
            with pytest.raises(aiordma.ClosedError, match="this datagram socket is closed"):
                await call()
        with pytest.raises(aiordma.ClosedError):
            one.post_ud_send(b"", peer)
        await one.aclose()


# -- receives of one's own ------------------------------------------------------------------------


@pytest.mark.promise("A datagram arrives whole or not at all")
@one_loop
async def test_own_receives_get_the_payload_only() -> None:
    own = {"receive_buffers": 0, "options": aiordma.ConnectionOptions(max_recv_wr=2)}
    async with sockets(other=own) as (one, other, peer):
        head, rest = bytearray(3), other.register(bytearray(other.mtu))
        scattered = other.post_recvv([head, rest])
        buffer = bytearray(other.mtu)
        plain = other.post_recv(buffer)
        with pytest.raises(aiordma.QueueFullError):
            other.post_recv(buffer)
        await one.send(b"scattered", peer, immediate=5)
        arrival = await scattered
        assert (bytes(head), bytes(rest[:6].view)) == (b"sca", b"ttered")
        assert (arrival.length, arrival.immediate) == (9, 5)
        await other.send(b"heard", arrival.source)
        assert (await one.receive()).data == b"heard"
        await one.send(bytes([7]) * one.mtu, peer)
        assert (await plain).length == (await plain).length == one.mtu
        assert buffer == bytes([7]) * one.mtu


@one_loop
async def test_own_receives_that_nothing_meets_end_with_the_socket() -> None:
    socket = await aiordma.open_datagram(ADDRESS, receive_buffers=0)
    receive = socket.post_recv(bytearray(socket.mtu))
    await socket.aclose()
    with pytest.raises(aiordma.FlushedError):
        await receive


@one_loop
async def test_one_part_is_one_that_the_payload_goes_to() -> None:
    own = {"receive_buffers": 0, "options": aiordma.ConnectionOptions(max_recv_sge=1)}
    async with sockets(other=own) as (one, other, peer):
        buffer = bytearray(other.mtu)
        received = other.post_recv(buffer)
        await one.send(b"in one part", peer)
        assert (await received).length == 11
        assert buffer[:11] == b"in one part"


@pytest.mark.promise("A datagram arrives whole or not at all")
@one_loop
async def test_a_receive_that_will_not_do_is_refused() -> None:
    own = {"receive_buffers": 0, "options": aiordma.ConnectionOptions(max_recv_wr=1)}
    async with sockets(other=own) as (one, other, _):
        for socket, parts, text in (
            (one, [bytearray(one.mtu)], r"post_recvv\(\): this socket posts its own receives"),
            (
                other,
                [bytearray(100)],
                rf"post_recvv\(\): parts has 100 bytes: expected at least {other.mtu}",
            ),
            (other, [bytearray(other.mtu)] * 40, r"post_recvv\(\): 40 parts: expected at most"),
        ):
            with pytest.raises(ValueError, match=text):
                socket.post_recvv(parts)
        with pytest.raises(TypeError, match="read-only"):
            other.post_recv(bytes(other.mtu))
        with pytest.raises(ValueError, match="receive_buffers=0: post receives with post_recv"):
            await other.receive()
        other.post_recv(bytearray(other.mtu))  # the only slot is free


# -- handles, and the end -------------------------------------------------------------------------


@pytest.mark.promise("A buffer is held until its request completes")
@one_loop
async def test_evicted_handle_outlives_its_requests() -> None:
    async with sockets(one={"most_handles": 1}) as (one, other, peer):
        handles = endpoint_of(one).handles
        ways = [peer, one.peer(bytes(10) + b"\xff\xff\x0a\x01\x01\x02", 1), peer]
        requests = [one.post_ud_send(b"posted", way) for way in ways]
        # Nothing has completed, as far as is known here: none of them may be gone.
        assert len(handles) == 3
        for request in requests:
            await request
        assert [(await other.receive()).data for _ in range(2)] == [b"posted"] * 2
        await until(lambda: len(handles) == 1)


@one_loop
async def test_closing_ends_what_is_in_flight() -> None:
    async with sockets() as (one, _, peer):
        requests = [one.post_ud_send(b"posted", peer) for _ in range(10)]
        await one.aclose()
        assert all(request.done() for request in requests)
        errors = [request.exception() for request in requests]
        assert all(error is None or isinstance(error, aiordma.FlushedError) for error in errors)


def _drop(held: list[Any]) -> None:
    held.clear()
    gc.collect()


@one_loop
async def test_a_forgotten_socket_is_closed_with_a_warning() -> None:
    forgotten = [await aiordma.open_datagram(ADDRESS)]
    await forgotten[0].join("239.1.2.3")
    with pytest.warns(ResourceWarning, match="unclosed <Datagram"):
        _drop(forgotten)
    await until(lambda: not reactor_in_use())


@one_loop
async def test_a_removed_device_ends_the_socket() -> None:
    outcome = Outcome()
    async with await aiordma.open_datagram(ADDRESS) as socket:
        peer = socket.peer(socket.gid, socket.qp_num)
        await socket.send(b"arrived before", peer)
        async with anyio.create_task_group() as group:
            assert (await socket.receive()).data == b"arrived before"
            group.start_soon(outcome.of, socket.receive)
            await anyio.sleep(0.02)
            endpoint_of(socket).handle_event(removal(identifier_of(socket).key))
        assert isinstance(outcome.error, aiordma.DeviceRemovedError)
        with pytest.raises(aiordma.DeviceRemovedError):
            await socket.send(b"", peer)


def removal(key: int) -> Event:
    return Event(
        type=CmEventType.DEVICE_REMOVAL,
        status=0,
        key=key,
        new_key=0,
        private_data=b"",
        responder_resources=0,
        initiator_depth=0,
        retry_count=0,
        rnr_retry_count=0,
        qp_num=0,
    )


@one_loop
async def test_lookups_of_silent_peers_hold_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the send queue has slots. Their addresses are looked up by the kernel."""
    silent, answered = bytes(15) + b"\x01", threading.Event()

    def looked_up(domain: ProtectionDomain, vector: aiordma.verbs.AddressVector) -> AddressHandle:
        if vector.gid == silent:
            assert answered.wait(30)
            raise aiordma.VerbsCallError(errno.ETIMEDOUT, "ibv_create_ah")
        return AddressHandle(domain, vector)

    monkeypatch.setattr(address_handles, "AddressHandle", looked_up)
    async with (
        await aiordma.open_datagram(
            ADDRESS, options=aiordma.ConnectionOptions(max_send_wr=4)
        ) as socket,
        await aiordma.open_datagram(ADDRESS) as other,
        anyio.create_task_group() as group,
    ):
        monkeypatch.setattr(endpoint_of(socket).handles, "_blocks", True)  # also natively
        peer = await socket.resolve(ADDRESS, other.port)
        nobody = socket.peer(silent, 7)
        outcomes = [Outcome() for _ in range(4)]
        try:
            for outcome in outcomes:
                group.start_soon(outcome.of, lambda: socket.send(b"to nobody", nobody))
            await anyio.wait_all_tasks_blocked()
            with anyio.fail_after(20):
                await socket.send(b"to a peer", peer)
                assert (await other.receive()).data == b"to a peer"
        finally:
            answered.set()
        await until(lambda: all(outcome.error is not None for outcome in outcomes))
