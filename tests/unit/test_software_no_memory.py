"""The connection manager's events when there is no memory for them: none is lost on the way."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.sources import ROOT
from tests.unit.test_native import FLAGS

# The end of an attempt or a connection has its event from the start. A connection that the program
# cannot be told of is none; a call that needs an event fails.
BEGIN = """
import ctypes, errno, socket, struct
from contextlib import ExitStack
from aiordma import CmEventType, ConnectionParameters, VerbsCallError
from tests.unit.mpa_peer import *

is_gone = ctypes.CDLL(None).no_memory

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
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("no_memory") / "no_memory.so"
    command = ["gcc", *FLAGS, "-shared", "-fPIC", "tests/native/no_memory.c", "-o", made]
    subprocess.run(command, cwd=ROOT, check=True)
    return made


@pytest.mark.parametrize("case", CASES)
def test_without_memory(case: str, library: Path) -> None:
    out = subprocess.run(
        [sys.executable, "-c", BEGIN + CASES[case] + "    is_gone(0)\n"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert out.returncode == 0, out.stderr
