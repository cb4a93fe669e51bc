"""The length of a side's receives, which it tells the other in private data that its program left
empty. A message that would end the connection is then refused at its sender.

A side that accepts says it only to a peer that has said it: so no other program's private data
change in answer. One that connects does so always; programs that take no private data ignore it.
"""

from aiordma._endpoint.endpoint import Endpoint

_MARK = b"aiordma\x01"
_SIZE_BYTES = 4
_BYTES = len(_MARK) + _SIZE_BYTES


def announcement(endpoint: Endpoint) -> bytes:
    """Return the private data that say how long this side's receives are: none, if the program
    posts them itself."""
    size = endpoint.receive_size
    return _MARK + size.to_bytes(_SIZE_BYTES, "big") if size else b""


def read_announcement(private_data: bytes) -> tuple[bytes, int | None]:
    """Return the private data of the peer's program, and how long the peer's receives are, if it
    says so."""
    if len(private_data) < _BYTES or not private_data.startswith(_MARK):
        return private_data, None
    return b"", int.from_bytes(private_data[_BYTES - _SIZE_BYTES : _BYTES], "big")
