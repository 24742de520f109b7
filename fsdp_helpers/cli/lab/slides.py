"""The notebooks as slides to project: `make slides` writes one file per chapter, with reveal.js and pictures embedded.

A chapter's slides are its title and the cells that are marked as slides in their metadata, by Jupyter's convention:
`"slideshow": {"slide_type": "slide"}` (in JupyterLab's right sidebar: Slide Type). A cell that draws a figure or a
table shows only that; any other code cell shows its code and its printed output. Content that doesn't fit on one slide
continues on the next.
"""

import argparse
import math
import re
from collections.abc import Callable, Iterator
from html import escape
from itertools import accumulate, groupby
from pathlib import Path

import nbformat
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import DiffLexer, PythonLexer

from fsdp_helpers.cli.lab import pages
from fsdp_helpers.cli.lab.pages import PROJECT
from fsdp_helpers.cli.lab.run_notebooks import notebooks_named

REVEAL = Path(__file__).resolve().parent / "reveal"
CODE_HEIGHT, CODE_WIDTH, TABLE_HEIGHT = 570, 1_160, 560  # in pixels: the room below the heading on a 1,280 x 720 slide
MIN_CODE_PX, MAX_CODE_PX = 18, 24  # readable from the back row
LINE, CHARACTER = 1.25, 0.61  # height of a line and width of a character, relative to the font size
ROW_PX, ROW_CHARACTERS = 38, 68  # the height of a one-line table row, and how many characters fit in its cells together
START = "Reveal.initialize({width: 1280, height: 720, margin: 0, center: false, hash: true, slideNumber: 'c/t', transition: 'none'});"
CLOCKED = re.compile(r"^.* ranks? on \w+: ended after .*$\n?", re.MULTILINE)
Body = tuple[str, str]  # a kind, which is a class in the style sheet, and HTML


def deck(notebook: nbformat.NotebookNode) -> str:
    """Return a chapter's slides as one HTML page."""
    sections = [title_slide(notebook), *(as_section(heading, body) for heading, body in slides_of(notebook))]
    script = f"<script>{(REVEAL / 'reveal.js').read_text()}</script>\n<script>{START}</script>"
    body = f'<div class="reveal"><div class="slides">\n{"".join(sections)}</div></div>\n{script}'
    return pages.page(pages.title_of(notebook), body, REVEAL / "reveal.css", pages.STYLES / "slides.css")


def slides_of(notebook: nbformat.NotebookNode) -> Iterator[tuple[str, Body]]:
    """Yield the section heading and the content of each slide after the title slide."""
    heading = ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            found = re.findall(r"^#{2,3} (.+)$", re.sub(r"```.*?```", "", cell.source, flags=re.DOTALL), re.MULTILINE)
            heading = found[-1] if found else heading
        if cell.metadata.get("slideshow", {}).get("slide_type") == "slide":
            bodies = of_text(cell.source) if cell.cell_type == "markdown" else of_code(cell)
            yield from ((heading, body) for body in bodies)


def of_text(source: str) -> Iterator[Body]:
    """Yield a Markdown cell's tables and listings or, if it has none, its text without the heading and folded sections.

    The questions and sources at the end of a chapter are left out.
    """
    source = re.split(r"^\*\*(?:Questions|Sources)\b", source, flags=re.MULTILINE)[0]
    text = re.sub(r"<details>.*?</details>|^#{1,3} [^\n]+$", "", source, flags=re.DOTALL | re.MULTILINE)
    listings = re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL)
    tables = re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)
    for language, code in listings:
        yield from of_listing(code, DiffLexer() if language == "diff" else PythonLexer())
    for table in tables:
        yield from of_table(table)
    if not listings and not tables:
        yield "words", pages.markdown_body(text.strip())


def of_code(cell: nbformat.NotebookNode) -> Iterator[Body]:
    shown = [body for output in cell.outputs for body in of_output(output)]
    if shown:
        yield from shown
        return
    printed = CLOCKED.sub("", "".join(map(printed_by, cell.outputs))).strip()
    yield from of_listing(cell.source, PythonLexer(), printed)


def of_output(output: nbformat.NotebookNode) -> Iterator[Body]:
    """Yield the figure or the tables in an output."""
    data = output.get("data", {})
    if "image/png" in data:
        words = escape(output.metadata.get("image/png", {}).get("alt", ""), quote=True)
        yield "figure", f'<img alt="{words}" src="data:image/png;base64,{data["image/png"].strip()}">'
    elif data.get("text/html", "").startswith("<img "):
        yield "figure", data["text/html"]
    elif "\n| :" in (text := data.get("text/markdown", "")):
        for title, table in re.findall(r"(?:^(\S.*)\n\n)?((?:^\|.*\n?)+)", text, re.MULTILINE):
            yield from of_table(table, title)


def printed_by(output: nbformat.NotebookNode) -> str:
    if output.output_type == "error":
        return f"{output.ename}: {output.evalue}\n"
    return output.get("text") or f"{output.get('data', {}).get('text/plain', '')}\n"


def of_table(table: str, title: str = "") -> Iterator[Body]:
    """Yield a table in parts that fit on a slide, each with the table's header row."""
    names, line, *rows = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", table).strip().splitlines()
    longest = [max(map(len, column)) for column in zip(*map(cells_of, [names, *rows]), strict=False)]
    widths = [max(1, ROW_CHARACTERS * length // sum(longest)) for length in longest]  # as a browser shares the room

    def height_of(row: str) -> float:
        return ROW_PX * (0.4 + 0.6 * max(map(wrapped, cells_of(row), widths)))

    for part in in_parts(rows, TABLE_HEIGHT - height_of(names), height_of):
        yield "table", pages.markdown_body("\n".join([*([title, ""] if title else []), names, line, *part]))


def cells_of(row: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip().strip("|"))]


def of_listing(code: str, lexer: PythonLexer | DiffLexer, printed: str = "") -> Iterator[Body]:
    """Yield code and its printed output in the largest type that fits on one slide, or split across several slides."""
    texts = [text for text in (code.strip("\n"), printed) if text]
    lines = "\n\n".join(texts).splitlines()
    size_px = min(CODE_WIDTH / (CHARACTER * max(map(len, lines))), CODE_HEIGHT / (LINE * len(lines)), MAX_CODE_PX)
    size_px = max(size_px, MIN_CODE_PX)
    per_line = int(CODE_WIDTH / (CHARACTER * size_px))

    def height_of(line: str) -> float:
        return LINE * size_px * wrapped(line, per_line)

    parts = [
        f'<pre class="{kind}" style="font-size:{size_px:.1f}px">{colored(part)}</pre>'
        for text, kind, colored in zip(texts, ("highlight", "printed"), (_colored(lexer), _plain), strict=False)
        for part in split_listing(text, CODE_HEIGHT, height_of)
    ]
    fits = sum(map(height_of, lines)) <= CODE_HEIGHT
    yield from (("code", part) for part in (["".join(parts)] if fits else parts))


def _colored(lexer: PythonLexer | DiffLexer) -> Callable[[list[str]], str]:
    return lambda lines: highlight("\n".join(lines), lexer, HtmlFormatter(nowrap=True))


def _plain(lines: list[str]) -> str:
    return escape("\n".join(lines))


def wrapped(text: str, per_line: int) -> int:
    """Return the number of lines that a text takes up with at most `per_line` characters per line."""
    return max(1, math.ceil(len(text) / per_line))


def in_parts(lines: list[str], room_px: float, height_of: Callable[[str], float]) -> Iterator[list[str]]:
    """Yield the lines in groups that are at most `room_px` high and as equal as possible; a line is never divided."""
    heights = list(map(height_of, lines))
    before = list(accumulate(heights, initial=0.0))
    for num_parts in range(1, len(lines) + 1):
        starts = [int(num_parts * before[number] / before[-1]) for number in range(len(lines))]
        parts = [list(part) for _, part in groupby(range(len(lines)), key=starts.__getitem__)]
        if all(sum(heights[number] for number in part) <= room_px for part in parts) or num_parts == len(lines):
            yield from ([lines[number] for number in part] for part in parts)
            return


def split_listing(text: str, room_px: float, height_of: Callable[[str], float]) -> Iterator[list[str]]:
    """Yield the lines in groups that are at most `room_px` high, split between methods if each method has the room."""
    blocks = re.split(r"\n\n(?= +(?:@|def |class ))", text)

    def height_of_block(block: str) -> float:
        return sum(map(height_of, block.splitlines())) + height_of("")

    if all(height_of_block(block) <= room_px for block in blocks):
        yield from ("\n\n".join(part).splitlines() for part in in_parts(blocks, room_px, height_of_block))
    else:
        yield from in_parts(text.splitlines(), room_px, height_of)


def title_slide(notebook: nbformat.NotebookNode) -> str:
    """Return a slide with the title, the question and the objectives, but not the opening picture and its caption."""
    text = re.split(r"^\*Builds on|^## ", notebook.cells[0].source, flags=re.MULTILINE)[0]
    text = re.sub(r"^!\[[^\]]*\]\([^)]*\)\n+(\*.*\*\n)?", "", text, flags=re.MULTILINE)
    return f'<section class="title">{_without_links(pages.markdown_body(text))}</section>\n'


def as_section(heading: str, body: Body) -> str:
    kind, content = body
    return f'<section class="{kind}">{_without_links(pages.markdown_body(f"## {heading}"))}{_without_links(content)}</section>\n'


def _without_links(body: str) -> str:
    """Return HTML without links, which are useless on a projector, and without the anchor marks on headings."""
    return re.sub(r"</?a\b[^>]*>", "", re.sub(r'<a class="anchor-link".*?</a>', "", body))


def main() -> None:
    parser = argparse.ArgumentParser(description="Turn the notebooks into slides to project.")
    parser.add_argument("names", nargs="*", help="first characters of the notebooks' names, such as 03 (default: all)")
    parser.add_argument(
        "--to", type=Path, default=PROJECT / "slides", metavar="DIR", help="folder to write to (default: slides/)"
    )
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    for path in notebooks_named(options.names):
        written = options.to / f"{path.stem}.html"
        written.write_text(deck(nbformat.read(path, as_version=4)))
        print(written, flush=True)


if __name__ == "__main__":
    main()
