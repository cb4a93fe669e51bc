"""The round trip with pyverbs: polling, or on asyncio by a reader of the completion channel.

A program by itself, run by a Python that has pyverbs; its two sides meet over TCP. As an
expert in pyverbs would write it: objects made once, receives posted ahead, one signaled send.

    pyverbs_peer.py serve|ask polling|asyncio DEVICE HOST PORT SIZE SECONDS

Each says "ready"; the one that asks measures for each line on its standard input.
"""

import asyncio
import json
import os
import socket
import sys
import time

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, WC, CompChannel
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

DEPTH = 16
GID_INDEX = 1  # rxe's for IPv4
PORT = 1
SEND, RECEIVE = 1, 2


def descriptors() -> set[str]:
    # The list has the directory's own, too, which is closed by now.
    return {fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}


class Side:
    """One queue pair, its queue and channel."""

    def __init__(self, device: str, size: int) -> None:
        self.context = Context(name=device)
        self.domain = PD(self.context)
        before = descriptors()
        self.channel = CompChannel(self.context)
        # pyverbs 44 has no CompChannel.fd; it is the one that is new.
        (self.fd,) = map(int, descriptors() - before)
        self.queue = CQ(self.context, 4 * DEPTH, None, self.channel, 0)
        capacity = QPCap(max_send_wr=DEPTH, max_recv_wr=DEPTH, max_send_sge=1, max_recv_sge=1)
        initial = QPInitAttr(
            qp_type=e.IBV_QPT_RC, scq=self.queue, rcq=self.queue, cap=capacity, sq_sig_all=1
        )
        self.queue_pair = QP(self.domain, initial)
        self.memory = MR(self.domain, 2 * size, e.IBV_ACCESS_LOCAL_WRITE)
        lkey, address = self.memory.lkey, self.memory.buf
        self.receive = RecvWR(RECEIVE, num_sge=1, sg=[SGE(address + size, size, lkey)])
        self.send = SendWR(
            SEND,
            opcode=e.IBV_WR_SEND,
            num_sge=1,
            sg=[SGE(address, size, lkey)],
            send_flags=e.IBV_SEND_SIGNALED,
        )

    def connect(self, peer: socket.socket) -> None:
        ours = {"qpn": self.queue_pair.qp_num, "gid": str(self.context.query_gid(PORT, GID_INDEX))}
        peer.sendall((json.dumps(ours) + "\n").encode())
        theirs = json.loads(peer.makefile().readline())
        attributes = QPAttr(port_num=PORT)
        attributes.dest_qp_num = theirs["qpn"]
        attributes.path_mtu = e.IBV_MTU_1024
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 1
        attributes.min_rnr_timer = 5
        attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = 16, 7, 7
        attributes.qp_access_flags = e.IBV_ACCESS_LOCAL_WRITE
        route = GlobalRoute(dgid=GID(theirs["gid"]), sgid_index=GID_INDEX)
        attributes.ah_attr = AHAttr(port_num=PORT, is_global=1, gr=route)
        self.queue_pair.to_rts(attributes)
        for _ in range(DEPTH):
            self.queue_pair.post_recv(self.receive)
        peer.sendall(b"!")
        assert peer.recv(1) == b"!"


def check(completions: list[WC]) -> None:
    for completion in completions:
        if completion.status != e.IBV_WC_SUCCESS:
            sys.exit(f"completion with status {completion.status}")


class Polling:
    def __init__(self, side: Side) -> None:
        self.queue, self.arrived, self.sent = side.queue, 0, 0

    def wait(self, what: str) -> None:
        """Poll until one more of that kind has completed."""
        while not getattr(self, what):
            count, completions = self.queue.poll(4)
            if count:
                check(completions)
                for completion in completions:
                    if completion.wr_id == RECEIVE:
                        self.arrived += 1
                    else:
                        self.sent += 1
        setattr(self, what, getattr(self, what) - 1)


def polling_client(side: Side, until: float, samples: list[float]) -> None:
    waiting, queue_pair = Polling(side), side.queue_pair
    now = 0.0
    while now < until:
        before = time.perf_counter()
        queue_pair.post_send(side.send)
        waiting.wait("arrived")
        waiting.wait("sent")
        now = time.perf_counter()
        samples.append(now - before)
        queue_pair.post_recv(side.receive)


def polling_server(side: Side) -> None:
    waiting, queue_pair = Polling(side), side.queue_pair
    while True:
        waiting.wait("arrived")
        queue_pair.post_send(side.send)
        queue_pair.post_recv(side.receive)
        waiting.wait("sent")


class Reader:
    """Futures for what completes, resolved by a reader of the channel's descriptor."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.loop = asyncio.get_running_loop()
        self.done: dict[int, asyncio.Queue[WC]] = {
            SEND: asyncio.Queue(),
            RECEIVE: asyncio.Queue(),
        }
        side.queue.req_notify()
        self.loop.add_reader(side.fd, self.readable)
        self.poll()

    def readable(self) -> None:
        queue = self.side.queue
        self.side.channel.get_cq_event(queue)
        queue.ack_events(1)
        queue.req_notify()
        self.poll()

    def poll(self) -> None:
        while True:
            count, completions = self.side.queue.poll(8)
            if not count:
                return
            check(completions)
            for completion in completions:
                self.done[completion.wr_id].put_nowait(completion)


async def asyncio_client(side: Side, until: float, samples: list[float]) -> None:
    reader, queue_pair = Reader(side), side.queue_pair
    arrived, sent = reader.done[RECEIVE].get, reader.done[SEND].get
    now = 0.0
    while now < until:
        before = time.perf_counter()
        queue_pair.post_send(side.send)
        await arrived()
        await sent()
        now = time.perf_counter()
        samples.append(now - before)
        queue_pair.post_recv(side.receive)


async def asyncio_server(side: Side) -> None:
    reader, queue_pair = Reader(side), side.queue_pair
    arrived, sent = reader.done[RECEIVE].get, reader.done[SEND].get
    while True:
        await arrived()
        queue_pair.post_send(side.send)
        queue_pair.post_recv(side.receive)
        await sent()


def main() -> None:
    role, way, device, host, port, size, seconds = sys.argv[1:]
    side = Side(device, int(size))
    if role == "serve":
        with socket.create_server((host, int(port))) as listener:
            print("ready", flush=True)
            peer, _ = listener.accept()
        side.connect(peer)
        # It ends when it is killed: its peer is done then.
        if way == "polling":
            polling_server(side)
        else:
            asyncio.run(asyncio_server(side))
    with socket.create_connection((host, int(port))) as peer:
        side.connect(peer)
        print("ready", flush=True)
        for _ in sys.stdin:
            measure(side, way, float(seconds))


def measure(side: Side, way: str, seconds: float) -> None:
    samples: list[float] = []
    until = time.perf_counter() + seconds
    if way == "polling":
        polling_client(side, until, samples)
    else:
        asyncio.run(asyncio_client(side, until, samples))
    samples = sorted(samples[len(samples) // 10 :])
    found = {
        "p50_us": samples[len(samples) // 2] * 1e6,
        "mean_us": sum(samples) / len(samples) * 1e6,
        "count": len(samples),
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
