"""The fuzzers link: what they have in place of the software device's threads is complete."""

import re

from tests.fuzz.__main__ import HERE, SOFTWARE, WITHOUT

CALL = re.compile(r"\b(sw_\w+)\(")
DEFINITION = re.compile(r"^[a-z][\w *]*\b(sw_\w+)\([^;]*?\)\n\{", re.MULTILINE)


def test_fuzzers_replace_each_function_of_the_threads() -> None:
    replaced = {name for file in WITHOUT for name in functions((SOFTWARE / file).read_text())}
    called = {
        name
        for path in (*SOFTWARE.glob("*.c"), *HERE.glob("*.c"))
        if path.name not in WITHOUT or path.parent == HERE
        for name in CALL.findall(path.read_text())
    }
    ours = {name for path in HERE.glob("*.c") for name in functions(path.read_text())}
    assert "sw_progress_is_looker" in replaced
    assert sorted(replaced & called - ours) == []


def functions(text: str) -> list[str]:
    """Return the names of the functions that a file defines for others."""
    return [name for name in DEFINITION.findall(text) if f"static {name}" not in text]
