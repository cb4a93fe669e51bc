"""Debian's kernel: downloaded by apt, unpacked into the cache, never installed.

The kernel is the one that `linux-image-amd64` depends on when the cache is first filled; it then
stays, so that a test bed does not change under its user. VM_KERNEL=apt asks apt again and keeps the
answer; VM_KERNEL=<release> takes `linux-image-<release>` for one run (backports work too).
"""

import json
import os
import re
import struct
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from . import cache, packages
from .report import TestBedError, say

# Of some 4,000 modules, those that tests and their peers may ask for (below kernel/ in the tree).
MODULES = (
    "arch/x86/crypto/",
    "block/",
    "crypto/",
    "drivers/block/",
    "drivers/char/virtio_console",
    "drivers/dma-buf/",
    "drivers/infiniband/",
    "drivers/net/bonding/",
    "drivers/net/dummy",
    "drivers/net/ifb",
    "drivers/net/macvlan",
    "drivers/net/net_failover",
    "drivers/net/tun",
    "drivers/net/veth",
    "drivers/net/virtio_net",
    "drivers/nvme/",
    "drivers/target/",
    "drivers/virtio/",
    "fs/9p/",
    "fs/configfs/",
    "fs/ext4/",
    "fs/fscache/",
    "fs/jbd2/",
    "fs/lockd/",
    "fs/mbcache",
    "fs/netfs/",
    "fs/nfs",
    "fs/overlayfs/",
    "lib/",
    "net/",
)


@dataclass(frozen=True)
class Kernel:
    """An unpacked kernel: `release` is what uname -r says, `version` the Debian package's."""

    release: str
    version: str
    directory: Path

    @property
    def image(self) -> Path:
        """The uncompressed ELF image: QEMU starts it by PVH, seconds sooner under emulation."""
        return self.directory / "vmlinux"

    @property
    def modules(self) -> Path:
        """The directory that the guest sees as /lib/modules/<release>."""
        return self.directory / "lib" / "modules" / self.release


def prepare(choice: str) -> Kernel:
    """The kernel to boot, fetched if need be. `choice` is VM_KERNEL: "", "apt" or a release."""
    default = cache.root() / "kernels" / "default"
    if not choice and default.exists():
        release = default.read_text().strip()
    elif choice in ("", "apt"):
        release = offered_by_apt()
    else:
        release = choice
    directory = cache.once(f"kernels/{release}", lambda scratch: unpack(release, scratch))
    if choice in ("", "apt"):
        cache.write_atomically(default, release + "\n")
    found = json.loads((directory / "kernel.json").read_text())
    return Kernel(release, found["version"], directory)


def offered_by_apt() -> str:
    """The release of the kernel package that apt's linux-image-amd64 stands for."""
    for name in packages.dependencies("linux-image-amd64"):
        if match := re.fullmatch(r"linux-image-(\d\S*)", name):
            return match[1]
    raise TestBedError(
        "apt knows no linux-image-amd64: run `apt-get update` as root, on Debian 12 amd64"
    )


def unpack(release: str, directory: Path) -> None:
    """Fill `directory` with vmlinux, the modules above and kernel.json."""
    say(f"fetching the kernel linux-image-{release}")
    deb = packages.download(f"linux-image-{release}", directory)
    extract(deb, directory, wanted_in(release))
    subprocess.run(
        ["depmod", "-b", directory, release], check=True, stderr=subprocess.DEVNULL
    )  # it complains about the modules that were left out
    compressed = directory / "boot" / f"vmlinuz-{release}"
    (directory / "vmlinux").write_bytes(payload(compressed.read_bytes()))
    compressed.unlink()
    (directory / "kernel.json").write_text(json.dumps({"version": packages.field(deb, "Version")}))
    deb.unlink()


def wanted_in(release: str) -> Callable[[str], bool]:
    """A test for the paths of a kernel package that are worth unpacking."""
    tree = f"lib/modules/{release}/"
    keep = [tree + "kernel/" + module for module in MODULES]
    keep += [tree + "modules.", f"boot/vmlinuz-{release}", f"boot/config-{release}"]
    return lambda path: path.removeprefix("usr/").startswith(tuple(keep))


def extract(deb: Path, directory: Path, wanted: Callable[[str], bool]) -> None:
    """Unpack the members of `deb` that `wanted` accepts (relative path); usr/lib becomes lib."""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", deb], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        extract_tar(process.stdout, directory, wanted)
    if process.returncode:
        raise TestBedError(f"dpkg-deb could not read {deb} (status {process.returncode})")


def extract_tar(stream: IO[bytes], directory: Path, wanted: Callable[[str], bool]) -> None:
    """The same for an uncompressed tar on a pipe; it is read to its end."""
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            path = member.name.removeprefix("./")
            if not member.isdir() and wanted(path):
                member.name = re.sub(r"^usr/lib/", "lib/", path)
                archive.extract(member, directory)
    while stream.read(1 << 16):  # tar pads its end: a writer must not see a broken pipe
        pass


DECOMPRESSORS = (
    (b"\xfd7zXZ\0", ["xz", "-dc"]),
    (b"\x28\xb5\x2f\xfd", ["zstd", "-dc"]),
    (b"\x1f\x8b", ["gzip", "-dc"]),
)


def payload(image: bytes) -> bytes:
    """The ELF kernel inside a bzImage (Documentation/x86/boot.rst: payload_offset and _length).

    The payload ends with four bytes of its unpacked size, which are not part of the stream.
    """
    setup_sectors = image[0x1F1] or 4
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = (setup_sectors + 1) * 512 + offset
    unpacked = decompress(image[start : start + length - 4])
    if unpacked[:4] != b"\x7fELF":
        raise TestBedError("the kernel package holds no ELF kernel: not an x86-64 bzImage?")
    return unpacked


def decompress(data: bytes) -> bytes:
    """Undo xz, zstd or gzip, whichever `data` is; anything else comes back as it is."""
    for magic, command in DECOMPRESSORS:
        if data.startswith(magic):
            return subprocess.run(command, input=data, check=True, capture_output=True).stdout
    return data


def module_files(kernel: Kernel, name: str) -> list[Path]:
    """The files of module `name` and what it needs, in the order to insert; empty if built in."""
    query = ["modprobe", "-d", str(kernel.directory), "-S", kernel.release, "--show-depends", name]
    result = subprocess.run(
        query, capture_output=True, text=True, env=os.environ | {"MODPROBE_OPTIONS": ""}
    )
    if result.returncode:
        raise TestBedError(f"the kernel {kernel.release} has no module {name}: {result.stderr}")
    lines = (line.split() for line in result.stdout.splitlines())
    return [Path(words[1]) for words in lines if words[0] == "insmod"]
