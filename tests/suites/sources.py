"""Fetches the sources of other projects' tests by git."""

import subprocess
from pathlib import Path

__all__ = ("fetch_commit",)


def fetch_commit(folder: Path, repository: str, revision: str, *paths: str) -> None:
    """Fetch the files of a commit or a tag into a folder, without those of other commits.

    Args:
        paths: the files and folders that are wanted; all, if there are none.

    Raises:
        subprocess.CalledProcessError: they cannot be fetched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for command in (
        ("init", "-q"),
        ("config", "remote.origin.url", repository),
        ("fetch", "-q", "--depth=1", "--filter=blob:none", "origin", revision),
        ("checkout", "-qf", "FETCH_HEAD", "--", *(paths or (".",))),
    ):
        subprocess.run(["git", "-C", folder, *command], check=True)
