"""How Sphinx builds the site from these pages: make docs."""

import tomllib
from pathlib import Path

project = "tapfl"
author = copyright = "tapfl contributors"
release = tomllib.loads(
    (Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]["version"]

extensions = ["myst_parser"]
myst_heading_anchors = 4  # links to headings work as on GitHub
highlight_language = "none"  # a block without a language is a command or its output
nitpicky = True  # a link that leads nowhere is a fault; make docs turns faults into errors

html_theme = "furo"  # light and dark, readable on a phone
html_title = f"tapfl {release}"
html_copy_source = False
