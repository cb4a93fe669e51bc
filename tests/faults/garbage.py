"""A program: send garbage to a device of rxe while a connection of it echoes and a listener
accepts, and compare every byte.

The garbage is packets to UDP port 4791: for the queue pair of the connection, for those of other
connections, and for the connection manager. It prints, as JSON, what became
of the connection and of the listener under each kind of garbage, and how the process has grown when
it came once more.
"""

import json
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import anyio
from anyio.abc import TaskGroup

import aiordma
from tests.connections import connect_to
from tests.internals import QueuePairAttribute, close_unused_reactors, endpoint_of
from tests.kernel_objects import kernel_counts, kernel_taint
from tests.soak.process import resident_kib

from .roce import (
    ACKNOWLEDGE,
    FETCH_ADD,
    READ_REQUEST,
    SEND_ONLY,
    WRITE_ONLY,
    ConnectRequest,
    Sender,
    management,
    message_to_manager,
    transport,
)
from .transfers import REMOTE

SERVER, CLIENT, STRANGER = "10.2.2.2", "10.2.2.1", "10.2.2.9"
"""The stranger has the same wire, and no connection."""
SIZE = 3000
SECONDS = 60.0
"""The time for each echo and each connect: an emulated machine can be busy."""
AT_ONCE = 10
"""Packets between two turns of the event loop."""
FAR = 1 << 22
"""Of a sequence number that is wrong: how far it is behind or ahead."""
PAUSE = 0.02
"""Seconds between two echoes, and between two connects."""
ACCEPT_TIMEOUT = 1.0

Send: TypeAlias = Callable[[], object]
Wrong: TypeAlias = tuple[int, int, bytes]
Found: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Aim:
    """What the garbage is aimed at.

    Attributes:
        peer, stranger: who sends it: the address of the connection's peer, and another one.
        qp_num: the queue pair of the server's end.
        psn: the sequence number of the next packet that it expects.
        memory: that the peer may write to, and does.
        port: the listener's.
        chance: chooses what is random.
    """

    peer: Sender
    stranger: Sender
    qp_num: int
    psn: int
    memory: aiordma.RemoteMemory
    port: int
    chance: random.Random

    def requests(self, psn: int) -> Iterator[bytes]:
        """Requests of a reliable connection, without their CRC."""
        memory = self.memory.address.to_bytes(8, "big") + self.memory.rkey.to_bytes(4, "big")
        long = memory + (64).to_bytes(4, "big")
        yield transport(SEND_ONLY, self.qp_num, psn) + b"injected"
        yield transport(WRITE_ONLY, self.qp_num, psn) + long + b"injected" * 8
        yield transport(READ_REQUEST, self.qp_num, psn) + long
        yield transport(FETCH_ADD, self.qp_num, psn) + memory + (1).to_bytes(16, "big")

    def number(self) -> int:
        """Return a number for a connect request that no other has."""
        return self.chance.getrandbits(32)


# -- packets for the queue pair of a connection ---------------------------------------------------


def truncated(aim: Aim) -> Iterator[Send]:
    for request in aim.requests(aim.psn - FAR):
        whole = aim.peer.seal(request)
        for length in range(len(whole)):
            yield partial(aim.peer.send, whole[:length])
            yield partial(aim.peer.send, aim.peer.seal(request[:length]))


def wrong_checksum(aim: Aim) -> Iterator[Send]:
    """Packets that would have an effect, except for the CRC: the sequence numbers are right."""
    for psn in range(aim.psn, aim.psn + 50):
        for request in aim.requests(psn):
            whole = bytearray(aim.peer.seal(request))
            whole[-aim.chance.randrange(1, 5)] ^= 1 << aim.chance.randrange(8)
            yield partial(aim.peer.send, bytes(whole))


def flipped_bits(aim: Aim) -> Iterator[Send]:
    """One bit of each byte."""
    for request in aim.requests(aim.psn - FAR):
        whole = aim.peer.seal(request)
        for at in range(len(whole)):
            flipped = bytearray(whole)
            flipped[at] ^= 1 << aim.chance.randrange(8)
            yield partial(aim.peer.send, bytes(flipped))


def random_bytes(aim: Aim) -> Iterator[Send]:
    for _ in range(100):
        data = aim.chance.randbytes(aim.chance.randrange(300))
        yield partial(aim.peer.send, data)
        yield partial(aim.peer.send, aim.peer.seal(data))


def too_long(aim: Aim) -> Iterator[Send]:
    """More than the path MTU, which is 1,024 on this wire."""
    for request in aim.requests(aim.psn - FAR):
        for length in range(1025, 1400, 50):
            yield partial(aim.peer.send, aim.peer.seal(request + bytes(length)))


def wrong_opcode(aim: Aim) -> Iterator[Send]:
    for opcode in range(256):
        for length in (0, 28):
            header = transport(opcode, aim.qp_num, aim.psn - FAR)
            yield partial(aim.peer.send, aim.peer.seal(header + aim.chance.randbytes(length)))


def wrong_queue_pair(aim: Aim) -> Iterator[Send]:
    numbers = [0, 2, 0xFFFFFF, *(aim.qp_num ^ 1 << bit for bit in range(24))]
    numbers += [aim.chance.getrandbits(24) for _ in range(20)]
    for qp_num in numbers:
        if qp_num in (1, aim.qp_num):
            continue
        for request in replace(aim, qp_num=qp_num).requests(aim.psn):
            yield partial(aim.peer.send, aim.peer.seal(request))


def wrong_sequence_number(aim: Aim) -> Iterator[Send]:
    for distance in range(20):
        for psn in (aim.psn - FAR + distance, aim.psn + FAR + distance):
            for request in aim.requests(psn):
                yield partial(aim.peer.send, aim.peer.seal(request))


def stranger(aim: Aim) -> Iterator[Send]:
    """What the peer itself could send at this moment, from another address."""
    for distance in range(-10, 20):
        psn = aim.psn + distance
        for request in aim.requests(psn):
            yield partial(aim.stranger.send, aim.stranger.seal(request))
        for syndrome in (0x1F, 0x20, 0x60, 0x61, 0x62, 0x63):  # ACK, RNR NAK, NAKs
            answer = transport(ACKNOWLEDGE, aim.qp_num, psn) + bytes([syndrome, 0, 0, 0])
            yield partial(aim.stranger.send, aim.stranger.seal(answer))


# -- messages to the connection manager -----------------------------------------------------------


def to_manager(aim: Aim, mad: bytes, **wrong: int) -> Send:
    return partial(aim.peer.send, aim.peer.seal(message_to_manager(mad, **wrong)))


def random_messages(aim: Aim) -> Iterator[Send]:
    for _ in range(60):
        yield to_manager(aim, aim.chance.randbytes(256))
    for attribute in range(0x0F, 0x1C):  # each message of the connection manager
        for _ in range(3):
            yield to_manager(aim, management(aim.chance.randbytes(232), attribute))


def wrong_class(aim: Aim) -> Iterator[Send]:
    good = ConnectRequest(aim.peer, aim.port, aim.number()).pack()[24:]
    for kind in (*range(1, 0x20), *range(0x80, 0x86), 0xFF):
        if kind != 7:
            yield to_manager(aim, management(good, kind=kind))
    for version in (0, 1, 3, 255):
        yield to_manager(aim, management(good, version=version))
        yield to_manager(aim, management(good, base=version ^ 1))
    for method in (*range(0x16), *range(0x80, 0x96), 0xFF):
        if method != 3:
            yield to_manager(aim, management(good, method=method))
    for attribute in (0, 1, 0xF, 0x1C, 0x100, 0xFFFF):
        yield to_manager(aim, management(good, attribute))
    for wrong in ({"qkey": 0}, {"qkey": 0x80010001}, {"qp_num": 0}, {"qp_num": 2}):
        yield to_manager(aim, management(good), **wrong)


def truncated_messages(aim: Aim) -> Iterator[Send]:
    for length in range(0, 256, 4):
        yield to_manager(aim, ConnectRequest(aim.peer, aim.port, aim.number()).pack()[:length])


def absurd_requests(aim: Aim) -> Iterator[Send]:
    """Requests for a connection, of which one field each has a value that no peer sends."""
    gid = bytes(10) + b"\xff\xff"
    absurd: dict[str, list[Any]] = {
        "qp_num": [0, 1, 0xFFFFFF],
        "qkey": [0xFFFFFFFF],
        "responder_resources": [0, 255],
        "initiator_depth": [0, 255],
        "remote_timeout": [0, 31],
        "local_timeout": [0, 31],
        "service_type": [1, 2, 3],
        "flow_control": [1],
        "psn": [0, 0xFFFFFF],
        "retry_count": [0, 7],
        "pkey": [0, 0x7FFF],
        "mtu": [0, 6, 15],
        "rnr_retry_count": [0],
        "cm_retries": [0],
        "shared_receive": [1],
        "service": [0, 2**64 - 1, 0x0000000001110000 | aim.port],
        "gids": [(bytes(16), bytes(16)), (gid + b"\xe0\0\0\1", gid + b"\x7f\0\0\1")],
        "hop_limit": [0, 255],
        "cma_version": [1, 255],
        "ip_version": [0, 5, 6, 15],
        "source_port": [0],
        "source": [bytes(4), b"\xff" * 4, b"\xe0\0\0\1", b"\x7f\0\0\1", b"\x0a\2\2\2"],
        "destination": [bytes(4), b"\xff" * 4, b"\xe0\0\0\1", b"\x0a\2\2\1"],
        "private_data": [b"\xff" * 56, aim.chance.randbytes(56)],
    }
    for name, values in absurd.items():
        for value in values:
            changed: dict[str, Any] = {name: value}
            yield to_manager(
                aim, ConnectRequest(aim.peer, aim.port, aim.number(), **changed).pack()
            )


def flipped_requests(aim: Aim) -> Iterator[Send]:
    for _ in range(60):
        mad = bytearray(ConnectRequest(aim.peer, aim.port, aim.number()).pack())
        for _ in range(aim.chance.randrange(1, 9)):
            mad[aim.chance.randrange(24, 256)] ^= 1 << aim.chance.randrange(8)
        yield to_manager(aim, bytes(mad))


# -- a hostile peer -------------------------------------------------------------------------------


def in_sequence(chance: random.Random, memory: aiordma.RemoteMemory) -> Iterator[Wrong]:
    """What is behind the transport header of requests that are in sequence, and wrong: the opcode,
    the padding, and the rest."""
    for opcode in range(0x20):  # every opcode of reliable connections, and those that are unused
        yield opcode, 0, chance.randbytes(28)
    where = memory.address.to_bytes(8, "big")
    key, wrong_key = (number.to_bytes(4, "big") for number in (memory.rkey, memory.rkey ^ 0x100))
    for length in (65, 0xFFFFFFFF):  # 0 with a payload stops the kernel: docs/devices.md
        header = where + key + length.to_bytes(4, "big")
        yield WRITE_ONLY, 0, header + bytes(64)
        yield WRITE_ONLY, 3, header
        yield READ_REQUEST, 0, header
    yield READ_REQUEST, 0, where + wrong_key + (64).to_bytes(4, "big")
    yield FETCH_ADD, 0, (memory.address + 1).to_bytes(8, "big") + key + bytes(16)
    for syndrome in (0x00, 0x20, 0x60, 0x63, 0xFF):
        yield ACKNOWLEDGE, 0, bytes([syndrome, 0, 0, 1])
    yield SEND_ONLY, 3, b""
    yield SEND_ONLY, 0, bytes(1400)


Kind: TypeAlias = Callable[[Aim], Iterator[Send]]

PACKETS: tuple[Kind, ...] = (
    truncated,
    wrong_checksum,
    flipped_bits,
    random_bytes,
    too_long,
    wrong_opcode,
    wrong_queue_pair,
    wrong_sequence_number,
    stranger,
)
MESSAGES: tuple[Kind, ...] = (
    random_messages,
    wrong_class,
    truncated_messages,
    absurd_requests,
    flipped_requests,
)

COUNTERS = ("duplicate_request", "out_of_seq_request")
"""Of rxe: what it counts of a packet that is right, except for its sequence number."""


class Victim:
    """A connection that echoes, and a listener that accepts.

    Args:
        driver: that of the devices, rxe.
        listener: it serves, by echoing.
        quiet: a listener without a task.
        near, far: both ends of the connection; `far` is the server's.
    """

    def __init__(
        self,
        driver: str,
        listener: aiordma.Listener,
        quiet: aiordma.Listener,
        near: aiordma.Connection,
        far: aiordma.Connection,
    ) -> None:
        self.driver = driver
        self.listener, self.quiet = listener, quiet
        self.near, self.far = near, far
        self.region = far.register(bytearray(SIZE), REMOTE)
        self.echoes = self.accepted = 0

    def aim(self, stack: ExitStack, chance: random.Random) -> Aim:
        """Return what garbage is to be aimed at now."""
        peer, other = (Sender(host, SERVER, "veth1", "veth2") for host in (CLIENT, STRANGER))
        for sender in (peer, other):
            stack.callback(sender.close)
        qp_num, psn = _expected(self.far)
        remote = self.region.remote()
        return Aim(peer, other, qp_num, psn, remote, self.listener.port, chance)

    async def echo(self) -> None:
        """Send a message, receive it at the other end, and send it back; write, and read."""
        data = random.Random(self.echoes).randbytes(SIZE - self.echoes % 1000)
        sent = self.near.post_send(data)
        _same(await self.far.receive(), data)
        await sent
        back = self.far.post_send(data)
        _same(await self.near.receive(), data)
        await back
        target = self.region.remote()[: len(data)]
        await self.near.write(data, target)
        _same(await self.near.read_bytes(target), data)
        self.echoes += 1

    async def accept(self) -> None:
        """Connect once more, and echo."""
        async with await aiordma.connect(
            SERVER, self.listener.port, source=(CLIENT, 0), timeout=SECONDS
        ) as client:
            data = b"accepted %d" % self.accepted
            await client.send(data)
            _same(await client.receive(), data)
        self.accepted += 1


def _same(found: bytes, expected: bytes) -> None:
    if found != expected:
        raise ValueError("the bytes differ")


async def _send_all(kind: Kind, victim: Victim, aim: Aim) -> int:
    """Send one kind of garbage; return how much it was."""
    sent = 0
    for send in kind(aim):
        send()
        sent += 1
        if sent % AT_ONCE == 0:
            await anyio.sleep(0.001)
    return sent


async def hostile_peers(victim: Victim, aim: Aim) -> int:
    """Open connections, and send on each one request that is in sequence and wrong."""
    sent = 0
    for opcode, padding, rest in in_sequence(aim.chance, aim.memory):
        near, far = await connect_to(victim.quiet, SERVER, source=(CLIENT, 0))
        async with near, far:
            await near.send(b"first")
            await far.receive()
            qp_num, psn = _expected(far)
            header = transport(opcode, qp_num, psn, padding=padding)
            aim.peer.send(aim.peer.seal(header + rest))
            sent += 1
            await anyio.sleep(PAUSE)
    return sent


Attack: TypeAlias = Callable[[Victim, Aim], Awaitable[int]]


def _attacks(*kinds: Kind) -> dict[str, Attack]:
    return {kind.__name__: partial(_send_all, kind) for kind in kinds}


GROUPS: dict[str, dict[str, Attack]] = {
    "packets": _attacks(*PACKETS),
    "messages": _attacks(*MESSAGES),
    "peers": {hostile_peers.__name__: hostile_peers},
}
REACHES_PROGRAMS = "messages"
"""These come twice, which shows whether the process grows."""


async def _under(attack: Attack, victim: Victim, chance: random.Random) -> Found:
    """Return what becomes of the victim during an attack."""
    victim.echoes = victim.accepted = 0
    over = anyio.Event()

    async def until_over(step: Callable[[], Awaitable[None]]) -> None:
        while True:
            was_over = over.is_set()
            with anyio.fail_after(SECONDS):
                await step()
            if was_over:
                return
            await anyio.sleep(PAUSE)

    with ExitStack() as stack:
        aim = victim.aim(stack, chance)
        before = _counters(victim.driver)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(until_over, victim.echo)
                group.start_soon(until_over, victim.accept)
                sent = await attack(victim, aim)
                over.set()
        except Exception as error:
            return {"error": _text(error), "echoes": victim.echoes, "accepted": victim.accepted}
        after = _counters(victim.driver)
    found: Found = {"sent": sent, "echoes": victim.echoes, "accepted": victim.accepted}
    return found | {name: after[name] - before[name] for name in before}


def _expected(connection: aiordma.Connection) -> tuple[int, int]:
    """Return the number of its queue pair, and the sequence number that it expects next."""
    pair = endpoint_of(connection).pair.raw
    assert pair is not None
    return pair.qp_num, int(pair.query(QueuePairAttribute.RQ_PSN).rq_psn)


def _text(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return repr(error)


def _counters(driver: str) -> dict[str, int]:
    folder = Path(f"/sys/class/infiniband/{driver}2/ports/1/hw_counters")
    return {name: int((folder / name).read_text()) for name in COUNTERS}


async def _request_arrives(victim: Victim) -> bytes:
    """Send a request for a connection that is right, and return its private data from a listener:
    what is sent is understood."""
    async with await aiordma.listen(SERVER, 0) as listener:
        with ExitStack() as stack:
            aim = replace(victim.aim(stack, random.Random()), port=listener.port)
            request = ConnectRequest(
                aim.peer, aim.port, aim.number(), private_data=b"a right request"
            )
            to_manager(aim, request.pack())()
            with anyio.fail_after(SECONDS):
                arrived = await listener.request()
            data = arrived.private_data.rstrip(b"\0")
            await arrived.reject()
            return data


@asynccontextmanager
async def _victim(driver: str, group: TaskGroup) -> AsyncIterator[Victim]:
    async def echo(connection: aiordma.Connection) -> None:
        async for message in connection:
            await connection.send(message)

    async with (
        aiordma.listen(SERVER, 0) as quiet,
        aiordma.listen(SERVER, 0, accept_timeout=ACCEPT_TIMEOUT) as listener,
    ):
        near, far = await connect_to(quiet, SERVER, source=(CLIENT, 0))
        async with near, far:
            await near.send(b"first")  # as iWARP wants it
            await far.receive()
            group.start_soon(listener.serve, echo)
            yield Victim(driver, listener, quiet, near, far)


async def _run(driver: str, name: str) -> Found:
    taint, objects = kernel_taint(), kernel_counts(f"{driver}2")
    found: Found = {}
    async with anyio.create_task_group() as group, _victim(driver, group) as victim:
        found["a right request"] = (await _request_arrives(victim)).decode()
        found["attacks"] = await _attack(victim, name)
        if name == REACHES_PROGRAMS:
            # What leaks grows each time; the heap grows by pages now and then.
            grown = []
            for _ in range(2):
                before = resident_kib()
                found["again"] = await _attack(victim, name)
                grown.append(resident_kib() - before)
            found["grown_kib"] = min(grown)
        group.cancel_scope.cancel()
    await close_unused_reactors()
    found["objects"] = {
        kind: count - objects[kind]
        for kind, count in kernel_counts(f"{driver}2").items()
        if kind != "ctx"  # librdmacm keeps the device open
    }
    found["taint"] = kernel_taint() - taint
    return found


async def _attack(victim: Victim, name: str) -> Found:
    chance = random.Random(1)
    return {each: await _under(attack, victim, chance) for each, attack in GROUPS[name].items()}


def main(driver: str, group: str) -> None:
    """Run the attacks of a group, for the devices of a driver on a veth pair."""
    print(json.dumps(anyio.run(partial(_run, driver, group))))


if __name__ == "__main__":
    main(*sys.argv[1:])
