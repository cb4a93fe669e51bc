"""The software device without memory. No event of the connection manager is lost on the way, and a
connection that cannot keep what its peer sent ends, and no other."""

import subprocess
from pathlib import Path

import pytest

from tests.unit.child import run_child
from tests.unit.sources import ROOT
from tests.unit.test_native import FLAGS

pytestmark = pytest.mark.slow

# The end of an attempt or a connection has its event from the start. A connection that the program
# cannot be reported is dropped; a call that needs an event fails.
BEGIN = """
import ctypes, errno, select, socket, struct, time
from contextlib import ExitStack
from aiordma import Access, VerbsCallError
from aiordma.verbs import CmEventType, ConnectionParameters
from tests.unit.mpa_peer import *
from tests.unit.stream_peer import *
from aiordma.testing import software_objects
from tests.unit.software_device import memory

NOTHING, EVENTS, BLOCKS, QUESTIONS, WATCHES = range(5)
no_memory = ctypes.CDLL(None).no_memory

def is_gone(yes):
    no_memory(EVENTS if yes else NOTHING)

BLOCK = 73728
WRITE = 0

def until(condition):
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)

# So many messages without a receive, of which each borrows a block, and the beginning of another
# one, in the block that they were read into. So the device has none in reserve.
def keep(wire, count):
    before, reading = memory("held"), memory("blocks") - memory("held") // BLOCK
    for number in range(1, count + 1):
        wire.peer.sendall(untagged(SEND, 0, number, bytes(60000)))
    until(lambda: memory("held") == before + count * BLOCK)
    wire.peer.sendall(untagged(SEND, 0, count + 1, bytes(60000))[:100])
    until(lambda: memory("blocks") - memory("held") // BLOCK == reading + 1)

def connecting(device):
    with socket.create_server((HOST, 0)) as server:
        identifier = device.connecting(server.getsockname()[1], ConnectionParameters())
        peer, _ = server.accept()
    Frame.receive(peer)
    return identifier, peer

ANSWER = Frame(True, inbound=UPPER | 4, outbound=UPPER | LOWER | 4).pack()
FIRST = struct.pack(">H", 14) + bytes.fromhex("c140") + bytes(16)

with ExitStack() as stack:
    device = Device(stack)
"""
CASES = {
    "a_connection_that_cannot_be_told_of_is_ended": """
    _, peer = connecting(device)
    is_gone(1)
    peer.sendall(ANSWER)
    assert expect(device.channel, CmEventType.CONNECT_ERROR).status == -errno.ENOMEM
    assert peer.recv(100) == FIRST
    assert has_ended(peer)
""",
    "one_that_was_accepted_as_well": """
    _, port = device.listener()
    peer = socket.create_connection((HOST, port))
    peer.sendall(Frame(inbound=UPPER | 4, outbound=UPPER | LOWER | 4).pack())
    request = device.identifier(expect(device.channel, CmEventType.CONNECT_REQUEST).new_key)
    device.give_queue_pair(request)
    request.accept(ConnectionParameters())
    Frame.receive(peer)
    is_gone(1)
    peer.sendall(FIRST)
    assert expect(device.channel, CmEventType.CONNECT_ERROR).status == -errno.ENOMEM
    assert has_ended(peer)
""",
    "the_end_of_a_connection_is_told": """
    _, peer = connecting(device)
    peer.sendall(ANSWER)
    expect(device.channel, CmEventType.ESTABLISHED)
    is_gone(1)
    peer.close()
    expect(device.channel, CmEventType.DISCONNECTED)
""",
    "the_end_of_an_attempt_is_told": """
    _, peer = connecting(device)
    is_gone(1)
    peer.close()
    expect(device.channel, CmEventType.REJECTED)
""",
    "a_call_says_so": """
    identifier = device.identifier()
    is_gone(1)
    try:
        identifier.resolve_address(HOST, 1, None, 1000)
    except VerbsCallError as error:
        assert error.errno == errno.ENOMEM
    else:
        raise AssertionError("there was memory")
    is_gone(0)
    identifier.resolve_address(HOST, 1, None, 1000)
    expect(device.channel, CmEventType.ADDR_RESOLVED)
""",
    "what_cannot_be_kept_ends_its_connection": """
    one, other = (Wire(stack) for _ in range(2))
    other.pair.post_recv(7, [other.region(bytearray(64))[:]])
    keep(one, 3)
    no_memory(BLOCKS)
    one.peer.sendall(untagged(SEND, 0, 4, bytes(60000))[100:])
    expect(one.channel, CmEventType.DISCONNECTED)
    assert one.hear().operation == TERMINATE
    # Its blocks were given back, and some of them are in reserve.
    other.peer.sendall(untagged(SEND, 0, 1, b"hello"))
    assert other.completions(1) == [(7, 0)]
""",
    "who_keeps_most_ends_so_that_another_is_read": """
    less, most, other = (Wire(stack) for _ in range(3))
    other.pair.post_recv(7, [other.region(bytearray(64))[:]])
    keep(less, 1)
    keep(most, 3)
    no_memory(BLOCKS)
    other.peer.sendall(untagged(SEND, 0, 1, b"hello"))
    expect(most.channel, CmEventType.DISCONNECTED)
    assert other.completions(1) == [(7, 0)]
    assert list(less.channel.events()) == list(other.channel.events()) == []
""",
    "what_cannot_be_read_ends_its_connection": """
    wire = Wire(stack)
    no_memory(BLOCKS)
    wire.peer.sendall(untagged(SEND, 0, 1, b"hello"))
    expect(wire.channel, CmEventType.DISCONNECTED)
    assert wire.hear().operation == TERMINATE
""",
    "an_answer_that_cannot_be_copied_ends_its_connection": """
    wire = Wire(stack, crc=True)
    region = wire.region(bytearray(200_000), Access.REMOTE_READ)
    ask = struct.pack(">IQIIQ", 9, 0, len(region), region.rkey, region.address)
    # The question is in a block that was borrowed before, and is the only one for the answer.
    wire.peer.sendall((question := untagged(READ_REQUEST, 1, 1, ask))[:9])
    until(lambda: memory("blocks"))
    no_memory(BLOCKS)
    wire.peer.sendall(question[9:])
    expect(wire.channel, CmEventType.DISCONNECTED)
""",
    "a_question_that_cannot_be_kept_ends_its_connection": """
    wire = Wire(stack)
    ask = struct.pack(">IQIIQ", 9, 0, 0, 0, 0)
    no_memory(QUESTIONS)
    wire.peer.sendall(untagged(READ_REQUEST, 1, 1, ask))
    expect(wire.channel, CmEventType.DISCONNECTED)
    assert wire.hear().operation == TERMINATE
""",
    "stream_that_cannot_go_back_to_the_engine_is_served": """
    wire = Wire(stack)
    sink = wire.region(bytearray(8), Access.LOCAL_WRITE | Access.REMOTE_WRITE)
    for number in range(1, 9):
        wire.pair.post_recv(number, [sink[:]])
    for number in range(1, 5):  # a completion each: the program's thread reads this stream
        wire.peer.sendall(untagged(SEND, 0, number, b"hello"))
        assert wire.completions(1) == [(number, 0)]
    no_memory(WATCHES)
    for _ in range(4):  # none: the engine is to read it
        wire.peer.sendall(tagged(WRITE, sink.rkey, sink.address, b"bytes"))
        time.sleep(0.01)
    wire.peer.sendall(untagged(SEND, 0, 5, b"hello"))
    assert wire.completions(1) == [(5, 0)]
    no_memory(NOTHING)
    wire.peer.sendall(tagged(WRITE, sink.rkey, sink.address, b"bytes"))
    wire.peer.sendall(untagged(SEND, 0, 6, b"hello"))
    assert wire.completions(1) == [(6, 0)]
""",
    "stream_that_ends_where_none_can_be_watched_is_gone": """
    wire = Wire(stack)
    sink = wire.region(bytearray(8))
    for number in range(1, 5):
        wire.pair.post_recv(number, [sink[:]])
        wire.peer.sendall(untagged(SEND, 0, number, b"hello"))
        assert wire.completions(1) == [(number, 0)]
    sockets = software_objects()["sockets"]
    no_memory(WATCHES)
    wire.identifier.disconnect()
    expect(wire.channel, CmEventType.DISCONNECTED)
    assert has_ended(wire.peer)
    until(lambda: software_objects()["sockets"] < sockets)
""",
    "listener_that_cannot_be_watched_tries_again": """
    listener, port = device.listener(backlog=1)
    def ask():
        peer = stack.enter_context(socket.create_connection((HOST, port)))
        peer.sendall(Frame(inbound=UPPER | 4, outbound=UPPER | LOWER | 4).pack())
        return peer
    def is_asked():
        return any(event.type is CmEventType.CONNECT_REQUEST for event in device.channel.events())
    ask()
    until(lambda: select.select([device.channel.fd], [], [], 0)[0])
    ask()
    time.sleep(0.3)  # it waits in TCP's queue, and the listener is not watched
    no_memory(WATCHES)
    until(is_asked)  # the first one
    time.sleep(0.3)
    no_memory(NOTHING)
    ask()
    until(is_asked)
""",
    "listener_that_cannot_be_watched_ends_with_a_peer_in_its_handshake": """
    listener, port = device.listener(backlog=1)
    silent = stack.enter_context(socket.create_connection((HOST, port)))
    peer = stack.enter_context(socket.create_connection((HOST, port)))
    peer.sendall(Frame(inbound=UPPER | 4, outbound=UPPER | LOWER | 4).pack())
    until(lambda: select.select([device.channel.fd], [], [], 0)[0])
    stack.enter_context(socket.create_connection((HOST, port)))
    time.sleep(0.3)  # it waits in TCP's queue, and the listener is not watched
    no_memory(WATCHES)
    request = device.identifier(expect(device.channel, CmEventType.CONNECT_REQUEST).new_key)
    listener.close()  # both would let it accept again
    assert has_ended(silent)
    time.sleep(0.3)  # no timer is left of it
""",
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("no_memory") / "no_memory.so"
    command = ["gcc", *FLAGS, "-shared", "-fPIC", "tests/native/no_memory.c", "-o", str(made)]
    subprocess.run(command, cwd=ROOT, check=True)
    return made


@pytest.mark.parametrize("case", CASES)
def test_without_memory(case: str, library: Path) -> None:
    run_child(BEGIN + CASES[case] + "    no_memory(NOTHING)\n", LD_PRELOAD=str(library))
