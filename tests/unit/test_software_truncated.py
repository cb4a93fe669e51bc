"""Memory that goes under a registered region, as the pages of a file that is truncated: the access
to it fails, and the process lives."""

import subprocess
import sys

import pytest

from tests.unit.sources import ROOT

pytestmark = pytest.mark.slow

# Each case is a process of its own, since what it shows is that the process does not die.
BEGIN = """
import ctypes, mmap, os, tempfile
from contextlib import ExitStack
from aiordma import Access, RemoteMemory
from aiordma.verbs import CmEventType, WorkCompletionStatus, WorkRequestOpcode
from tests.unit.mpa_peer import expect
from tests.unit.stream_peer import *

PAGE, MAP_FIXED = mmap.PAGESIZE, 0x10
ALL = (Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ | Access.REMOTE_ATOMIC)
WRITE, ATOMIC_REQUEST = 0, 10
SUCCESS, BAD = WorkCompletionStatus.SUCCESS, WorkCompletionStatus.LOC_PROT_ERR
FLUSHED = WorkCompletionStatus.WR_FLUSH_ERR

class Mapped:
    '''A region of two pages of a file, of which `truncate` leaves the first.'''

    def __init__(self, wire):
        self.file = stack.enter_context(tempfile.TemporaryFile())
        self.file.truncate(2 * PAGE)
        self.map = mmap.mmap(self.file.fileno(), 2 * PAGE, FLAGS)
        self.region = wire.region(self.map, ALL)
        self.start = self.region.remote().address
        self.rkey = self.region.rkey

    def truncate(self):
        self.file.truncate(PAGE)

class Anonymous:
    '''A region of two anonymous pages, of which `unmap` leaves the first.'''

    def __init__(self, wire):
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        how = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        page, none = ctypes.c_size_t(PAGE), ctypes.c_long(0)
        self.start = libc.mmap(None, ctypes.c_size_t(2 * PAGE), 3, how, -1, none)
        self.bytes = (ctypes.c_char * (2 * PAGE)).from_address(self.start)
        self.region = wire.region(self.bytes, ALL)
        self.rkey = self.region.rkey
        # A page without access, which no other mapping can take the place of.
        end = ctypes.c_void_p(self.start + PAGE)
        self.unmap = lambda: libc.mmap(end, page, 0, how | MAP_FIXED, -1, none)

def ends_with_terminate(wire, layer_and_type):
    heard = wire.hear()
    while heard.operation != TERMINATE:
        heard = wire.hear()
    assert heard.payload[0] == layer_and_type, heard.payload

def read_request(number, sink, mapped, offset, size):
    payload = struct.pack(">IQIIQ", sink, 0, size, mapped.rkey, mapped.start + offset)
    return untagged(READ_REQUEST, 1, number, payload)

def atomic_request(mapped, offset):
    payload = struct.pack(">IIIQQQQQ", 0, 9, mapped.rkey, mapped.start + offset, 1, 0, 0, 0)
    return untagged(ATOMIC_REQUEST, 1, 1, payload)

with ExitStack() as stack:
    wire = Wire(stack, crc=CRC_IS_ON)
"""
CASES = {
    "small_write": """
    mapped.truncate()
    wire.peer.sendall(tagged(WRITE, mapped.rkey, mapped.start + PAGE, b"x" * 64))
    ends_with_terminate(wire, 0x11)
""",
    "large_write": """
    mapped.truncate()
    wire.peer.sendall(tagged(WRITE, mapped.rkey, mapped.start, b"x" * 2 * PAGE))
    ends_with_terminate(wire, 0x11)
    assert mapped.map[:PAGE] == b"x" * PAGE
""",
    "read": """
    wire.peer.sendall(read_request(1, 1, mapped, PAGE, 100))
    assert wire.hear().payload == bytes(100)
    mapped.truncate()
    wire.peer.sendall(read_request(2, 1, mapped, PAGE - 8, 100))
    ends_with_terminate(wire, 0x01)
""",
    "atomic": """
    mapped.truncate()
    wire.peer.sendall(atomic_request(mapped, PAGE))
    ends_with_terminate(wire, 0x01)
""",
    "receive": """
    wire.pair.post_recv(7, [mapped.region[PAGE:]])
    mapped.truncate()
    wire.peer.sendall(untagged(SEND, 0, 1, b"hello"))
    assert wire.completions(1) == [(7, BAD)]
    ends_with_terminate(wire, 0x00)
""",
    "large_receive": """
    wire.pair.post_recv(7, [mapped.region[:]])
    mapped.truncate()
    wire.peer.sendall(untagged(SEND, 0, 1, b"x" * 2 * PAGE))
    assert wire.completions(1) == [(7, BAD)]
    ends_with_terminate(wire, 0x00)
""",
    "send": """
    mapped.truncate()
    wire.pair.post_send(7, [mapped.region[PAGE - 8 :]])
    assert wire.completions(1) == [(7, BAD)]
    ends_with_terminate(wire, 0x00)
""",
    "sink_of_a_read": """
    wire.pair.post_send(
        7,
        [mapped.region[PAGE : PAGE + 64]],
        opcode=WorkRequestOpcode.RDMA_READ,
        remote=RemoteMemory(0, 64, 1),
    )
    asked = wire.hear()
    mapped.truncate()
    wire.peer.sendall(tagged(READ_RESPONSE, asked.sink, 0, b"x" * 64))
    assert wire.completions(1) == [(7, BAD)]
    ends_with_terminate(wire, 0x00)
""",
    "memory_that_is_left": """
    mapped.truncate()
    wire.peer.sendall(tagged(WRITE, mapped.rkey, mapped.start, b"x" * 64))
    wire.peer.sendall(atomic_request(mapped, 8))
    assert wire.hear().payload[-8:] == b"x" * 8
    wire.peer.sendall(read_request(2, 1, mapped, 0, 16))
    assert wire.hear().payload == b"x" * 8 + b"y" + b"x" * 7
    wire.pair.post_send(7, [mapped.region[:8]])
    assert wire.hear().payload == b"x" * 8
""",
}


@pytest.mark.promise("A truncated file fails only its requests")
@pytest.mark.parametrize("crc", [False, True], ids=["no_crc", "crc"])
@pytest.mark.parametrize("flags", ["mmap.MAP_SHARED", "mmap.MAP_PRIVATE"])
@pytest.mark.parametrize("case", CASES)
def test_access_to_truncated_file_fails(case: str, flags: str, crc: bool) -> None:
    run("    mapped = Mapped(wire)" + CASES[case], flags, crc)


# The kernel copies what is sent, and returns an error. What is received is copied by the processor,
# which ends the process, as it ends any program that unmaps what it uses.
UNMAPPED = {
    "send": """
    gone.unmap()
    wire.pair.post_send(7, [gone.region[:64]])
    assert wire.hear().payload == bytes(64)
    wire.pair.post_send(8, [gone.region[PAGE:]])
    # The header of its frame has gone out: the peer learns no more than that it ended.
    assert wire.completions(2)[1] == (8, BAD)
""",
    "read": """
    gone.unmap()
    wire.peer.sendall(read_request(1, 1, gone, 0, 64))
    assert wire.hear().payload == bytes(64)
    wire.peer.sendall(read_request(2, 1, gone, PAGE, 64))
    expect(wire.channel, CmEventType.DISCONNECTED)
""",
}


@pytest.mark.promise("A truncated file fails only its requests")
@pytest.mark.parametrize("case", UNMAPPED)
def test_sending_unmapped_memory_fails(case: str) -> None:
    run("    gone = Anonymous(wire)" + UNMAPPED[case], "None", crc=False)


def run(case: str, flags: str, crc: bool) -> None:
    program = BEGIN.replace("FLAGS", flags).replace("CRC_IS_ON", str(crc)) + case
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
