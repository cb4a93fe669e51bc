"""A peer that streams: a plain socket that sends WRITE frames of 64,000 bytes to a server of
`aiordma bench` without pause, until it is terminated: python -m tests.bench.streaming PORT

With "tcp" behind the port it sends as many bytes to the TCP port of `stream_server`, which reads
and counts them.
"""

import json
import socket
import sys
from contextlib import suppress

from aiordma import RemoteMemory
from aiordma.bench.workload import Workload
from tests.attacks.peer import RawPeer

from .stream_server import HEAD

SIZE = 64_000
FRAMES = 16
"""That are given to TCP with one call."""


def stream(port: int) -> None:
    """Be that peer."""
    with RawPeer(port, private_data=Workload("write", SIZE).pack()) as peer:
        peer.send(peer.message(b"where?"))
        remote = RemoteMemory.unpack(peer.receive_message())
        frames = peer.write(remote.rkey, remote.address, bytes(SIZE)) * FRAMES
        peer.socket.settimeout(None)
        print(json.dumps(SIZE), flush=True)
        with suppress(ConnectionError):
            while True:
                peer.send(frames)


def stream_tcp(port: int) -> None:
    """Be a peer of TCP that does the same."""
    with socket.create_connection(("127.0.0.1", port)) as peer:
        peer.sendall(HEAD.pack(SIZE, False))
        print(json.dumps(SIZE), flush=True)
        with suppress(ConnectionError):
            while True:
                peer.sendall(bytes(SIZE) * FRAMES)


if __name__ == "__main__":
    (stream_tcp if "tcp" in sys.argv else stream)(int(sys.argv[1]))
