"""What the runs of other projects' tests share: their sources, why tests fail, and the pages with
the results."""

import subprocess
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

__all__ = ("BUILD", "REST_OF_PAGE", "ROOT", "fetch_commit", "reason", "write_page")

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "suites"
REST_OF_PAGE = "<!-- from here on written by make suites -->\n"


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


def reason(reasons: Mapping[str, str], test: str) -> str | None:
    """Return the reason whose pattern a test has, or None."""
    return next((why for pattern, why in reasons.items() if fnmatchcase(test, pattern)), None)


def write_page(name: str, text: str, mark: str = REST_OF_PAGE, following: str = "") -> None:
    """Put results into a page of docs/, behind a mark, and before the text that follows."""
    page = ROOT / "docs" / f"{name}.md"
    head, mark, rest = page.read_text().partition(mark)
    tail = f"\n{following}{rest.partition(following)[2]}" if following else ""
    page.write_text(f"{head}{mark}\n{text}\n{tail}")
