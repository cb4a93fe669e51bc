"""docs/design.md, docs/software-device.md and CONTRIBUTING.md list what is in the tree."""

import re
from pathlib import Path

from tests.unit.sources import PACKAGE, ROOT
from tests.unit.test_layers import FOLDERS

SOFTWARE = ROOT / PACKAGE / "_native" / "software"


def _folders(page: str, heading: str) -> list[str]:
    """Return the first column of the table of folders below a heading."""
    _, found, section = (ROOT / page).read_text().partition(f"\n## {heading}\n")
    assert found
    section = section.partition("\n## ")[0]
    return re.findall(r"^\| `(\w+)(?:/|\.py)` \|", section, re.MULTILINE)


def test_folders_are_listed_from_the_lowest_to_the_highest() -> None:
    assert _folders("docs/design.md", "Layers") == [folder for folder in FOLDERS if folder]


def test_every_folder_of_tests_is_in_the_map() -> None:
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/*.[pc]*") if path.is_file()}
    assert sorted(_folders("CONTRIBUTING.md", "Tests")) == sorted(folders - {"__pycache__"})


def _software_modules() -> list[str]:
    _, found, rest = (ROOT / "docs/software-device.md").read_text().partition("```\nlimits ")
    assert found
    return ["limits", *rest.partition("\n```")[0].split()]


def _sources(folder: Path) -> set[Path]:
    """The sources in C, without generated ones, and without a header of a source's own."""
    return {
        path
        for path in folder.glob("*.[ch]")
        if not path.name.startswith("_")
        and not (path.suffix == ".h" and path.with_suffix(".c").exists())
    }


def test_every_module_of_the_software_device_is_listed_once() -> None:
    assert sorted(_software_modules()) == sorted(path.stem for path in _sources(SOFTWARE))


def test_a_module_of_the_software_device_includes_only_modules_above_it() -> None:
    listed = _software_modules()
    for place, module in enumerate(listed):
        for path in SOFTWARE.glob(f"{module}.[ch]"):
            included = re.findall(r'#include "(\w+)\.h"', path.read_text())
            ours = [each for each in included if each in listed]
            assert [each for each in ours if listed.index(each) > place] == [], path.name
