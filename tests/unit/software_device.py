"""The software device's objects as C has them, for the tests of its modules: raw pointers of its
table, so that what the Python objects would refuse reaches the device."""

import errno
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiordma.testing import software_objects
from aiordma.verbs.send_work import RECEIVE_REQUEST, SendWork, pack_chain
from tests.internals import ffi, lib, software

ERR = lib.IBV_QPS_ERR
PATIENCE = 20


@contextmanager
def nothing_left() -> Iterator[None]:
    """No objects and descriptors after the block that were not there before it. What an earlier
    test has left to the engine, such as a stream that ends, may go meanwhile."""
    with opened():
        pass  # the engine starts with the first one, and stays
    before, fds = software_objects(), set(os.listdir("/proc/self/fd"))
    yield
    left = {kind: count - before[kind] for kind, count in software_objects().items()}
    assert not any(count > 0 for count in left.values()), left
    assert not set(os.listdir("/proc/self/fd")) - fds


def memory(field: str) -> int:
    """Return a field of struct aiordma_software_memory."""
    raw = ffi.new("struct aiordma_software_memory *")
    lib.aiordma_software_memory(raw)
    return int(getattr(raw, field))


@contextmanager
def opened() -> Iterator[Any]:
    listed = software().get_device_list(ffi.NULL)
    context = software().open_device(listed[0])
    software().free_device_list(listed)
    assert context
    yield context
    assert software().close_device(context) == 0


@contextmanager
def opened_domain() -> Iterator[tuple[Any, Any]]:
    with opened() as context:
        domain = software().alloc_pd(context)
        assert domain
        yield context, domain
        assert software().dealloc_pd(domain) == 0


def failed(pointer: Any) -> int:
    """The errno of a constructor that has to have failed."""
    error = int(ffi.errno)
    assert not pointer
    return error


def minus_one(result: int) -> int:
    """The errno of a call that has to have returned -1."""
    error = int(ffi.errno)
    assert result == -1
    return error


def set_blocking(fd: int, blocking: bool) -> None:
    os.set_blocking(fd, blocking)


def make_queue(context: Any, entries: int = 16, channel: Any = ffi.NULL) -> Any:
    queue = software().create_cq(context, entries, ffi.NULL, channel, 0)
    assert queue
    return queue


def make_pair(domain: Any, send: Any, receive: Any, shared: Any = ffi.NULL, depth: int = 16) -> Any:
    """A queue pair in INIT, which takes receives and flushes them when it fails."""
    init = ffi.new("struct ibv_qp_init_attr *")
    init.send_cq, init.recv_cq, init.srq = send, receive, shared
    init.qp_type = lib.IBV_QPT_RC
    init.cap = [depth, depth, 1, 1, 0]
    pair = software().create_qp(domain, init)
    assert pair
    attr = ffi.new("struct ibv_qp_attr *")
    attr.qp_state, attr.port_num = lib.IBV_QPS_INIT, 1
    mask = lib.IBV_QP_STATE | lib.IBV_QP_PKEY_INDEX | lib.IBV_QP_PORT | lib.IBV_QP_ACCESS_FLAGS
    assert software().modify_qp(pair, attr, mask) == 0
    return pair


def fail(pair: Any) -> None:
    attr = ffi.new("struct ibv_qp_attr *")
    attr.qp_state = ERR
    assert software().modify_qp(pair, attr, lib.IBV_QP_STATE) == 0


def post_send(pair: Any, wr_id: int) -> int:
    """Post a message of no bytes; return the errno."""
    request = pack_chain([SendWork("SEND", lib.IBV_WR_SEND)], [wr_id], [0])
    posted = ffi.new("uint32_t *")
    return abs(int(lib.aiordma_post_send_chain(pair, request, 1, b"", 0, posted)))


def post_receive(pair: Any, wr_id: int) -> int:
    """Post a receive of no bytes; return the errno."""
    request = RECEIVE_REQUEST.pack(wr_id, 0, 0)
    posted = ffi.new("uint32_t *")
    return abs(int(lib.aiordma_post_recv_chain(pair, ffi.NULL, request, 1, b"", 0, posted)))


def post_receives(pair: Any, wr_ids: range) -> None:
    for wr_id in wr_ids:
        assert post_receive(pair, wr_id) == 0


def polled(queue: Any, most: int = 64) -> list[int]:
    """The wr_ids that a poll gives."""
    batch: Any = ffi.new("struct aiordma_completion[]", most)
    return [batch[i].wr_id for i in range(lib.aiordma_poll(queue, batch, most))]


def sge(address: int, length: int, lkey: int) -> bytes:
    return struct.pack("=QII", address, length, lkey)


def take_event(channel: Any) -> Any:
    """The queue of the next event; an errno if there is none."""
    queue, context = ffi.new("struct ibv_cq **"), ffi.new("void **")
    if software().get_cq_event(channel, queue, context):
        return ffi.errno
    return queue[0]


def take_async_event(context: Any) -> tuple[int, int]:
    """Type and element of the next event, acknowledged; (0, errno) if there is none."""
    copy = ffi.new("struct aiordma_async_event *")
    result = lib.aiordma_next_async_event(software().table, context, copy)
    if result != 1:
        return 0, -result or errno.EAGAIN
    return copy.event, copy.element


def address_of(pointer: Any) -> int:
    return int(ffi.cast("uintptr_t", pointer))


class Aside:
    """A call in another thread, which is expected to block there."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.result: object = None

        def run() -> None:
            self.result = call()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def blocks(self, seconds: float = 0.15) -> bool:
        self._thread.join(seconds)
        return self._thread.is_alive()

    def end(self) -> object:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "it never returned"
        return self.result
