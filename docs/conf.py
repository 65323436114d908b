"""Settings of Sphinx for the manual: ``make docs``."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent

project = "reliable_mq"
author = "the authors of reliable_mq"
project_copyright = author
release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
version = release

extensions = ["myst_parser"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "reliable_mq"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_show_sourcelink = False
html_show_copyright = False

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]

nitpicky = True
pygments_style = "friendly"
pygments_dark_style = "monokai"
highlight_language = "text"
