"""The project's own sources, parsed, for the tests that hold its rules."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "aiordma"


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text(), str(path))
    assert len(found) > 20, "these are not the sources"
    return found


def imported(tree: ast.AST) -> set[str]:
    """The modules that a tree imports, wherever in it: a.b for both `import a.b` and
    `from a import b` where a.b is a module of ours."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            assert node.module
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                names.add(submodule if submodule in modules() else node.module)
    return names


NATIVE = ROOT / PACKAGE / "_native"
C_FOLDERS = ("engine", "software")
EXPORTED = "exported"
"""The folder of C functions that programs call. Their declarations are in rdma-core's headers."""

# clang-format begins in the first column what is outside of functions, and nothing else.
_OUTSIDE = r"^(?!static|typedef|extern|PyMODINIT_FUNC)[A-Za-z][\w \n*]*?\b(\w+)"
_DEFINITION = re.compile(_OUTSIDE + r"(?:\([^;{}]*\)\n\{|(?:\[[^\]]*\])?(?: = |;))", re.MULTILINE)
_DECLARATION = re.compile(_OUTSIDE + r"\([^;{}]*\);", re.MULTILINE)
_EXTERN = re.compile(r"^extern ([^;]*);", re.MULTILINE)


@cache
def c_files(folder: str) -> dict[str, str]:
    """The C sources and headers of a folder of `_native`, without comments."""
    found = {
        path.name: re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
        for path in sorted((NATIVE / folder).glob("[!_]*.[ch]"))
    }
    assert len(found) > 5, "these are not the sources"
    return found


def included(text: str) -> set[str]:
    """The headers of the project that a C file includes, as it names them."""
    return set(re.findall(r'^#include "(.*)"', text, re.MULTILINE))


def defined(text: str) -> set[str]:
    """The functions and variables that a C source defines for other files."""
    return set(_DEFINITION.findall(text))


def declared(text: str) -> set[str]:
    """The functions that a C file declares, and what it declares as extern."""
    variables = [_words(each) for each in _EXTERN.findall(text)]
    return set(_DECLARATION.findall(text)).union(*variables)


def used(text: str) -> set[str]:
    """The names in a C file, except those of structures and in texts."""
    return _words(re.sub(r'"(\\.|[^"\\])*"|\b(struct|enum|union) \w+', "", text))


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))
