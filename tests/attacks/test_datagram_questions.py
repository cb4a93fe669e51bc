"""Peers that ask for the queue pair of a datagram port, again and again, each time anew."""

import itertools
import socket
import threading
import time

import anyio

import aiordma
from aiordma.testing import software_objects
from tests.attacks.victim import HOST, Ready, Victim
from tests.device.wire import Question

ASKED = 20_000
MOST_IDENTIFIERS = 1_000
BURST, PAUSE = 32, 0.005
"""So many questions, then seconds without one. Without a pause the kernel's buffer of the socket is
always full, and loses the good client's questions before the device sees them."""


async def serve_datagrams(ready: Ready) -> None:
    """Answer every datagram with the number of the device's identifiers."""
    async with aiordma.open_datagram(HOST) as port:
        ready(port.port)
        async for message in port:
            count = software_objects()["identifiers"]
            await port.send(b"%d" % count, message.source)


class Questions:
    """Asks, from a thread, until the end of the block. No two questions are alike."""

    def __init__(self, port: int, source: str) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((source, 0))
        self._ends = self._socket.getsockname(), (HOST, port)
        self._is_over = False
        self.asked = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        for number in itertools.count(1):
            if self._is_over:
                return
            question = Question(self._ends, number, number).pack()
            self._socket.sendto(question, self._ends[1])
            self.asked += 1
            if not number % BURST:
                time.sleep(PAUSE)

    def __enter__(self) -> "Questions":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join(60)
        self._socket.close()


async def resolve_and_count(port: int) -> int:
    """Return how many identifiers the victim has, as a good client that asks for its port."""
    async with aiordma.open_datagram(HOST, device="software") as client:
        peer = await client.resolve(HOST, port, timeout=60)
        with anyio.fail_after(60):
            while True:  # a datagram may be lost
                await client.send(b"how many?", peer)
                with anyio.move_on_after(1):
                    return int(bytes((await client.receive()).data))


def test_questions_neither_pile_up_nor_lock_out() -> None:
    with Victim(serve_datagrams) as victim, Questions(victim.port, "127.0.0.2") as questions:
        while questions.asked < ASKED:
            assert anyio.run(resolve_and_count, victim.port) < MOST_IDENTIFIERS
