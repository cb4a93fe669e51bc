"""A capture of what goes over the loopback interface, and what tshark makes of it."""

import json
import re
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from anyio.streams.text import TextReceiveStream

FIELDS = (
    "frame.number",
    "frame.protocols",
    "tcp.srcport",
    "tcp.len",
    "iwarp_rdma.opcode",
    "iwarp_mpa.key.req",
    "iwarp_mpa.key.rep",
    "infiniband.bth.opcode",
    "_ws.malformed",
    "_ws.expert.severity",
    "_ws.expert.message",
)
OPTIONS = (
    *("-o", "tcp.desegment_tcp_streams:TRUE", "--enable-heuristic", "iwarp_mpa_tcp"),
    # Before what has registered a port, which may be the one that the system chose.
    *("-o", "tcp.try_heuristic_first:TRUE"),
    # A message of any program's would be taken for one of theirs, and found wanting.
    *("--disable-protocol", "rpcordma", "--disable-protocol", "smb_direct"),
)
ERROR = 0x800000  # of Wireshark's severities, the highest


@dataclass
class Decoded:
    """What tshark says of each packet: the fields' values, by name."""

    packets: list[dict[str, list[str]]] = field(default_factory=list)
    sums: list[str] = field(default_factory=list)
    """What it says of each CRC, where they were agreed on and it was asked."""

    def opcodes(self) -> list[int]:
        """Those of RDMAP, of every frame, in the order of the capture."""
        return [
            int(code, 0) for packet in self.packets for code in packet.get("iwarp_rdma.opcode", ())
        ]

    def faults(self) -> list[str]:
        """What tshark found wrong: malformed frames, errors, sums that do not fit."""
        found = []
        for packet in self.packets:
            number = packet["frame.number"][0]
            severities = [int(value, 0) for value in packet.get("_ws.expert.severity", ())]
            if "_ws.malformed" in packet or "_ws.malformed" in packet["frame.protocols"][0]:
                found.append(f"packet {number} is malformed")
            if any(severity >= ERROR for severity in severities):
                found.append(f"packet {number}: {packet.get('_ws.expert.message')}")
        found += [each for each in self.sums if not each.endswith("(Good CRC32)")]
        return found


@dataclass
class Capture:
    """Filled as the block that made it ends."""

    path: Path
    decoded: Decoded = field(default_factory=Decoded)


@asynccontextmanager
async def captured(
    port: int, *, with_sums: bool = False, seconds: float = 60
) -> AsyncIterator[Capture]:
    """Capture the block's TCP packets of that port, and decode them."""
    with tempfile.TemporaryDirectory(prefix="aiordma-capture-") as folder:
        capture = Capture(Path(folder, "packets.pcapng"))
        # A large buffer: what the kernel drops looks like a fault of ours.
        command = [
            "dumpcap",
            "-i",
            "lo",
            "-f",
            f"tcp port {port}",
            "-B",
            "64",
            "-w",
            str(capture.path),
        ]
        async with await anyio.open_process(command, stdin=subprocess.DEVNULL) as process:
            assert process.stderr is not None
            written = ""
            with anyio.fail_after(seconds):
                async for text in TextReceiveStream(process.stderr):
                    written += text
                    if "File:" in written:
                        break
                else:
                    raise AssertionError(f"dumpcap captures nothing: {written}")
            try:
                yield capture
                await anyio.sleep(0.5)  # what was sent last is still on its way to the file
            finally:
                process.terminate()
                with anyio.CancelScope(shield=True):
                    await process.wait()
        capture.decoded = await decode(capture.path, with_sums)


async def decode(path: Path, with_sums: bool, *options: str) -> Decoded:
    """Decode a file; the options are tshark's, beside its usual ones here."""
    fields = [word for name in FIELDS for word in ("-e", name)]
    ran = await anyio.run_process(
        ["tshark", "-r", str(path), *OPTIONS, *options, "-T", "json", *fields]
    )
    found: list[dict[str, Any]] = json.loads(ran.stdout or b"[]")
    decoded = Decoded([packet["_source"]["layers"] for packet in found])
    if with_sums:  # only in words does it say which of them fit
        words = await anyio.run_process(["tshark", "-r", str(path), *OPTIONS, "-V"])
        decoded.sums = re.findall(r"CRC check: (.*)", words.stdout.decode(errors="replace"))
    return decoded
