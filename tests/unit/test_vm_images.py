"""The formats that the test bed reads and writes: bzImage, cpio, kernel packages' paths."""

import gzip
import shutil
import stat
import struct
import subprocess
from pathlib import Path

import pytest

from tests.vm import initramfs, kernel
from tests.vm.report import TestBedError


def bzimage(payload: bytes) -> bytes:
    """A boot sector and one setup sector, then the payload 16 bytes into the kernel proper."""
    image = bytearray(2 * 512) + bytes(16) + payload + bytes(100)
    image[0x1F1] = 1
    struct.pack_into("<II", image, 0x248, 16, len(payload))
    return bytes(image)


def test_the_payload_of_a_bzimage_is_the_elf_kernel() -> None:
    elf = b"\x7fELF" + bytes(range(256))
    assert kernel.payload(bzimage(gzip.compress(elf) + struct.pack("<I", len(elf)))) == elf


def test_a_payload_that_is_no_elf_kernel_is_refused() -> None:
    with pytest.raises(TestBedError, match="ELF"):
        kernel.payload(bzimage(gzip.compress(b"something else") + bytes(4)))


def test_data_that_is_not_compressed_comes_back_as_it_is() -> None:
    assert kernel.decompress(b"\x7fELF...") == b"\x7fELF..."


@pytest.mark.parametrize("prefix", ["", "usr/"])
def test_of_a_kernel_package_only_what_tests_need_is_unpacked(prefix: str) -> None:
    wanted = kernel.wanted_in("6.1.0-9-amd64")
    tree = prefix + "lib/modules/6.1.0-9-amd64/"
    assert wanted(tree + "kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko")
    assert wanted(tree + "modules.builtin")
    assert wanted("boot/vmlinuz-6.1.0-9-amd64")
    assert not wanted(tree + "kernel/drivers/gpu/drm/drm.ko")
    assert not wanted("usr/share/doc/linux-image-6.1.0-9-amd64/copyright")


def test_cpio_unpacks_to_what_was_packed(tmp_path: Path) -> None:
    cpio = shutil.which("cpio") or shutil.which("busybox")
    if cpio is None:
        pytest.skip("this machine lacks cpio: apt-get install cpio (or busybox)")
    entries: list[initramfs.Entry] = [
        ("bin", stat.S_IFDIR | 0o755, b""),
        ("bin/one", stat.S_IFREG | 0o755, b"1"),
        ("two", stat.S_IFREG | 0o644, b"twotwo"),
    ]
    command = [cpio, "cpio"] if cpio.endswith("busybox") else [cpio]
    command += ["-i", "-d", "-m"]
    subprocess.run(
        command, input=initramfs.cpio(entries), cwd=tmp_path, check=True, capture_output=True
    )
    assert (tmp_path / "bin" / "one").read_bytes() == b"1"
    assert stat.S_IMODE((tmp_path / "bin" / "one").stat().st_mode) == 0o755
    assert (tmp_path / "two").read_bytes() == b"twotwo"
