"""Sphinx's configuration of the documentation site."""

from functools import cache
from importlib import metadata

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

import aiordma

project = "aiordma"
author = "the authors of aiordma"
copyright = author  # noqa: A001
version = release = metadata.version("aiordma")
html_title = f"aiordma {release}"
language = "en"

extensions = ["myst_parser", "sphinx_copybutton"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["misc.highlighting_failure"]
highlight_language = "text"
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
maximum_signature_line_length = 80

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["aiordma.css"]
html_theme_options = {"navigation_with_keys": True}
html_show_sourcelink = False
html_copy_source = False
html_show_sphinx = False
pygments_style = "tango"
pygments_dark_style = "monokai"
copybutton_exclude = ".linenos, .gp, .go"


class LinkNames(SphinxTransform):
    """Link the names of the public interface that a page has in `code` to the API reference."""

    default_priority = 400

    def apply(self, **_: object) -> None:
        """Replace the code by references."""
        known = _known_names()
        for literal in list(self.document.findall(nodes.literal)):
            if isinstance(literal.parent, nodes.reference | addnodes.pending_xref | nodes.title):
                continue
            text = literal.astext().removesuffix("()").removeprefix("aiordma.")
            scopes = _scopes(literal)
            target = next((each + text for each in scopes if each + text in known), None)
            if target is None:
                continue
            link = addnodes.pending_xref(
                "",
                refdomain="py",
                reftype="obj",
                reftarget=f"aiordma.{target}",
                refexplicit=True,
                refdoc=self.env.docname,
            )
            literal.replace_self(link)
            link += literal


def _scopes(node: nodes.Node) -> list[str]:
    """Return prefixes of names, the narrowest last: of the class and the module whose description
    in the API reference contains a node."""
    while node is not None:
        signature = isinstance(node, addnodes.desc) and node.next_node(addnodes.desc_signature)
        if signature:
            full = f"{signature['module']}.{signature['fullname']}".removeprefix("aiordma.")
            parts = full.split(".")
            return ["", *(".".join(parts[:length]) + "." for length in range(1, len(parts) + 1))]
        node = node.parent
    return [""]


@cache
def _known_names() -> set[str]:
    from docs.site import reference

    known = set(reference.public_names())
    for name in list(known):
        thing = reference.find(name)
        if isinstance(thing, type) and name != "EndOfStream":
            known |= {f"{name}.{each}" for each in reference.members(thing)}
    return known


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the transform."""
    assert aiordma.__all__
    app.add_transform(LinkNames)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
