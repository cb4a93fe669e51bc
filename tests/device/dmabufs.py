"""Memory for the tests of dma-bufs: a file in memory, which the software device takes for one, or
the kernel's udmabuf of it."""

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from tests.devices import BUILT_IN, UDMABUF

CREATE = 0x40187542
"""UDMABUF_CREATE of linux/udmabuf.h: struct udmabuf_create {memfd, flags, offset, size}."""


class Pages:
    """Memory as the test accesses it, and the descriptor to register."""

    def __init__(self, memory: int, descriptor: int, length: int) -> None:
        self.bytes = mmap.mmap(memory, length)
        self.fd = descriptor
        self.length = length


@contextmanager
def pages(count: int, *, udmabuf: bool | None = None) -> Iterator[Pages]:
    """Yield pages that can be registered by their descriptor.

    Args:
        udmabuf: whether it is a dma-buf; None: for other devices than the software device, if the
            kernel makes some.
    """
    if udmabuf is None:
        udmabuf = not BUILT_IN and os.path.exists(UDMABUF)
    length = count * mmap.PAGESIZE
    memory = os.memfd_create("pages", os.MFD_ALLOW_SEALING)
    descriptor = memory
    try:
        os.ftruncate(memory, length)
        if udmabuf:
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            made = os.open(UDMABUF, os.O_RDWR)
            try:
                wanted = struct.pack("=IIQQ", memory, 0, 0, length)
                descriptor = int(fcntl.ioctl(made, CREATE, bytearray(wanted)))
            finally:
                os.close(made)
        yielded = Pages(memory, descriptor, length)
        yield yielded
        yielded.bytes.close()
    finally:
        for fd in {memory, descriptor}:
            os.close(fd)
