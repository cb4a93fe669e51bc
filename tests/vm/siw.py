"""siw, the software iWARP device, which Debian does not build: compiled out of tree, once.

Source and headers are Debian's, of the kernel's own version where apt still has it. They are
unpacked into the cache's scratch folder, used there and deleted: nothing is installed but a
compiler. What stays is siw.ko.
"""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from . import cache, kernel, packages
from .kernel import Kernel
from .report import TestBedError, say

DRIVER = "drivers/infiniband/sw/siw/"


def prepare(built_for: Kernel) -> Path:
    """The path of siw.ko for this kernel, built if need be (about a minute)."""
    entry = f"siw/{built_for.release}-{built_for.version}"
    return cache.once(entry, lambda scratch: build(built_for, scratch)) / "siw.ko"


def build(built_for: Kernel, directory: Path) -> None:
    """Leave siw.ko in `directory`."""
    say(f"building the siw module for {built_for.release}")
    packages.ensure(packages.MODULE)
    with tempfile.TemporaryDirectory(prefix="build.", dir=directory) as scratch:
        work = Path(scratch)
        headers = unpack_headers(built_for, work)
        driver = unpack_driver(built_for, work)
        command = ["make", "-C", str(headers), f"M={driver}", "CONFIG_RDMA_SIW=m", "modules"]
        log = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if log.returncode:
            raise TestBedError(f"siw does not build for {built_for.release}:\n{log.stdout}")
        shutil.copy(driver / "siw.ko", directory / "siw.ko")


def unpack_headers(built_for: Kernel, work: Path) -> Path:
    """What kbuild needs, below `work`; returns the folder for `make -C`."""
    wanted = [f"linux-headers-{built_for.release}"]
    for name in wanted:  # grows: headers need linux-headers-...-common and linux-kbuild-...
        deb = packages.download(name, work)
        subprocess.run(["dpkg-deb", "-x", deb, work], check=True)
        depends = packages.field(deb, "Depends")
        packages.ensure(re.findall(r"linux-compiler-(gcc-\d+)-x86", depends))
        needs = re.findall(r"linux-(?:headers|kbuild)-[^ ,]+", depends)
        wanted += [need for need in needs if need not in wanted]
        deb.unlink()
    headers = work / "usr" / "src" / wanted[0]
    for makefile in (headers / "Makefile", headers / ".kernelvariables"):
        if makefile.exists():  # they name each other by the path they would be installed at
            makefile.write_text(makefile.read_text().replace("/usr/", f"{work}/usr/"))
    return headers


def unpack_driver(built_for: Kernel, work: Path) -> Path:
    """The driver's sources, below `work`; returns their folder."""
    series = ".".join(built_for.version.split(".")[:2])
    source = f"linux-source-{series}"
    try:
        deb = packages.download(f"{source}={built_for.version}", work)
    except TestBedError:
        deb = packages.download(source, work)
        offered = packages.field(deb, "Version")
        say(f"apt has no {source} {built_for.version} any more: taking siw from {offered}")
    archive = f"usr/src/{source}.tar.xz"
    kernel.extract(deb, work, lambda path: path == archive)
    deb.unlink()
    tree = f"{source}/{DRIVER}"
    with subprocess.Popen(["xz", "-dc", work / archive], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        kernel.extract_tar(process.stdout, work, lambda path: path.startswith(tree))
    return work / tree
