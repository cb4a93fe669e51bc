"""The lists in docs/design.md and docs/software-device.md name what is in the tree."""

import re
from pathlib import Path

from tests.unit.sources import PACKAGE, ROOT
from tests.unit.test_layers import FOLDERS

NATIVE = ROOT / PACKAGE / "_native"
NAMES = re.compile(r"( *)([a-z_][\w./]*(?:, [\w.]+)*) ")
"""The beginning of a line of docs/design.md that lists something: `path`, or `stream, opening`."""
INDENTATION = 2
DESCRIPTIONS = 18
"""The column in which descriptions begin. A line that is empty up to there continues another."""


def _block(page: str, beginning: str) -> list[str]:
    """The lines of the page's block of code with this beginning."""
    _, found, rest = (ROOT / "docs" / page).read_text().partition(f"```\n{beginning}")
    assert found
    return (beginning + rest.partition("\n```")[0]).splitlines()


def _listed() -> list[str]:
    """What docs/design.md lists: folders with a slash, modules in Python, sources in C."""
    found: list[str] = []
    folders: list[str] = []  # that the line is in
    for line in _block("design.md", "_native/"):
        beginning = NAMES.match(line)
        if beginning is None or not line[:DESCRIPTIONS].strip():
            continue
        folders = folders[: len(beginning[1]) // INDENTATION]
        for name in beginning[2].split(", "):
            found.append("".join(folders) + name)
            if name.endswith("/"):
                folders.append(name)
    return found


def _in_python() -> set[str]:
    paths = [path.relative_to(ROOT / PACKAGE) for path in (ROOT / PACKAGE).rglob("*.py")]
    modules = {str(path.with_suffix("")) for path in paths if path.stem != "__init__"}
    folders = {f"{path.parent}/" for path in paths if path.stem == "__init__"}
    return modules | folders - {"./"}


def _sources(folder: Path) -> set[Path]:
    """The sources in C, without generated ones, and without a header of a source's own."""
    return {
        path
        for path in folder.glob("*.[ch]")
        if not path.name.startswith("_")
        and not (path.suffix == ".h" and path.with_suffix(".c").exists())
    }


def test_every_module_is_listed_once() -> None:
    listed = [each for each in _listed() if not each.startswith("_native/") or each == "_native/"]
    assert sorted(listed) == sorted(_in_python())


def test_every_folder_and_source_in_c_is_listed() -> None:
    listed = {each.removeprefix("_native/") for each in _listed() if each.startswith("_native/")}
    folders = {f"{path.name}/" for path in NATIVE.iterdir() if any(path.glob("*.h"))}
    sources = {path.name for path in _sources(NATIVE)}
    assert sorted((folders | sources) - listed) == []
    assert [name for name in sorted(listed) if not (NATIVE / name).exists()] == []


def test_folders_are_listed_from_the_lowest_to_the_highest() -> None:
    listed = [each.rstrip("/") for each in _listed() if each.count("/") == 1 and each[-1] == "/"]
    assert listed == [folder for folder in FOLDERS if folder]


def test_every_folder_of_tests_is_in_the_map() -> None:
    _, _, section = (ROOT / "docs" / "design.md").read_text().partition("\n## Tests\n")
    listed = re.findall(r"^\| `(\w+)/` \|", section, re.MULTILINE)
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/*.[pc]*") if path.is_file()}
    assert sorted(listed) == sorted(folders - {"__pycache__"})


def _software_modules() -> list[str]:
    lines = _block("software-device.md", "limits ")
    return [name for line in lines for name in re.split(r" {2,}", line)[0].split()]


def test_every_module_of_the_software_device_is_listed_once() -> None:
    found = {path.stem for path in _sources(NATIVE / "software")}
    assert sorted(_software_modules()) == sorted(found)


def test_a_module_of_the_software_device_includes_only_modules_above_it() -> None:
    listed = _software_modules()
    for place, module in enumerate(listed):
        for path in (NATIVE / "software").glob(f"{module}.[ch]"):
            included = re.findall(r'#include "(\w+)\.h"', path.read_text())
            ours = [each for each in included if each in listed]
            assert [each for each in ours if listed.index(each) > place] == [], path.name
