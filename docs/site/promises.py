"""The promises of docs/guarantees.md, and the tests that hold them: those with the marker
`promise`."""

import ast
import re
from pathlib import Path

__all__ = ("held_by", "page", "promises")

ROOT = Path(__file__).resolve().parents[2]
PROMISE = re.compile(r"^### (.+)$", re.MULTILINE)
NAMES = (ast.FunctionDef, ast.AsyncFunctionDef)


def promises() -> list[str]:
    """Return the names of the promises, in their order on the page."""
    return PROMISE.findall((ROOT / "docs/guarantees.md").read_text())


def held_by() -> dict[str, list[str]]:
    """Return the tests of each promise that a marker names."""
    found: dict[str, list[str]] = {}
    for path in sorted(ROOT.glob("tests/**/test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, NAMES):
                continue
            for each in node.decorator_list:
                if isinstance(each, ast.Call) and ast.unparse(each.func) == "pytest.mark.promise":
                    for promise in map(ast.literal_eval, each.args):
                        test = f"{path.relative_to(ROOT)}::{node.name}"
                        found.setdefault(promise, []).append(test)
    return found


def page() -> str:
    """Return the Markdown of the page that lists the tests of each promise."""
    tests = held_by()
    parts = ["# Promises and their tests", "[Guarantees](guarantees.md) states the promises."]
    for promise in promises():
        parts += [f"## {promise}", "\n".join(f"- `{test}`" for test in tests[promise])]
    return "\n\n".join(parts) + "\n"
