"""The documentation site: `make docs` builds it into docs/_build, without a network."""

from __future__ import annotations

import os
import sys
import tempfile
import tomllib
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # generated.py
os.environ["UMBEL_HOME"] = tempfile.mkdtemp(prefix="umbel-docs-")  # for the notebook's data and runs

project = "umbel"
author = "the authors of umbel"
copyright = "the authors of umbel; Apache License 2.0"
with (HERE.parent / "pyproject.toml").open("rb") as file:
    version = release = tomllib.load(file)["project"]["version"]

extensions = [
    "generated",
    "myst_nb",
    "numpydoc",
    "sphinx.ext.autodoc",
]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
smartquotes = False  # an option begins with two hyphens
exclude_patterns = ["_build"]

# Markdown
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4  # as on a forge: a heading's text is its anchor
nb_execution_mode = "force"
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_output_stderr = "remove"  # the log of each run


# The API, from docstrings
default_role = "py:obj"  # `name` in a docstring
autodoc_typehints = "none"  # numpydoc shows the types that the docstring states
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
numpydoc_validation_checks: set[str] = set()
warnings.filterwarnings("ignore", category=DeprecationWarning)

# The pages
html_theme = "furo"
html_title = "umbel"
html_copy_source = False
html_show_search_summary = False  # it fetches pages, which a browser forbids for files
html_domain_indices = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["umbel.css"]
html_theme_options = {"top_of_page_buttons": []}
pygments_style = "tango"
pygments_dark_style = "monokai"
