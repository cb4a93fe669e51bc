"""The software device's peers that vanish while nothing waits for their confirmation."""

import os
import socket
import stat
from contextlib import suppress
from typing import Any

import anyio
import pytest

from aiordma import ConnectionOptions
from tests.connections import connected
from tests.device.test_dead_peers import check_times, cut_loopback
from tests.network import run_alone

pytestmark = pytest.mark.slow


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
def test_silence_is_noticed_without_confirmations() -> None:
    # Without READs a request completes when TCP has it, as towards the kernel's siw.
    found = cut_loopback(initiator_depth=0)
    check_times(found, ConnectionOptions())
    for kind in ("SEND", "WRITE"):
        became, cause, _ = found.pop(kind)
        assert (became, cause) == ("done", "RetryExceededError")
    for kind in ("IDLE CLIENT", "IDLE SERVER"):
        became, text, _ = found.pop(kind)
        assert became == "RetryExceededError"
        assert "retry_count=6" in text
    assert {kind: became for kind, (became, _, _) in found.items()} == {
        "NO KEEPALIVE": "connected",
        "CLOSE": "closed",
    }


_VANISHES = """
import asyncio, aiordma
from tests.connections import connected
from tests.network import ip

async def read_on(connection, memory, into):
    while True:
        await connection.read(into, memory)

async def main():
    async with connected("127.0.0.1") as (client, server):
        memory = server.register(bytearray(1 << 22), aiordma.Access.REMOTE_READ).remote()
        into = client.register(bytearray(1 << 22))
        reading = asyncio.gather(*[read_on(client, memory, into) for _ in range(16)])
        receiving = asyncio.create_task(server.receive())
        await asyncio.sleep(0.2)
        await asyncio.to_thread(ip, "link set lo down")  # while there are READs to answer
        await asyncio.wait([reading, receiving], timeout=30)
        print(type(reading.exception()).__name__, type(receiving.exception()).__name__)

ip("link set lo up")
asyncio.run(main())
"""


@pytest.mark.promise("Messages arrive whole and in order")
def test_vanished_peer_is_not_end_of_stream() -> None:
    """This side has no request in flight: only TCP's bytes of its answers are unacknowledged."""
    assert run_alone(_VANISHES).split() == ["RetryExceededError", "RetryExceededError"]


def tcp_socket(port: int) -> socket.socket:
    """Return a second descriptor of this process's TCP socket that is connected to a port."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue  # of another descriptor, socket.socket() would leave the copy open
            found = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed by now
        with suppress(OSError):
            if found.family == socket.AF_INET and found.getpeername()[1] == port:
                return found
        found.close()
    raise LookupError(f"no socket is connected to port {port}")


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
@pytest.mark.anyio
@pytest.mark.parametrize(("ack_timeout", "interval"), [(0, 8), (16, 1)])
async def test_silence_is_watched_for_without_ack_timeout(ack_timeout: int, interval: int) -> None:
    """The device then asks an idle peer about 127 times within the 900 s that TCP allows."""
    client_options: Any = {
        "device": "software",
        "options": ConnectionOptions(ack_timeout=ack_timeout),
    }
    server_options: Any = {"device": "software", "receive_buffers": 0}
    async with connected("127.0.0.1", server=server_options, client=client_options) as (client, _):
        request = client.post_send(b"no receive is posted for this")
        request.add_done_callback(lambda ended: ended.exception())
        assert client.peer_address is not None
        with tcp_socket(client.peer_address[1]) as stream:
            with anyio.fail_after(10):
                while not stream.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
                    await anyio.sleep(0.05)
            asked = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
            assert asked == interval
