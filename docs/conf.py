"""Configuration of the documentation site; `scripts/docs` builds it."""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS), str(DOCS.parent / "src")]

import docstrings  # noqa: E402

from headwater.core.version import __version__  # noqa: E402

project = "Headwater"
author = "The Headwater developers"
copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["pictures/README.md"]
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!headwater\.).*"), (r"py:class", r"headwater\.optim\.schedules\..*")]
"""Names without a page here. A link to the pages of torch would need a file from the network."""

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 5

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"members": True}
default_role = "code"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"Headwater {release}"
html_static_path: list[str] = []
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
copybutton_prompt_text = "$ "


def setup(app: object) -> None:
    """Make docstrings, which are written in the syntax of Markdown, readable for autodoc."""
    docstrings.setup(app)
