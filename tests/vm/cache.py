"""What is made once and kept: the unpacked kernel, the initramfs, the siw module.

An entry is a directory that appears by one rename, complete or not at all; a lock beside it makes
concurrent first uses wait for the one that builds. Deleting the whole cache is always safe while no
VM runs.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def root() -> Path:
    """The cache's directory, created if need be. XDG_CACHE_HOME moves it."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    directory = Path(base).resolve() / "aiordma"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@contextmanager
def lock(name: str) -> Iterator[None]:
    """Hold the cache's lock `name`, waiting for other processes; it ends with this process."""
    directory = root() / "locks"
    directory.mkdir(exist_ok=True)
    with open(directory / name, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def once(entry: str, build: Callable[[Path], None]) -> Path:
    """Return the directory `entry` of the cache; if absent, `build` fills it (given an empty one).

    If `build` raises, nothing is left behind and the next call starts afresh.
    """
    path = root() / entry
    if path.is_dir():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with lock(entry.replace("/", ".")):
        if path.is_dir():  # someone else built it while this process waited
            return path
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            build(scratch)
            scratch.chmod(0o755)
            scratch.rename(path)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    return path


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by a file holding `text`; a reader sees the old or the new, never a part."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text)
    scratch.replace(path)
