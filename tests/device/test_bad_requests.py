"""Requests of reliable connections that no device sends: they end the connection, at both ends."""

import socket
import struct
from collections.abc import Iterator

import pytest

from aiordma import Access, MemoryRegion
from aiordma.verbs import AddressVector, Mtu, QueuePairState
from tests.device.by_hand import GID_INDEX, REMOTE, End, open_end
from tests.device.players import ROCE_PORT
from tests.device.wire import icrc, plain_socket, transport
from tests.devices import DeviceUnderTest
from tests.waiting import wait_until

pytestmark = [pytest.mark.capability("plain_peers"), pytest.mark.capability("queue pairs by hand")]

PEER, TARGET = "127.0.0.9", "127.0.0.1"
WRITE_FIRST, READ_REQUEST = 0x06, 0x0C


@pytest.fixture
def end(device: DeviceUnderTest) -> Iterator[End]:
    """A queue pair that is connected to a peer whose packets the test makes."""
    with open_end(device) as one:
        one.pair.modify(QueuePairState.INIT, pkey_index=0, port=1, access=REMOTE)
        one.pair.modify(
            QueuePairState.RTR,
            address=AddressVector(
                gid=socket.inet_pton(socket.AF_INET6, f"::ffff:{PEER}"), gid_index=GID_INDEX
            ),
            path_mtu=Mtu.MTU_256,
            dest_qp_num=9,
            rq_psn=0,
            max_dest_rd_atomic=1,
            min_rnr_timer=5,
        )
        yield one


def send(*packets: bytes) -> None:
    with plain_socket(PEER) as peer:
        ends = (peer.getsockname(), (TARGET, ROCE_PORT))
        for packet in packets:
            peer.sendto(packet + icrc(packet, ends), ends[1])


def read_request(end: End, psn: int, payload: bytes) -> bytes:
    return transport(READ_REQUEST, end.pair.qp_num, psn) + struct.pack(">QII", 0, 0, 0) + payload


def test_a_read_in_a_write_that_has_not_ended_is_invalid(end: End) -> None:
    with MemoryRegion(end.domain, bytearray(512), Access.REMOTE_WRITE) as region:
        target = struct.pack(">QII", region.address, region.rkey, 512)
        first = transport(WRITE_FIRST, end.pair.qp_num, 0) + target + bytes(256)
        send(first, read_request(end, 1, b""))
        wait_until(lambda: end.pair.state == QueuePairState.ERR)


def test_a_read_request_that_carries_data_is_invalid(end: End) -> None:
    send(read_request(end, 0, bytes(240)))
    wait_until(lambda: end.pair.state == QueuePairState.ERR)
