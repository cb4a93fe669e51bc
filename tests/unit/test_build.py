"""A build without a header, or a compiler, says which package has it, as pip's last word."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.unit.sources import ROOT

pytestmark = pytest.mark.slow

COMPILER = """#!/bin/sh
case "$(cat)" in *"$MISSING"*) echo "$MISSING: No such file or directory" >&2; exit 1;; esac
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of what a build reads: builds write into their folder."""
    copy = tmp_path / "source"
    shutil.copytree(
        ROOT / "aiordma", copy / "aiordma", ignore=shutil.ignore_patterns("*.so*", "__pycache__")
    )
    for name in (
        "setup.py",
        "setup_binding.py",
        "pyproject.toml",
        "MANIFEST.in",
        "README.md",
        "LICENSE",
    ):
        shutil.copy(ROOT / name, copy)
    return copy


PIP = ("-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", ".")
SETUP = ("setup.py", "-q", "build_ext")


def build(
    source: Path, compiler: str, missing: str = "-", command: tuple[str, ...] = SETUP
) -> list[str]:
    """What a build that fails prints."""
    run = subprocess.run(
        [sys.executable, *command],
        cwd=source,
        env={**os.environ, "CC": compiler, "MISSING": missing},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode
    return (run.stdout + run.stderr).splitlines()


@pytest.fixture
def lacking(tmp_path: Path) -> str:
    """A compiler that does not find what the environment's MISSING is part of."""
    compiler = tmp_path / "cc"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    return str(compiler)


def test_a_missing_header_names_its_package(source: Path, lacking: str) -> None:
    line = build(source, lacking, "Python.h")[-1]
    assert line.startswith("error: aiordma cannot be compiled: missing C header: Python.h")
    assert "`apt-get install python3-dev` on Debian" in line
    assert "`dnf install python3-devel` on Fedora" in line


def test_pip_shows_which_header_is_missing(source: Path, lacking: str) -> None:
    shown = build(source, lacking, "Python.h", PIP)
    (line,) = [line for line in shown if "error: aiordma" in line]
    assert "apt-get install python3-dev`" in line


def test_no_source_includes_headers_of_rdma_core() -> None:
    sources = [path for path in (ROOT / "aiordma").rglob("*.[ch]") if path.name[0] != "_"]
    included = [re.findall(r"#include <(.*)>", path.read_text()) for path in sources]
    assert len(sources) > 50
    assert [name for names in included for name in names if name[:5] in ("infin", "rdma/")] == []


def test_a_missing_compiler_is_named(source: Path) -> None:
    line = build(source, "no-such-compiler -O2")[-1]
    assert "'no-such-compiler' cannot be run (No such file or directory)" in line
    assert "apt-get install gcc`" in line


RECORDING = """#!/bin/sh
echo "$@" >> "$RECORD"
while [ $# -gt 1 ]; do
    shift
    case "$last" in -o) : > "$1" ;; esac
    last="$1"
done
"""


@pytest.fixture
def recording(tmp_path: Path) -> dict[str, str]:
    """The environment of a build whose compiler makes empty files, and writes into the file RECORD
    how it is called."""
    compiler, record = tmp_path / "cc", tmp_path / "record"
    compiler.write_text(RECORDING)
    compiler.chmod(0o755)
    environment = {**os.environ, "CC": str(compiler), "RECORD": str(record)}
    environment.pop("AIORDMA_WERROR", None)
    return environment


@pytest.mark.parametrize("ours", [False, True])
def test_only_our_own_builds_fail_at_warnings(
    ours: bool, source: Path, recording: dict[str, str]
) -> None:
    # A newer compiler than ours warns of more, which must not keep anybody from installing.
    if ours:
        recording["AIORDMA_WERROR"] = "1"
    subprocess.run([sys.executable, *SETUP], cwd=source, env=recording, check=True, timeout=120)
    record = Path(recording["RECORD"]).read_text()
    compiled = [line for line in record.splitlines() if " -c " in line]
    # The software device is compiled twice: for Python, and for programs in C.
    for source_file, times in (("engine/port.c", 1), ("software/receive.c", 2)):
        calls = [line.split() for line in compiled if source_file in line]
        assert len(calls) == times
        assert all("-Wall" in words and ("-Werror" in words) is ours for words in calls)


def test_build_needs_no_plug_in_for_link_time_optimisation(
    source: Path, recording: dict[str, str]
) -> None:
    # A gcc without it fails at -flto: "could not run lto-wrapper".
    recording["CFLAGS"] = recording["LDFLAGS"] = ""
    subprocess.run([sys.executable, *SETUP], cwd=source, env=recording, check=True, timeout=120)
    record = Path(recording["RECORD"]).read_text()
    assert "engine/port.c" in record
    assert "-flto" not in record


def test_wheel_has_no_sources_of_its_extensions(
    source: Path, tmp_path: Path, recording: dict[str, str]
) -> None:
    command = (sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", tmp_path / "made")
    subprocess.run(command, cwd=source, env=recording, check=True, timeout=120)
    (archive,) = (tmp_path / "made").iterdir()
    with zipfile.ZipFile(archive) as packed:
        held = [Path(name) for name in packed.namelist()]
    files = {path for path in held if path.parts[0] == "aiordma"}
    assert {path.parts[0] for path in set(held) - files} == {"aiordma-0.1.0.dist-info"}
    assert {path.suffix for path in files} == {".py", ".pyi", ".so", ".1", ".typed"}
    native = {path.name.partition(".")[0] for path in files if path.parent.name == "_native"}
    assert native == {"__init__", "_binding", "_engine"}
    exported = {path.name for path in files if path.parent.name == "exported"}
    assert exported == {"libibverbs.so.1", "librdmacm.so.1"}


def test_source_distributions_hold_all_c_sources(source: Path, tmp_path: Path) -> None:
    command = (sys.executable, "setup.py", "-q", "sdist", "--dist-dir", tmp_path / "made")
    subprocess.run(command, cwd=source, check=True, timeout=120)
    (archive,) = (tmp_path / "made").iterdir()
    with tarfile.open(archive) as packed:
        held = {name.partition("/")[2] for name in packed.getnames()}
    native = source / "aiordma/_native"
    needed = {
        str(path.relative_to(source))
        for pattern in ("*.[ch]", "*.map")
        for path in native.rglob(pattern)
    }
    assert len(needed) > 50
    assert needed - held == set()
    assert {"aiordma/_native/_engine.pyi", "setup_binding.py"} <= held


METADATA = (
    "import sys; from setuptools.build_meta import prepare_metadata_for_build_wheel as prepare; "
    "prepare(sys.argv[1])"
)
REPOSITORY = "https://example.invalid/aiordma"


@pytest.mark.parametrize("repository", ["", REPOSITORY])
def test_each_link_of_the_packages_page_is_absolute(
    repository: str, source: Path, tmp_path: Path
) -> None:
    settings = source / "pyproject.toml"
    text = settings.read_text()
    assert text.count('\nrepository = ""\n') == 1
    settings.write_text(text.replace('repository = ""', f'repository = "{repository}"'))
    made = tmp_path / "made"
    made.mkdir()
    subprocess.run(
        [sys.executable, "-c", METADATA, made],
        cwd=source,
        check=True,
        timeout=120,
        stdout=subprocess.DEVNULL,
    )
    (file,) = made.rglob("METADATA")
    headers, _, page = file.read_text().partition("\n\n")
    readme = (source / "README.md").read_text()
    links = re.findall(r"\]\(([^)]+)\)", readme)
    assert links
    found = re.findall(r"\]\(([^)]+)\)", page)
    assert [link for link in found if not link.startswith("https://")] == []
    assert "Description-Content-Type: text/markdown" in headers
    urls = re.findall("^Project-URL: (.*), (.*)$", headers, re.MULTILINE)
    if repository:
        assert f"{REPOSITORY}/blob/main/docs/install.md" in found
        assert f"{REPOSITORY}/tree/main/examples/" in found
        assert len(found) == len(links)
        assert ("Repository", REPOSITORY) in urls
        for link in (*found, *(url for _, url in urls)):
            path = link.removeprefix(REPOSITORY).partition("#")[0].split("/main/")[-1]
            assert path in ("", "/issues") or (ROOT / path).exists(), link
    else:
        assert urls == []
        assert "docs/install.md has the rest" in page  # the text of a link remains


def test_source_distribution_builds_a_wheel(
    source: Path, tmp_path: Path, recording: dict[str, str]
) -> None:
    made = tmp_path / "made"
    sdist = (sys.executable, "setup.py", "-q", "sdist", "--dist-dir", made)
    subprocess.run(sdist, cwd=source, check=True, timeout=120)
    (archive,) = made.iterdir()
    words = ("--no-build-isolation", "--no-deps", "--no-index", "-q", "--wheel-dir", made)
    command = (sys.executable, "-m", "pip", "wheel", *words, archive)
    subprocess.run(command, cwd=tmp_path, env=recording, check=True, timeout=120)
    (wheel,) = made.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        held = {name for name in packed.namelist() if name.startswith("aiordma/")}
    ours = {str(path.relative_to(source)) for path in (source / "aiordma").rglob("*.py")}
    assert {name for name in held if name.endswith(".py")} == ours
    compiled = Path(recording["RECORD"]).read_text()
    sources = [path for path in (ROOT / "aiordma").rglob("*.c") if path.name[0] != "_"]
    assert [path.name for path in sources if f"/{path.name} " not in compiled] == []
