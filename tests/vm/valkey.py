"""Valkey's server with RDMA, which no release of Debian builds: compiled once from its sources.

Debian 12 has none, so they are the next release's. What stays is the program. It uses Debian 12's
libraries.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from . import cache, packages
from .report import TestBedError, say

OPTIONS = ("BUILD_RDMA=yes", "MALLOC=libc", "USE_SYSTEMD=no", "OPTIMIZATION=-O1")


def prepare(target: Path) -> None:
    """Leave the server at `target`, built if need be (a minute).

    Raises TestBedError if the sources cannot be had, or do not build.
    """
    program = cache.once("valkey", build) / "valkey-server"
    if not target.exists() or target.stat().st_mtime < program.stat().st_mtime:
        scratch = target.with_suffix(".new")
        shutil.copy(program, scratch)
        scratch.replace(target)


def build(directory: Path) -> None:
    """Leave valkey-server in `directory`."""
    packages.ensure(packages.VALKEY)
    options = packages.sources_of(packages.NEXT_RELEASE)
    with tempfile.TemporaryDirectory(prefix="build.", dir=directory) as scratch:
        work = Path(scratch)
        command = ("source", "--download-only", "--only-source", "--tar-only", "valkey")
        fetched = packages.apt_get(*options, *command, cwd=work)
        archives = list(work.glob("valkey_*.orig.tar.*"))
        if fetched.returncode or not archives:
            raise TestBedError(f"apt-get source valkey failed:\n{fetched.stdout}")
        say(f"building the server of {archives[0].name}, once")
        tree = work / "tree"
        tree.mkdir()
        unpack = ["tar", "-x", "-f", str(archives[0]), "-C", str(tree), "--strip-components=1"]
        subprocess.run(unpack, check=True)
        jobs = f"-j{os.cpu_count() or 1}"
        log = subprocess.run(
            ["make", "-C", str(tree / "src"), jobs, *OPTIONS, "valkey-server"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if log.returncode:
            raise TestBedError(f"Valkey's server does not build:\n{log.stdout[-4000:]}")
        subprocess.run(["strip", tree / "src" / "valkey-server"], check=True)
        shutil.copy(tree / "src" / "valkey-server", directory)
