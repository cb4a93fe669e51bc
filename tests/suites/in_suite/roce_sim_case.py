"""One of roce-sim's scenarios, with software_roce in the place of its side in Rust on rxe:
roce_sim_case.py SCENARIO OUR_ADDRESS ITS_ADDRESS ITS_PORT, in the folder of its sources.

The other side, which makes packets and damages them, is roce-sim's own. Its manager runs a
scenario's commands; it logs what failed as an error.
"""

import logging
import socket
import sys
import time
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, "")

import grpc
from case import base
from config import Side
from proto import side_pb2_grpc

from aiordma import Access, MemoryRegion, RemoteMemory
from aiordma.verbs import (
    AddressVector,
    Capacity,
    CompletionQueue,
    Device,
    Mtu,
    QueuePair,
    QueuePairState,
    SendFlag,
    WorkCompletion,
    WorkRequestOpcode,
)

SECONDS = 15


class OurSide:
    """What roce-sim's manager calls on its first side; requests have the fields of its messages."""

    def __init__(self, address: str) -> None:
        gid = socket.inet_pton(socket.AF_INET6, f"::ffff:{address}")
        self.context = Device("software_roce").open()
        self.gid_index = [each.gid for each in self.context.gid_table()].index(gid)
        self.gid = gid
        self.done: list[WorkCompletion] = []

    def OpenDevice(self, request: Any) -> Any:
        self.options = request
        self.domain = self.context.alloc_pd()
        self.queue = CompletionQueue(self.context, max(request.cq_size, 1))
        capacity = Capacity(16, 16)
        self.pair = QueuePair.create(self.domain, self.queue, self.queue, capacity=capacity)
        return SimpleNamespace(
            dev_name="software_roce", qp_num=self.pair.qp_num, lid=0, gid_raw=self.gid
        )

    def CreateMr(self, request: Any) -> Any:
        self.memory = bytearray(request.len)
        self.region = MemoryRegion(self.domain, self.memory, Access(request.flag))
        remote = self.region.remote()
        return SimpleNamespace(
            addr=remote.address, len=request.len, rkey=remote.rkey, lkey=self.region.lkey, mr_id=0
        )

    def ConnectQp(self, request: Any) -> Any:
        options = self.options
        access = Access(options.access_flag)
        self.pair.modify(QueuePairState.INIT, pkey_index=0, port=1, access=access)
        self.pair.modify(
            QueuePairState.RTR,
            address=AddressVector(gid=request.remote_gid, gid_index=self.gid_index),
            path_mtu=Mtu[f"MTU_{options.mtu}"],
            dest_qp_num=request.remote_qp_num,
            rq_psn=options.rq_start_psn,
            max_dest_rd_atomic=options.max_dest_rd_atomic,
            min_rnr_timer=options.min_rnr_timer,
        )
        self.pair.modify(
            QueuePairState.RTS,
            sq_psn=options.sq_start_psn,
            timeout=options.timeout,
            retry_cnt=options.retry,
            rnr_retry=options.rnr_retry,
            max_rd_atomic=options.max_rd_atomic,
        )

    def completion(self, is_receive: bool) -> WorkCompletion:
        """Return the next completion of a request, or of a receive."""
        patience = time.monotonic() + SECONDS
        while time.monotonic() < patience:
            self.done += self.queue.poll()
            for each in self.done:
                if (each.wr_id == 0) == is_receive:
                    self.done.remove(each)
                    return each
            time.sleep(0.001)
        raise TimeoutError("no completion")

    def request(self, opcode: str, request: Any, length: int, **operands: int) -> None:
        remote = None
        if "SEND" not in opcode:
            remote = RemoteMemory(request.remote_addr, length, request.remote_key)
        offset = request.addr - self.region.remote().address
        self.pair.post_send(
            1,
            [self.region[offset : offset + length]],
            opcode=WorkRequestOpcode[opcode],
            flags=SendFlag.SIGNALED,
            remote=remote,
            **operands,
        )
        done = self.completion(False)
        if not done.ok and not request.allow_err:
            raise RuntimeError(f"{opcode}: {done}")

    def RemoteRead(self, request: Any) -> Any:
        self.request("RDMA_READ", request, request.len)

    def RemoteWrite(self, request: Any) -> Any:
        self.request("RDMA_WRITE", request, request.len)

    def RemoteWriteImm(self, request: Any) -> Any:
        immediate = socket.htonl(request.imm_data)  # as Rust's library posts it
        self.request("RDMA_WRITE_WITH_IMM", request, request.len, immediate=immediate)

    def RemoteSend(self, request: Any) -> Any:
        self.request("SEND", request, request.len)

    def RemoteAtomicCas(self, request: Any) -> Any:
        operands = {"compare_add": request.old_value, "swap": request.new_value}
        self.request("ATOMIC_CMP_AND_SWP", request, 8, **operands)

    def LocalRecv(self, request: Any) -> Any:
        offset = request.addr - self.region.remote().address
        self.pair.post_recv(0, [self.region[offset : offset + request.len]])

    def LocalWrite(self, request: Any) -> Any:
        self.memory[request.offset : request.offset + request.len] = request.content

    def LocalCheckMem(self, request: Any) -> Any:
        pairs = zip(request.offset, request.expected, strict=True)
        same = all(self.memory[at : at + len(data)] == data for at, data in pairs)
        return SimpleNamespace(same=same)

    def PollComplete(self, request: Any) -> Any:
        done = self.completion(True)
        wanted = {"len": done.byte_len, "opcode": done.opcode, "status": done.status}
        same = all(
            getattr(request, name) == value
            for name, value in wanted.items()
            if request.HasField(name)
        )
        return SimpleNamespace(same=same)

    def CheckQpStatus(self, request: Any) -> Any:
        return SimpleNamespace(same=self.pair.state == request.status)

    def NotifyCq(self, request: Any) -> Any:
        self.queue.request_notification(solicited_only=bool(request.solicited_only))


class Errors(logging.Handler):
    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


def main() -> int:
    scenario, ours, theirs, port = sys.argv[1:]
    logging.basicConfig(level=logging.INFO)
    errors = Errors(logging.ERROR)
    logging.getLogger().addHandler(errors)
    channel = grpc.insecure_channel(f"{theirs}:{port}")
    grpc.channel_ready_future(channel).result(SECONDS)
    sides = (Side({"ib_port": 1, "gid_idx": 0}), Side({"ib_port": 1, "gid_idx": 0}))
    base.TestCase(OurSide(ours), side_pb2_grpc.SideStub(channel), *sides).run(scenario)
    return errors.count > 0


if __name__ == "__main__":
    sys.exit(main())
