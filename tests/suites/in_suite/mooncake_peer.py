"""One end of Mooncake's transfer engine on software_roce: mooncake_peer.py [PEER ADDRESS].

Without words it is written to, and prints what the other end has to say. It ends with its input.
"""

import ctypes
import sys

from mooncake.engine import TransferEngine

SIZE = 1 << 20
PATTERN = bytes(range(1, 251)) * (SIZE // 250) + bytes(SIZE % 250)

engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", "software_roce") == 0
memory = ctypes.create_string_buffer(SIZE)
address = ctypes.addressof(memory)
assert engine.register_memory(address, SIZE) == 0
if len(sys.argv) == 1:
    print(f"127.0.0.1:{engine.get_rpc_port()} {address}", flush=True)
    sys.stdin.read()
    assert memory.raw == PATTERN
else:
    peer, target = sys.argv[1], int(sys.argv[2])
    ctypes.memmove(address, PATTERN, SIZE)
    assert engine.transfer_sync_write(peer, address, target, SIZE) == 0
    ctypes.memset(address, 0, SIZE)
    assert engine.transfer_sync_read(peer, address, target, SIZE) == 0
    assert memory.raw == PATTERN
