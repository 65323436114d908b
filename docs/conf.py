"""Settings of Sphinx for the manual: ``make docs``."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent

project = "reliable_mq"
author = "the authors of reliable_mq"
project_copyright = author
release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
version = release

sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "_ext")]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "from_code"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "reliable_mq"
html_static_path = ["_static"]
html_css_files = ["manual.css"]
html_show_sourcelink = False
html_show_copyright = False

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]

nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(asyncio|collections|concurrent|pika|sqlalchemy)\..*"),  # documented elsewhere
    ("py:.*", r"reliable_mq\.(aio|connection|core|engine|sync)\..*"),  # inside, and not in the manual
]
pygments_style = "friendly"
pygments_dark_style = "monokai"
highlight_language = "text"

autoclass_content = "both"  # the options of some classes are described by their constructors
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"exclude-members": "__new__"}
default_role = "code"
napoleon_use_rtype = False
