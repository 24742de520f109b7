"""The notebooks, the glossary and README as a site: `make book`. Nothing is executed, and nothing is fetched."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from pages import PYODIDE

project = html_title = "FSDP, learned by running it"
extensions = ["myst_nb", "pages"]
root_doc = "README"  # `make book` names its page index.html, too
include_patterns = ["*.md", "notebooks/[0-9][0-9]_*.ipynb", "notebooks/*.md", "docs/*.md"]
include_patterns += ["notebooks/failures/*", "notebooks/take_home/*.py"]
exclude_patterns = [".*", "work", "book", "data", "tests", "fsdp_helpers", "notebooks/*_before*"]
exclude_patterns += [] if PYODIDE.is_dir() else ["docs/w*.md"]
nb_execution_mode = "off"
nb_custom_formats = {".py": "pages.read_script"}
nb_render_markdown_format = "myst"  # links in tables that a cell printed, too
myst_heading_anchors = 4
myst_heading_slug_func = "pages.anchor_of"
suppress_warnings = ["misc.highlighting_failure"]  # an exercise's message is no Python
html_theme = "sphinx_book_theme"
html_theme_options = {"path_to_docs": "", "show_navbar_depth": 1, "use_download_button": False}
html_static_path = ["static"]
html_css_files = ["narrow.css"]
html_copy_source = html_show_copyright = html_show_sphinx = False
