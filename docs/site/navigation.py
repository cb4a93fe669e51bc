"""The site's table of contents, which is the table of all pages in docs/index.md."""

import re
from pathlib import Path

__all__ = ("PLACES", "navigation")

INDEX = Path(__file__).resolve().parents[1] / "index.md"
PLACES = {
    "../examples/": "examples.md",
    "../CHANGELOG.md": "changelog.md",
    "../CONTRIBUTING.md": "contributing.md",
}
"""Where the site has what the repository has outside docs/."""
_ROW = re.compile(r"^\| ([A-Z][\w ]*) \| (.*) \|$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)]+)\)")


def navigation() -> dict[str, list[str]]:
    """Return the names of the pages of each row, and of those that only the site has."""
    _, _, table = INDEX.read_text().partition("\n## All pages\n")
    found = {
        caption: [PLACES.get(link, link).removesuffix(".md") for link in _LINK.findall(pages)]
        for caption, pages in _ROW.findall(table)
    }
    found["Look up"] = ["reference/index", *found["Look up"], "promises"]
    return found
