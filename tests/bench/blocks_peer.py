"""Blocks by another library, over TCP: a program by itself, run by a Python that has it.

blocks_peer.py mooncake|nixl write|read SIZE COUNT SECONDS

It starts its peer, and prints as JSON the MB/s, and the processor seconds of both for a GiB.
"""

import json
import os
import random
import subprocess
import sys
import time
from typing import Any

library, operation, size_text, count_text, seconds = sys.argv[1:6]
os.environ["UCX_TLS"] = "tcp"

import numpy

SIZE, COUNT = int(size_text), int(count_text)
BYTES = SIZE * COUNT
HOST = "127.0.0.1"
memory = numpy.zeros(BYTES, numpy.uint8)
memory[:] = 1
address = memory.ctypes.data


class Mooncake:
    """mooncake-transfer-engine-non-cuda, with its transport "tcp"."""

    def __init__(self, name: str) -> None:
        from mooncake.engine import TransferEngine

        self.engine: Any = TransferEngine()
        assert not self.engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "")
        assert not self.engine.register_memory(address, BYTES)

    def describe(self) -> str:
        return f"{HOST}:{self.engine.get_rpc_port()}"

    def prepare(self, place: str, ours: list[int], theirs: list[int]) -> Any:
        move = getattr(self.engine, f"batch_transfer_sync_{operation}")
        return lambda: move(place, ours, theirs, [SIZE] * COUNT) == 0


class Nixl:
    """nixl, with UCX over TCP."""

    def __init__(self, name: str) -> None:
        from nixl._api import nixl_agent

        self.agent: Any = nixl_agent(name)
        self.agent.register_memory([(address, BYTES, 0, "")], "DRAM")

    def describe(self) -> str:
        return str(self.agent.get_agent_metadata().hex())

    def prepare(self, place: str, ours: list[int], theirs: list[int]) -> Any:
        name = self.agent.add_remote_agent(bytes.fromhex(place))
        both = [
            self.agent.get_xfer_descs([(each, SIZE, 0) for each in places], "DRAM")
            for places in (ours, theirs)
        ]
        handle = self.agent.initialize_xfer(operation.upper(), *both, name)

        def move() -> bool:
            state = self.agent.transfer(handle)
            while state == "PROC":
                state = self.agent.check_xfer_state(handle)
            return bool(state == "DONE")

        return move


def processor_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as found:
        user, system = found.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    kind: Any = {"mooncake": Mooncake, "nixl": Nixl}[library]
    if sys.argv[6:] == ["serve"]:
        ours = kind("server")
        print("PLACE", ours.describe(), address, flush=True)
        sys.stdin.read()  # until the other one has ended
        os._exit(0)
    words = [sys.executable, *sys.argv, "serve"]
    peer = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert peer.stdout is not None
    place, start = next(
        line.split()[1:] for line in iter(peer.stdout.readline, "") if line.startswith("PLACE")
    )
    order = list(range(COUNT))
    random.Random(1).shuffle(order)
    ours = kind("client")
    move = ours.prepare(
        place,
        [address + i * SIZE for i in range(COUNT)],
        [int(start) + i * SIZE for i in order],
    )
    assert move()
    moved, processor = 0, processor_seconds(peer.pid) + time.process_time()
    began = time.perf_counter()
    while time.perf_counter() - began < float(seconds):
        assert move()
        moved += BYTES
    took = time.perf_counter() - began
    processor = processor_seconds(peer.pid) + time.process_time() - processor
    print(json.dumps({"rate": moved / took / 1e6, "processor": processor / moved * 2**30}))
    peer.kill()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
