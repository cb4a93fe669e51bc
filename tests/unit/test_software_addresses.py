"""The list of the machine's addresses, which takes the longer to read the more there are: no peer
makes the software device read it, and what it could not read when it changed, it reads later."""

import errno
import subprocess
from pathlib import Path

import pytest

from tests.network import run_alone
from tests.unit.child import run_child
from tests.unit.sources import ROOT
from tests.unit.test_native import FLAGS, WITHOUT_RUNTIME

DROPPED = """
import asyncio, ctypes
import aiordma
from aiordma._datagram.peer import UDP_QKEY
from tests.device.wire import Packet, pack, plain_socket

lists = ctypes.CDLL(None).address_lists
QPN = 0x123456

async def main():
    # 127.0.0.9 reaches the socket, and is no address of the machine.
    targets = ("127.0.0.1", "127.0.0.9")
    async with await aiordma.open_datagram("127.0.0.1", device="software") as socket:
        with plain_socket("127.0.0.1") as sender:
            port, own = sender.getsockname()[1], socket.qp_num & 0xFFFF

            def send(text, target, qkey):
                ends = ("127.0.0.1", port), (target, own)
                sender.sendto(pack(Packet(text, socket.qp_num, QPN, qkey), ends), ends[1])

            before = lists()
            for _ in range(20):
                for target in targets:
                    send(b"without the qkey", target, UDP_QKEY ^ 1)
                send(b"to an address that no one has", targets[1], UDP_QKEY)
            send(b"right", targets[0], UDP_QKEY)
            assert (await asyncio.wait_for(socket.receive(), 30)).data == b"right"
            assert lists() == before, f"{lists() - before} lists for 61 datagrams"
    assert lists() > 0

asyncio.run(main())
"""

ADDED = """
import asyncio, ctypes, resource, subprocess
import aiordma
from aiordma._datagram.peer import UDP_QKEY
from tests.device.wire import Packet, pack, plain_socket
from tests.network import ip

lists = ctypes.CDLL(None).address_lists
OLD, NEW = "10.9.0.1", "10.9.0.2"
ip("link set lo up", f"address add {OLD}/32 dev lo")
add = f"read line; unset LD_PRELOAD; exec ip address add {NEW}/32 dev lo"
adder = subprocess.Popen(["sh", "-c", add], stdin=subprocess.PIPE)

async def main():
    async with await aiordma.open_datagram(OLD, device="software") as socket:
        with plain_socket(OLD) as sender:
            before, limits = lists(), resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
            adder.stdin.close()
            assert adder.wait(30) == 0
            while lists() == before:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # until the call has returned
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            ends = (OLD, sender.getsockname()[1]), (NEW, socket.qp_num & 0xFFFF)
            sender.sendto(pack(Packet(b"there", socket.qp_num, 0x123456, UDP_QKEY), ends), ends[1])
            assert (await asyncio.wait_for(socket.receive(), 10)).data == b"there"

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("library") / "addresses.so"
    command = ["gcc", *FLAGS, "-shared", "-fPIC", "tests/native/addresses.c", "-o", str(made)]
    subprocess.run([*command, "-ldl"], cwd=ROOT, env=WITHOUT_RUNTIME, check=True)
    return made


@pytest.mark.promise("A datagram arrives whole or not at all")
def test_no_datagram_makes_the_device_list_its_addresses(library: Path) -> None:
    run_child(DROPPED, LD_PRELOAD=str(library))


@pytest.mark.promise("A datagram arrives whole or not at all")
def test_address_that_was_added_in_a_shortage_is_learnt(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a file descriptor, the device cannot list the addresses when it is notified."""
    monkeypatch.setenv("LD_PRELOAD", str(library))
    run_alone(ADDED)


ROUTED = """
import asyncio, sys
import aiordma
from tests.connections import connected
from tests.network import ip

async def main():
    for one, other in (("127.0.0.2", "127.0.1.1"), ("10.99.1.1", "10.99.1.2")):
        for host in (one, "0.0.0.0"):
            async with aiordma.listen(host, 0) as listener:
                accepting = asyncio.create_task(listener.accept())
                async with aiordma.connect(one, listener.port) as client, await accepting as server:
                    await client.send(b"message")
                    print(await server.receive(), client.peer_address[0])
        async with aiordma.open_datagram(one) as here, aiordma.open_datagram(other) as there:
            destination = await here.resolve(other, there.port)
            await here.send(b"datagram", destination)
            message = await there.receive()
            await there.send(b"back", message.source)
            print(message.data, (await here.receive()).data)
    for absent in ("10.98.1.1", "127.255.255.255", "239.1.1.1"):
        try:
            await aiordma.open_datagram(absent)
        except aiordma.RdmaError as error:
            print(type(error).__name__)

ip("link set lo up", "route add local 10.99.0.0/16 dev lo")
asyncio.run(main())
"""


def test_every_local_address_works() -> None:
    """Those of 127.0.0.0/8 and of local routes, which no interface has."""
    expected = []
    for host in ("127.0.0.2", "10.99.1.1"):
        expected += [f"b'message' {host}"] * 2 + ["b'datagram' b'back'"]
    assert run_alone(ROUTED).splitlines() == expected + ["VerbsCallError"] * 3


NOT_LOCAL = """
import asyncio
from pathlib import Path
import aiordma
from tests.network import ethernet, ip

async def main():
    for host in ("10.7.0.2", "2001:db8::2"):
        for opening in (aiordma.open_datagram(host), aiordma.listen(host, 0)):
            try:
                await opening
            except aiordma.VerbsCallError as error:
                print(host, error.call)

for version in ("ipv4", "ipv6"):
    Path(f"/proc/sys/net/{version}/ip_nonlocal_bind").write_text("1")
ip("link set lo up")
away = ethernet()
ip(f"route add 10.7.0.0/16 dev {away}", f"route add 2001:db8::/32 dev {away}")
asyncio.run(main())
"""


def test_address_of_another_machine_is_none_of_this_one() -> None:
    """Also where the system lets sockets be bound to it: its peers get a CRC."""
    assert (
        run_alone(NOT_LOCAL).splitlines()
        == ["10.7.0.2 rdma_bind_addr"] * 2 + ["2001:db8::2 rdma_bind_addr"] * 2
    )


MANY = """
import asyncio
import aiordma
from tests.network import ip

async def main():
    for number in range(200):
        try:
            async with aiordma.open_datagram(f"127.1.{number // 100}.{number % 100 + 1}"):
                pass
        except aiordma.VerbsCallError as error:
            print(number, error.errno)
            break
    ip("address add 10.8.0.1/32 dev lo")
    async with aiordma.open_datagram("10.8.0.1") as socket:
        print(socket.device_name)

ip("link set lo up")
asyncio.run(main())
"""


def test_routed_addresses_leave_room_for_those_of_interfaces() -> None:
    number, code, name = run_alone(MANY).split()
    assert int(number) == 128
    assert int(code) == errno.ENOSPC
    assert name == "software"
