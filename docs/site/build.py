"""Build the documentation site: `make docs`. Every warning is an error.

The pages of docs/ are copied to build/docs/source, the generated ones are written beside them, and
Sphinx builds build/docs/html from both.
"""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from sphinx.cmd.build import main as sphinx

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from docs.site import promises, reference  # noqa: E402
from docs.site.navigation import PLACES, navigation  # noqa: E402

TARGET = ROOT / "build" / "docs"
SOURCE = TARGET / "source"

_BLOCK = re.compile(r"^```(\w+) (\w+)\n", re.MULTILINE)
_OUTPUT = re.compile(r"(^```python \w+\n(?:(?!^```).*\n)*^```\n\n)^```text\n", re.MULTILINE)
_PICTURE = re.compile(r"^!\[([^\]]*)\]\((images/[\w-]+\.svg)\)$", re.MULTILINE)
_BARE_LINK = re.compile(r"\[[\w./-]+\.md\]\(([\w./-]+\.md(?:#[\w-]+)?)\)")
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_EXAMPLE = re.compile(r"(?<![\w/(\[])`?examples/(\w+)\.py`?")
_PROGRAM = re.compile(r"^\[(examples/\w+\.py)\]\((?:\.\./)+\1\)$", re.MULTILINE)
"""A paragraph that is only the name of an example."""
_STYLE = re.compile(r"<style>.*?</style>\s*", re.DOTALL)
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?:examples|tests|aiordma)[^)]*\)")
CAPTIONS = {"test": "a test"}


def for_sphinx(text: str) -> str:
    """Return a page with captions over its programs, and without links to files that the site does
    not have."""
    text = _OUTPUT.sub("\\1```{code-block} text\n:caption: prints\n", text)
    text = _BLOCK.sub(_captioned, text)
    text = _BARE_LINK.sub(r"[](\1)", text)  # Sphinx writes the title of the page or section
    text = _PICTURE.sub(_inline, text)
    text = _PROGRAM.sub(_shown, text)
    for outside, page in PLACES.items():
        text = text.replace(f"]({outside})", f"]({page})")
    text = _OUTSIDE.sub(r"\1", text)
    parts = _FENCED.split(text)
    parts[::2] = [_EXAMPLE.sub(r"[examples/\1.py](#example-\1)", each) for each in parts[::2]]
    return "".join(parts)


def examples() -> str:
    """Return the page with the programs of examples/."""
    parts = ["# Examples", "Each of these programs runs in the tests."]
    for path in sorted((ROOT / "examples").glob("*.py")):
        source = path.read_text().rstrip()
        parts += [f"(example-{path.stem})=", f"## {path.name}", f"```python\n{source}\n```"]
    return "\n\n".join(parts) + "\n"


def _shown(match: re.Match[str]) -> str:
    """Put an example's program into the page that names it."""
    source = (ROOT / match[1]).read_text().rstrip()
    return f"```{{code-block}} python\n:caption: {match[1]}\n{source}\n```"


def _inline(match: re.Match[str]) -> str:
    """Put a picture into the page, without its own colours: it takes the theme's, light or dark."""
    picture = _STYLE.sub("", (ROOT / "docs" / match[2]).read_text())
    return f'```{{raw}} html\n<div class="picture">\n{picture.strip()}\n</div>\n```'


_ROW = re.compile(
    r"^\| (?P<c>[^|]+) \| (?P<link>\[(?P<page>\w+)\]\(\S+\)) "
    r"\| (?P<ours>.*) \| (?P<example>.*) \| [^|]+ \|$",
    re.MULTILINE,
)


def narrowed(text: str) -> str:
    """Return docs/verbs.md with tables that suit a page: without the tests, and with the link to
    the man page on the name of the C function."""

    def row(match: re.Match[str]) -> str:
        c, link, page = match["c"], match["link"], match["page"]
        c = c.replace(page, link, 1) if page in c else f"{c} ({link})"
        return f"| {c} | {match['ours']} | {match['example']} |"

    text = text.replace(
        "| C | man page | aiordma | example | tested by |", "| C | aiordma | example |"
    )
    return _ROW.sub(row, text).replace("|---|---|---|---|---|", "|---|---|---|")


def _captioned(match: re.Match[str]) -> str:
    language, role = match.groups()
    if role == "alone":
        return f"```{language}\n"
    return f"```{{code-block}} {language}\n:caption: {CAPTIONS.get(role, role)}\n"


def write(path: Path, text: str) -> None:
    """Write a page if it has changed: Sphinx reads again what is newer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def toctree(names: Iterable[str], *options: str) -> str:
    """Return a directive that puts pages into the table of contents."""
    return "\n".join(["", "```{toctree}", *options, "", *names, "```", ""])


def with_contents(pages: dict[str, str]) -> None:
    """Add the table of contents to the index pages."""
    for caption, names in navigation().items():
        pages["index"] += toctree(names, ":hidden:", f":caption: {caption}")
    for folder in ("cookbook", "post-mortems", "reference"):
        index = f"{folder}/index"
        inner = [name for name in pages if name.startswith(f"{folder}/") and name != index]
        if folder == "reference":
            inner = [f"{folder}/{key}" for key in reference.PAGES if key != "errors"]
        shown = ":hidden:" if folder == "cookbook" else ":maxdepth: 1"  # it has a table
        pages[index] += toctree([f"/{name}" for name in inner], shown)


def main() -> int:
    """Build the site, and return the exit status."""
    pages = {}
    for path in sorted((ROOT / "docs").rglob("*.md")):
        name = path.relative_to(ROOT / "docs").with_suffix("").as_posix()
        text = path.read_text()
        if name == "verbs":
            text = narrowed(text)
        pages[name] = for_sphinx(text)
    for key in reference.PAGES:
        if key == "errors":
            pages[key] += f"\n{reference.descriptions(key)}"
        else:
            pages[f"reference/{key}"] = reference.page(key)
    pages["reference/index"] = reference.INDEX
    pages["examples"] = examples()
    pages["promises"] = promises.page()
    for name in ("changelog", "contributing"):
        pages[name] = (ROOT / f"{name.upper()}.md").read_text().replace("](docs/", "](")
    with_contents(pages)
    for old in SOURCE.rglob("*.md"):
        if old.relative_to(SOURCE).with_suffix("").as_posix() not in pages:
            old.unlink()
    for name, text in pages.items():
        write(SOURCE / f"{name}.md", text)
    options = ["-q", "-j", "auto", "-E", "-a", "-W", "--keep-going"]
    options += ["-c", str(HERE), "-d", str(TARGET / "doctrees")]
    status = sphinx([*options, *sys.argv[1:], str(SOURCE), str(TARGET / "html")])
    if not status:
        print((TARGET / "html" / "index.html").relative_to(ROOT))
    return status


if __name__ == "__main__":
    sys.exit(main())
