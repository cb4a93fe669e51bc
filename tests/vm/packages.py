"""apt: which packages a task needs, installing the missing ones, downloading without installing.

Root is needed only to install; `apt-get download` works for anyone once the lists are there.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from . import cache
from .report import TestBedError, say

# What compiles the extension on the host (python_packages() adds what the interpreter lacks).
BUILD = ("gcc", "libc6-dev", "make")
# What the tests compare the declarations with, and what the benchmarks' C programs include.
HEADERS = ("libibverbs-dev", "librdmacm-dev")
# What every guest uses, and the C peers that the tests talk to in it; and what boots it in QEMU.
IN_GUEST = (
    "busybox-static",
    "iproute2",
    "rdma-core",
    "ibverbs-providers",
    "ibverbs-utils",
    "rdmacm-utils",
    "perftest",
)
VM = ("qemu-system-x86", "kmod", "xz-utils", "zstd", *IN_GUEST)
# What captures and decodes the software device's exchanges with siw.
WIRE = ("tshark",)
# What fuzzes the software device: libFuzzer and its sanitizers.
FUZZ = ("clang", "libclang-rt-dev", "libc6-dev", "libibverbs-dev", "librdmacm-dev")
# What builds a kernel module from unpacked headers, whose tools are linked against two libraries.
# The compiler is the one that the headers ask for.
MODULE = ("make", "libelf1", "libssl3")
# What builds Valkey's server.
VALKEY = ("gcc", "libc6-dev", "make", "pkg-config", "xz-utils", "libibverbs-dev", "librdmacm-dev")
# What builds a user-mode kernel from Debian's sources.
USER_MODE = ("gcc", "libc6-dev", "make", "binutils", "flex", "bison", "bc", "xz-utils")
# Where newer kernel sources are than in Debian 12, and the keys that sign them.
BACKPORTS = "trixie-backports"
NEXT_RELEASE = "trixie"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
# What the parts of `make test` need: installed before they start, as the native one would
# otherwise run while libraries are replaced below it.
TESTS = (*VM, *WIRE, *MODULE, *VALKEY)


def python_packages() -> tuple[str, ...]:
    """What Debian splits from this interpreter and a venv with a C extension needs."""
    found = []
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        found.append("python3-venv")
    if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        found.append("python3-dev")
    if found and not sys.base_prefix == "/usr":
        raise TestBedError(
            f"{sys.executable} lacks ensurepip or Python.h and is not Debian's own, so apt cannot"
            " add them: use a complete Python >= 3.11 (make PYTHON=/usr/bin/python3 ...)"
        )
    return tuple(found)


def missing(wanted: Iterable[str]) -> list[str]:
    """The packages of `wanted` that dpkg does not hold as installed, in their order."""
    names = list(dict.fromkeys(wanted))
    if not shutil.which("dpkg-query"):
        return names
    query = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *names],
        capture_output=True,
        text=True,
    )
    installed = {
        line.split()[0] for line in query.stdout.splitlines() if line.endswith(" installed")
    }
    return [name for name in names if name not in installed]


def version(package: str) -> str:
    """The installed version of a package, as dpkg has it; empty if there is none."""
    query = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Version}", package], capture_output=True, text=True
    )
    return query.stdout.strip()


def ensure(wanted: Iterable[str]) -> None:
    """Install what is missing of `wanted`. Raises TestBedError naming it where that cannot be."""
    absent = missing(wanted)
    if not absent:
        return
    advice = f"install these packages (Debian 12 names), then try again: {' '.join(absent)}"
    if not shutil.which("apt-get"):
        raise TestBedError(f"there is no apt-get here; {advice}")
    if os.geteuid() != 0:
        raise TestBedError(f"not root; {advice}\n    apt-get install -y {' '.join(absent)}")
    with cache.lock("apt"):
        absent = missing(absent)
        if not absent:
            return
        say(f"installing {' '.join(absent)}")
        if not all(known(name) for name in absent):
            update()
        install = ["install", "-y", "--no-install-recommends", *absent]
        if apt_get(*install).returncode:
            update()  # the lists may name a version that the mirror has since dropped
            second = apt_get(*install)
            if second.returncode:
                raise TestBedError(f"apt-get install failed:\n{second.stdout}\n{advice}")


def known(package: str, *options: str) -> bool:
    """Whether apt's lists hold a version of `package`."""
    return bool(candidate(package, *options))


def candidate(package: str, *options: str) -> str:
    """The version of `package` that apt would take; empty if it knows none."""
    command = ["apt-cache", *options, "policy", package]
    policy = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"Candidate: (?!\(none\))(\S+)", policy.stdout)
    return found[1] if found else ""


def search(pattern: str, *options: str) -> dict[str, str]:
    """The packages that apt's lists hold whose names match the pattern, with their versions."""
    if not shutil.which("apt-cache"):
        raise TestBedError("there is no apt here: the test bed takes its kernel from Debian's apt")
    command = ["apt-cache", *options, "search", "--names-only", pattern]
    found = subprocess.run(command, capture_output=True, text=True)
    names = [line.split()[0] for line in found.stdout.splitlines() if line.strip()]
    return {name: version for name in names if (version := candidate(name, *options))}


def backports(again: bool = False) -> tuple[str, ...]:
    """Options by which apt sees the backports of Debian's next release, and nothing else.

    The lists are kept in the cache, and fetched once or `again`: this machine's own are neither
    used nor changed. The archive is the one that apt takes Debian from here. Raises TestBedError if
    that has no such backports.
    """
    return _only("backports", f"deb {{}} {BACKPORTS} main", again)


def sources_of(release: str) -> tuple[str, ...]:
    """Options by which apt-get sees the sources of a release of Debian, as `backports` does."""
    return _only(f"sources-{release}", f"deb-src {{}} {release} main", again=False)


def _only(name: str, line: str, again: bool) -> tuple[str, ...]:
    """Options by which apt sees one line of sources.list, and nothing else."""
    if not shutil.which("apt-get"):
        raise TestBedError(f"there is no apt-get here to ask for Debian's {name}")
    folder = cache.root() / name
    options = (
        *("-o", f"Dir::Etc::sourcelist={folder}/sources.list", "-o", "Dir::Etc::sourceparts=-"),
        *("-o", f"Dir::State::lists={folder}/lists", "-o", f"Dir::Cache={folder}/cache"),
        *("-o", "APT::Sandbox::User="),  # which may not read the cache of root
    )
    with cache.lock(name):
        if not again and (folder / "updated").exists():
            return options
        query = ["apt-get", "indextargets", "--format", "$(REPO_URI)"]
        query += ["Created-By: Packages", "Origin: Debian", "Component: main"]
        archives = subprocess.run(query, capture_output=True, text=True).stdout.split()
        if not archives:
            raise TestBedError(f"apt knows no archive of Debian to ask for {name}")
        for part in ("lists/partial", "cache/archives/partial"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        written = line.format(f"[signed-by={KEYRING}] {archives[0]}") + "\n"
        (folder / "sources.list").write_text(written)
        result = apt_get(*options, "-o", "APT::Update::Error-Mode=any", "update")
        if result.returncode:
            raise TestBedError(f"apt cannot read {written.split()[-2]}:\n{result.stdout.strip()}")
        (folder / "updated").touch()
    return options


def update() -> None:
    """Fetch apt's lists; failing only shows later, when a package is not found."""
    if os.geteuid() == 0:
        apt_get("update")


def apt_get(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run apt-get without questions, both outputs as one string; the caller judges the status."""
    return subprocess.run(
        ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", *arguments],
        cwd=cwd,
        env=os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def download(package: str, directory: Path, *options: str) -> Path:
    """Fetch the .deb of `package` ("name" or "name=version") into `directory`.

    `options` go to apt, see backports().
    """
    if not shutil.which("apt-get"):
        raise TestBedError(f"there is no apt-get here to download {package}: Debian 12 is needed")
    name = package.partition("=")[0]
    if not known(name, *options):
        update()
    result = apt_get(*options, "download", package, cwd=directory)
    if result.returncode:
        update()
        result = apt_get(*options, "download", package, cwd=directory)
    found = list(directory.glob(f"{name}_*.deb"))
    if result.returncode or not found:
        hint = "" if os.geteuid() == 0 else "\n(not root: `apt-get update` must be run by root)"
        raise TestBedError(f"apt cannot download {package}:\n{result.stdout.strip()}{hint}")
    return found[0]


def dependencies(package: str) -> list[str]:
    """The packages that apt says `package` depends on; empty if it knows none."""
    if not shutil.which("apt-cache"):
        raise TestBedError(
            "there is no apt here: the test bed takes its kernel from Debian 12's apt"
        )
    if not known(package):
        update()
    depends = subprocess.run(["apt-cache", "depends", package], capture_output=True, text=True)
    return re.findall(r"^ *Depends: (\S+)", depends.stdout, re.MULTILINE)


def field(deb: Path, name: str) -> str:
    """One field of a .deb's control file."""
    query = ["dpkg-deb", "-f", str(deb), name]
    return subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip()
