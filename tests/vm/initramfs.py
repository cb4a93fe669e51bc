"""The guest's first file system: busybox, guest/init.sh, the modules that reach the host's tree."""

import hashlib
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from . import cache, kernel
from .kernel import Kernel

MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay", "virtio_console")
DIRECTORIES = ("bin", "control", "dev", "host", "modules", "new", "plain", "proc", "sys", "writes")
INIT = Path(__file__).with_name("guest") / "init.sh"
BUSYBOX = Path("/bin/busybox")

Entry = tuple[str, int, bytes]  # path, mode, contents


def prepare(built_for: Kernel, modules: Sequence[str] = MODULES) -> Path:
    """The initramfs for a kernel, from the cache; its name follows from everything in it."""
    digest = hashlib.sha256()
    for part in (INIT.read_bytes(), BUSYBOX.read_bytes(), repr((modules, DIRECTORIES)).encode()):
        digest.update(part)
    entry = f"initramfs/{built_for.release}-{built_for.version}-{digest.hexdigest()[:16]}"
    return cache.once(entry, lambda scratch: build(built_for, modules, scratch)) / "initramfs.cpio"


def build(built_for: Kernel, modules: Sequence[str], directory: Path) -> None:
    """Write initramfs.cpio (uncompressed: unpacking would cost more than reading) into it."""
    files: dict[str, bytes] = {}  # in the order to insert; a dependency comes first
    for name in modules:
        for path in kernel.module_files(built_for, name):
            short = path.name.removesuffix(".xz").removesuffix(".zst")
            files.setdefault(short, kernel.decompress(path.read_bytes()))
    entries: list[Entry] = [(name, stat.S_IFDIR | 0o755, b"") for name in DIRECTORIES]
    entries.append(("init", stat.S_IFREG | 0o755, INIT.read_bytes()))
    entries.append(("bin/busybox", stat.S_IFREG | 0o755, BUSYBOX.read_bytes()))
    entries.append(("modules/order", stat.S_IFREG | 0o644, " ".join(files).encode() + b"\n"))
    entries += [(f"modules/{name}", stat.S_IFREG | 0o644, data) for name, data in files.items()]
    (directory / "initramfs.cpio").write_bytes(cpio(entries))


def cpio(entries: Iterable[Entry]) -> bytes:
    """A cpio archive in the kernel's "newc" format, owned by root, without times."""
    archive = bytearray()
    for number, (path, mode, data) in enumerate([*entries, ("TRAILER!!!", 0, b"")], start=1):
        name = path.encode() + b"\0"
        header = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name), 0)
        archive += b"070701" + b"".join(b"%08X" % value for value in header) + name
        archive += bytes(-len(archive) % 4) + data
        archive += bytes(-len(archive) % 4)
    return bytes(archive)
