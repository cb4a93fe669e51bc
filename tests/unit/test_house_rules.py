"""Rules that hold for every tracked file: what has no place in a repository."""

import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.unit.sources import ROOT

# Put together here, so that this file does not hold what it looks for.
UNFINISHED = tuple(word + end for word, end in (("TO", "DO"), ("FIX", "ME"), ("XX", "X:")))
PLACES = tuple(f"/{place}/" for place in ("work", "root", "home", "Users"))
REGISTRIES = tuple(
    ".".join(parts)
    for parts in (
        ("deb", "debian", "org"),
        ("pypi", "org"),
        ("files", "pythonhosted", "org"),
        ("proxy", "golang", "org"),
        ("registry", "npmjs", "org"),
        ("crates", "io"),
    )
)


@cache
def tracked() -> tuple[Path, ...]:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is no git checkout, which lists the tracked files: git clone the project")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    # A file that somebody is about to remove is listed and not there.
    found = tuple(path for name in listed.stdout.split("\0") if (path := ROOT / name).is_file())
    assert ROOT / "pyproject.toml" in found
    return found


def _holding(words: tuple[str, ...]) -> list[str]:
    found = []
    for path in tracked():
        text = path.read_text(errors="replace")
        for number, line in enumerate(text.splitlines(), 1):
            found += [
                f"{path.relative_to(ROOT)}:{number}: {word}" for word in words if word in line
            ]
    return found


def test_nothing_unfinished_is_marked_in_a_file() -> None:
    assert _holding(UNFINISHED) == []


def test_no_file_names_a_place_on_somebodys_machine() -> None:
    assert _holding(PLACES) == []


def test_no_file_names_a_package_registry() -> None:
    assert _holding(REGISTRIES) == []


def test_what_is_built_is_not_tracked() -> None:
    built = {".so", ".o", ".pyc", ".a", ".whl"}
    assert [path for path in tracked() if path.suffix in built] == []


@pytest.mark.parametrize("folder", ["aiordma", "tests", "examples"])
def test_every_module_opens_with_its_purpose(folder: str) -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in tracked()
        if path.suffix == ".py"
        and path.relative_to(ROOT).parts[0] == folder
        and path.read_text().strip()
        and not path.read_text().lstrip().startswith(('"""', "#!"))
    ]
    assert silent == []
