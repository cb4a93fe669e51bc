"""A program of plain blocking sockets, for librspreload: run as a script, without aiordma.

    preloaded.py client HOST PORT SIZE     sends SIZE bytes and the end; prints what comes back
    preloaded.py server HOST PORT          sends what it receives back to one client

The library replaces libc's functions. Python itself opens sockets with SOCK_CLOEXEC and accepts
with accept4(), which the library of rdma-core 44 leaves to TCP: these two calls are made by ctypes.
"""

import ctypes
import hashlib
import os
import socket
import sys

libc = ctypes.CDLL(None, use_errno=True)


def wrapped(descriptor: int) -> socket.socket:
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)


def main(role: str, host: str, port: str, *more: str) -> None:
    own = wrapped(libc.socket(socket.AF_INET, socket.SOCK_STREAM, 0))
    if role == "client":
        own.connect((host, int(port)))
        talk(own, int(more[0]))
        return
    own.bind((host, int(port)))
    own.listen(1)
    peer = wrapped(libc.accept(own.fileno(), None, None))
    print("accepted", peer.getpeername()[0], flush=True)
    while data := peer.recv(65536):
        peer.sendall(data)
    peer.shutdown(socket.SHUT_WR)
    peer.close()


def talk(peer: socket.socket, size: int) -> None:
    """Send in pieces and receive them back, so that no ring has to hold everything."""
    sent = bytes(index * 7 % 256 for index in range(256)) * (size // 256 + 1)
    back = b""
    for start in range(0, size, 50_000):
        piece = sent[start : min(start + 50_000, size)]
        peer.sendall(piece)
        while len(back) < start + len(piece):
            back += peer.recv(65536)
    peer.shutdown(socket.SHUT_WR)
    assert peer.recv(1) == b""
    assert back == sent[:size]
    print("from", peer.getpeername()[0], hashlib.sha256(back).hexdigest(), flush=True)
    peer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
