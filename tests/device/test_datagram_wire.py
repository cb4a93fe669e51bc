"""What the software device's datagrams look like on the wire, and what it makes of others'."""

import ipaddress
import os
import random
import socket as plain
from dataclasses import replace

import anyio
import pytest

import aiordma
from tests.device.players import one_loop
from tests.device.wire import UDP_SERVICES, Answer, Ends, Packet, Question, answer_of, pack, unpack
from tests.device.wire import plain_socket as plain_socket_at
from tests.internals import UDP_QKEY, endpoint_of
from tests.network import run_alone

pytestmark = [pytest.mark.anyio, pytest.mark.capability("plain_peers")]

HOSTS = ("127.0.0.1", "::1")
QPN = 0x123456


def gid_of(host: str) -> bytes:
    address = ipaddress.ip_address(host)
    return address.packed if address.version == 6 else bytes(10) + b"\xff\xff" + address.packed


def port_of(socket: aiordma.Datagram) -> int:
    return socket.qp_num & 0xFFFF


def ends_of(taker: plain.socket, socket: aiordma.Datagram, host: str) -> Ends:
    return (host, taker.getsockname()[1]), (host, port_of(socket))


# -- datagrams ------------------------------------------------------------------------------------


@one_loop
@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 1000, 4096])
async def test_what_is_sent_is_what_the_specification_says(host: str, length: int) -> None:
    data = os.urandom(length)
    with plain_socket_at(host) as taker:
        port = taker.getsockname()[1]
        async with await aiordma.open_datagram(host) as socket:
            way = socket.peer(gid_of(host), 0xAB0000 | port, 0x00112233)
            own = socket.peer(gid_of(host), 0xAB0000 | port, 0x80000000)
            await socket.send(data, way, immediate=0xFEEDBEEF, solicited=True)
            await socket.send(data, own)
            found = []
            for _ in range(2):
                packet, (_, source_port, *_) = taker.recvfrom(8192)
                assert source_port == port_of(socket)
                found.append(unpack(packet, ((host, source_port), (host, port))))
            first = found[0].psn
            assert found == [
                Packet(data, 0xAB0000 | port, socket.qp_num, 0x00112233, first, 0xFEEDBEEF, True),
                # The highest bit of a qkey asks for the queue pair's own.
                Packet(data, 0xAB0000 | port, socket.qp_num, UDP_QKEY, first + 1),
            ]


@one_loop
@pytest.mark.parametrize("host", HOSTS)
async def test_what_another_implementation_sends_is_received(host: str) -> None:
    with plain_socket_at(host) as sender:
        async with await aiordma.open_datagram(host) as socket:
            ends = ends_of(sender, socket, host)
            for length in (0, 1, 3, 4, 4096):
                data = os.urandom(length)
                packet = Packet(data, socket.qp_num, QPN, UDP_QKEY, immediate=length)
                sender.sendto(pack(packet, ends), ends[1])
                message = await socket.receive()
                assert (message.data, message.immediate) == (data, length)
                assert message.source.qp_num == QPN
                assert message.source.address.gid == gid_of(host)


def hostile(good: bytes, packet: Packet, ends: Ends) -> list[bytes]:
    """Packets that are all but right."""
    source, target = ends

    flipped = [bytes([*good[:i], good[i] ^ 1 << i % 8, *good[i + 1 :]]) for i in range(len(good))]
    del flipped[4]  # the marks of congestion, which routers set
    return [
        b"",
        *(good[:length] for length in range(len(good))),
        *flipped,
        good + b"\0",
        good + bytes(4),
        pack(replace(packet, qkey=UDP_QKEY + 1), ends),
        pack(replace(packet, to_qpn=packet.to_qpn ^ 0x10000), ends),
        pack(replace(packet, to_qpn=1), ends),
        pack(replace(packet, to_qpn=0xFFFFFF), ends),
        pack(replace(packet, payload=bytes(4097)), ends),
        pack(replace(packet, payload=bytes(20000)), ends),
        pack(packet, ((source[0], source[1] ^ 1), target)),
        pack(packet, (("127.0.0.9", source[1]), target)),
        pack(packet, (source, (target[0], target[1] ^ 1))),
    ]


@one_loop
async def test_what_is_wrong_is_dropped_and_the_socket_works_on() -> None:
    (host, _) = HOSTS
    random.seed(1)
    with plain_socket_at(host) as sender:
        async with await aiordma.open_datagram(host) as socket:
            ends = ends_of(sender, socket, host)
            packet = Packet(b"right", socket.qp_num, QPN, UDP_QKEY)
            right = pack(packet, ends)
            almost = replace(packet, payload=b"wrong")
            wrong = hostile(pack(almost, ends), almost, ends)
            wrong += [random.randbytes(random.randrange(200)) for _ in range(500)]
            for number, each in enumerate(wrong):
                sender.sendto(each, ends[1])
                if number % 50 == 0:  # what the system drops tests nothing
                    sender.sendto(right, ends[1])
                    assert (await socket.receive()).data == b"right"
            sender.sendto(right, ends[1])
            assert (await socket.receive()).data == b"right"


# -- questions ------------------------------------------------------------------------------------


def asked(taker: plain.socket, question: Question, ends: Ends | None = None) -> None:
    taker.sendto(question.pack(ends), question.ends[1])


async def heard(taker: plain.socket, ends: Ends) -> Answer:
    """The answer; TimeoutError without one."""
    packet = await anyio.to_thread.run_sync(taker.recv, 8192)
    return answer_of(packet, (ends[1], ends[0]))


@one_loop
@pytest.mark.parametrize("host", HOSTS)
async def test_a_question_is_answered_and_its_repetition_from_memory(host: str) -> None:
    with plain_socket_at(host) as asker:
        async with await aiordma.open_datagram(host, private_data=b"who I am") as socket:
            ends = (host, asker.getsockname()[1]), (host, socket.port)
            asked(asker, Question(ends, private_data=b"who asks"))
            answer = await heard(asker, ends)
            assert answer.status == 0
            assert (answer.qp_num, answer.qkey) == (socket.qp_num, UDP_QKEY)
            assert (answer.number, answer.transaction) == (0x11223344, 0x5566778899AABBCC)
            assert answer.service == UDP_SERVICES | socket.port
            assert answer.private_data == b"who I am".ljust(136, b"\0")
            # The program is not asked again: it would say something else by now.
            endpoint_of(socket)._private_data = b"somebody else"
            asked(asker, Question(ends, private_data=b"who asks"))
            again = await heard(asker, ends)
            assert again == answer
            asked(asker, Question(ends, number=5))
            other = await heard(asker, ends)
            assert other.private_data == b"somebody else".ljust(136, b"\0")


@one_loop
async def test_request_to_closed_port_gets_a_rejection() -> None:
    (host, _) = HOSTS
    with plain_socket_at(host) as asker:
        # A reply cannot carry a Q_Key of its own: the port replies as if it were closed.
        async with await aiordma.open_datagram(host, qkey=5) as socket:
            ends = (host, asker.getsockname()[1]), (host, socket.port)
            asked(asker, Question(ends))
            answer = await heard(asker, ends)
            assert (answer.status, answer.qp_num, answer.qkey) == (1, 0, 0)


@one_loop
@pytest.mark.parametrize(
    "wrong",
    ["class", "service", "port", "queue pair", "qkey", "source", "destination", "source port"],
)
async def test_malformed_request_gets_no_reply(wrong: str) -> None:
    (host, _) = HOSTS
    with plain_socket_at(host) as asker:
        async with await aiordma.open_datagram(host) as socket:
            port = asker.getsockname()[1]
            ends = (host, port), (host, socket.port)
            lies = {
                "class": Question(ends, class_version=3),
                "service": Question(ends, service=0x0000000001060000 | socket.port),
                "port": Question(ends, service=UDP_SERVICES | socket.port ^ 1),
                "queue pair": Question(ends, to_qpn=2),
                "qkey": Question(ends, qkey=UDP_QKEY),
                "source": Question((("127.0.0.9", port), ends[1])),
                "destination": Question((ends[0], ("127.0.0.9", socket.port))),
                "source port": Question(((host, port ^ 1), ends[1])),
            }
            asker.sendto(lies[wrong].pack(ends), ends[1])
            asked(asker, Question(ends, number=7))
            # Of two that are answered, the first is answered first.
            answer = await heard(asker, ends)
            assert (answer.number, answer.qp_num) == (7, socket.qp_num)


@one_loop
async def test_request_repeats_and_ignores_wrong_replies() -> None:
    """The peer is silent at first, and then answers wrongly before it answers."""
    (host, _) = HOSTS
    with plain_socket_at(host) as peer:
        async with await aiordma.open_datagram(host) as socket, anyio.create_task_group() as group:
            found: list[aiordma.DatagramPeer] = []

            async def resolve() -> None:
                found.append(await socket.resolve(host, peer.getsockname()[1], timeout=20))

            group.start_soon(resolve)
            first, where = await anyio.to_thread.run_sync(peer.recvfrom, 8192)
            second, _ = await anyio.to_thread.run_sync(peer.recvfrom, 8192)
            assert first == second
            ends: Ends = ((host, peer.getsockname()[1]), (host, where[1]))
            question = unpack(first, (ends[1], ends[0])).payload
            for spoil in (8, 24, 43, None):  # transaction, number, port; nothing
                mad = bytearray(256)
                mad[:16], mad[17], mad[24:28] = question[:16], 0x18, question[24:28]
                mad[32:35] = b"\x12\x34\x56"
                mad[36:44] = question[32:40]
                mad[44:48] = UDP_QKEY.to_bytes(4, "big")
                if spoil is not None:
                    mad[spoil] ^= 1
                    mad[34] = 0
                peer.sendto(pack(Packet(bytes(mad), 1, 1, 0x80010000), ends), ends[1])
        assert found[0].qp_num == 0x123456


# -- networks of small packets --------------------------------------------------------------------

FRAGMENTED = """
import asyncio
import aiordma
from tests.network import ip

async def main():
    for host in ("127.0.0.1", "::1"):
        async with await aiordma.open_datagram(host, device="software") as socket:
            peer = socket.peer(socket.gid, socket.qp_num)
            for length in (1400, 1500, 4096, 1400):
                await socket.send(bytes(length), peer)
                print(len((await asyncio.wait_for(socket.receive(), 30)).data))

ip("link set lo mtu 1500 up")
asyncio.run(main())
"""


def test_datagram_larger_than_the_mtu_arrives() -> None:
    """In a network namespace, whose loopback interface has the packets of an Ethernet."""
    assert run_alone(FRAGMENTED).split() == ["1400", "1500", "4096", "1400"] * 2


OTHER_ADDRESSES = """
import asyncio
import socket as plain

import aiordma
from aiordma._datagram.peer import UDP_QKEY
from tests.device.wire import Packet, pack, plain_socket
from tests.network import ethernet, ip

PATH_MTU_DISCOVER, ALWAYS = 10, 2  # of IPPROTO_IP, for what the ICRC takes for granted


def send(text, source, target, socket):
    with plain_socket(source) as sender:
        sender.setsockopt(plain.SOL_SOCKET, plain.SO_BROADCAST, 1)
        sender.setsockopt(plain.IPPROTO_IP, PATH_MTU_DISCOVER, ALWAYS)
        ends = (source, sender.getsockname()[1]), (target, socket.qp_num & 0xFFFF)
        sender.sendto(pack(Packet(text, socket.qp_num, 1, UDP_QKEY), ends), ends[1])


async def main():
    async with (
        await aiordma.open_datagram("127.0.0.1", device="software") as inside,
        await aiordma.open_datagram("10.9.9.1", device="software") as outside,
    ):
        for target in ("127.0.0.2", "127.255.255.255"):
            send(b"not for this socket", "127.0.0.1", target, inside)
        send(b"its own address", "127.0.0.1", "127.0.0.1", inside)
        send(b"another address", "10.9.9.1", "10.9.9.2", outside)
        for socket in (inside, outside):
            message = await asyncio.wait_for(socket.receive(), 30)
            await socket.send(b"answer", message.source)
            print(message.data.decode())
        ip("address add 10.9.9.3/24 dev ours")
        send(b"an address that came later", "10.9.9.1", "10.9.9.3", outside)
        print((await asyncio.wait_for(outside.receive(), 30)).data.decode())

ethernet()
ip("address add 10.9.9.1/24 dev ours", "address add 10.9.9.2/24 dev ours")
asyncio.run(main())
"""


def test_only_datagrams_to_addresses_of_the_machine_arrive() -> None:
    assert run_alone(OTHER_ADDRESSES).splitlines() == [
        "its own address",
        "another address",
        "an address that came later",
    ]
