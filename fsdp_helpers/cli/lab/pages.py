"""A notebook as one HTML page with its pictures and styles embedded, so that it can be viewed offline."""

import re
from base64 import b64encode
from collections.abc import Collection
from functools import cache
from html import escape
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter
from nbconvert.filters import markdown2html_mistune
from pygments.formatters import HtmlFormatter

PROJECT = Path(__file__).resolve().parents[3]
STYLES = Path(__file__).resolve().parent / "styles"
# Formats that a page can show, unlike a slider, which needs a kernel.
SHOWN = ("image/png", "text/html", "text/markdown", "text/plain")
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{styles}
</style>
</head>
<body>
{body}
</body>
</html>
"""


def page(title: str, body: str, *styles: Path) -> str:
    """Return a complete HTML page. `styles` are CSS files, which are added after the code colors."""
    sheets = [highlighting_styles(), *(path.read_text() for path in styles)]
    return PAGE.format(title=escape(title), styles="\n".join(sheets), body=body)


def notebook_body(notebook: nbformat.NotebookNode) -> str:
    """Return the cells and their outputs as HTML, without prompts, and with the same anchors as in JupyterLab."""
    exporter = HTMLExporter(template_name="basic", exclude_input_prompt=True, exclude_output_prompt=True)
    return exporter.from_notebook_node(notebook)[0]


def embed_pictures(body: str, folder: Path) -> str:
    """Return the page with embedded pictures, which are read from `folder`."""

    def embedded(found: re.Match) -> str:
        path = folder / found["file"]
        kind = "svg+xml" if path.suffix == ".svg" else path.suffix.removeprefix(".")
        return f'{found["before"]}src="data:image/{kind};base64,{b64encode(path.read_bytes()).decode()}"'

    return re.sub(r'(?P<before><img\b[^>]*?)src="(?P<file>[^":]+)"', embedded, body)


def markdown_body(text: str) -> str:
    """Return Markdown as the HTML that a notebook would show."""
    return markdown2html_mistune(text)


def keep_what_a_page_shows(notebook: nbformat.NotebookNode) -> None:
    """Remove outputs that need a kernel, and all outputs of exercises, which are for the reader to solve."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            solved_by_the_reader = "exercise" in cell.metadata.get("tags", [])
            cell.outputs = [] if solved_by_the_reader else [one for one in cell.outputs if _is_shown(one)]


def _is_shown(output: nbformat.NotebookNode) -> bool:
    if output.output_type not in ("display_data", "execute_result"):
        return True
    return "application/vnd.jupyter.widget-view+json" not in output.data and any(kind in output.data for kind in SHOWN)


def title_of(notebook: nbformat.NotebookNode) -> str:
    """Return the text of the first heading, such as "03 · FSDP"."""
    return notebook.cells[0].source.partition("\n")[0].removeprefix("# ").strip()


@cache
def highlighting_styles() -> str:
    return HtmlFormatter(style="default").get_style_defs(".highlight")


def link_to_pages(body: str, names: Collection[str]) -> str:
    """Return the page with links to the notebooks and Markdown files in `names` redirected to those files' pages.

    Links to any other files are removed.
    """

    def linked(found: re.Match) -> str:
        path, anchor = Path(found["address"]), found["anchor"]
        if ":" in found["address"] or not found["address"]:
            return found[0]  # a website, or an anchor on this page
        return (
            f'{found["before"]}href="{path.stem}.html{anchor}"' if path.stem in names and len(path.parts) == 1 else "<a"
        )

    return re.sub(r'(?P<before><a (?:class="[^"]*" )?)href="(?P<address>[^"#]*)(?P<anchor>[^"]*)"', linked, body)
