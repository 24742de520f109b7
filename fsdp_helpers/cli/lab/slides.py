"""The notebooks as slides: `make slides`, one file per chapter, with reveal.js and all pictures embedded.

A chapter's slides are its title, then one or more per section: the heading, one sentence, and a figure or a small table
if the section has one. Code is shown only where a cell has the tag `slide`.
"""

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

import nbformat

from fsdp_helpers.cli.lab import pages
from fsdp_helpers.cli.lab.pages import PROJECT
from fsdp_helpers.cli.lab.run_notebooks import chosen

REVEAL = Path(__file__).resolve().parent / "reveal"
MAX_SLIDES = 25
CODE_TAG = "slide"
FEW_WORDS = 12  # fewer do not stand alone
LEFT_OUT = re.compile(r"Set-up|Check|Exercise|Build it|Take it home|If a step fails|As a command")
CLOSING = "What you can now say"
FIGURE, CODE, TABLE = "figure", "code", "table"
MAX_ROWS, MAX_COLUMNS, MAX_CHARACTERS = 9, 7, 800  # of a table that can be read from the last row
CODE_WIDTH, CODE_HEIGHT, MAX_CODE_PX, MIN_CODE_PX = 1_140, 500, 24, 14  # in pixels of a slide of 1,280 x 720
START = "Reveal.initialize({width: 1280, height: 720, margin: 0, center: false, hash: true, slideNumber: 'c/t', transition: 'none'});"


@dataclass(eq=False)  # two slides may look alike, and are still two
class Slide:
    """One slide: `sentence` is Markdown, `content` is HTML of the given kind, or empty."""

    title: str
    level: int
    sentence: str
    kind: str = ""
    content: str = ""


# ---------------------------------------------------------------- what is on them


def outline(notebook: nbformat.NotebookNode) -> list[Slide]:
    """Return the slides of a chapter, at most MAX_SLIDES, the title slide not included."""
    slides = [slide for slide in all_slides(notebook) if not LEFT_OUT.match(slide.title)]
    return shortened(slides)


def all_slides(notebook: nbformat.NotebookNode) -> Iterator[Slide]:
    """Yield a slide for each heading below the title, and more for the outputs its section shows.

    A listing gets its sentence from the prose before it, a figure or a table from the prose after it.
    """
    current, unread, announced = None, None, ""  # the section's first slide; a slide that no prose has read yet
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            reading, *sections = re.split(r"^(?=#{2,3} )", cell.source, flags=re.MULTILINE)
            announced = first_sentence(reading)
            if unread and announced:
                unread.sentence, unread = announced, None
            for section in sections:
                current, unread = _of_section(section), None
                announced = current.sentence
                yield current
        elif current:
            for kind, content in shown_by(cell):
                shown = current if not current.kind else Slide(current.title, current.level, announced)
                shown.kind, shown.content = kind, content
                if kind == CODE:
                    shown.sentence = announced
                unread = None if kind == CODE else shown
                if shown is not current:
                    yield shown


def _of_section(section: str) -> Slide:
    marks, title = re.match(r"(#+) (.+)", section).groups()
    text = section.partition("\n")[2]
    sentence = text.strip() if title == CLOSING else first_sentence(text)
    return Slide(title, len(marks), sentence)


def first_sentence(text: str) -> str:
    """Return the first sentence of prose, with the second if it is short; one ending in a colon only as a last resort."""
    blocks = filter(None, re.split(r"\n\s*\n", text.strip()))
    prose = [block for block in blocks if not re.match(r"[|#>]|```|<|- |\d+\. ", block)]
    sentences = [one for block in prose for one in re.split(r"(?<=[.?!])\s+(?=[A-Z`*\"(])", block.replace("\n", " "))]
    whole = [one.strip() for one in sentences if one.strip() and not one.strip().endswith(":")]
    if not whole:
        return sentences[-1].strip().rstrip(":") + "." if sentences else ""
    return " ".join([whole[0], *whole[1 : 1 + (len(whole[0].split()) < FEW_WORDS)]])


def shown_by(cell: nbformat.NotebookNode) -> Iterator[tuple[str, str]]:
    """Yield kind and HTML of the outputs of a code cell that belong on a slide."""
    tags = cell.metadata.get("tags", [])
    if "exercise" in tags:
        return
    for output in cell.outputs:
        data = output.get("data", {})
        if "image/png" in data:
            words = escape(output.metadata.get("image/png", {}).get("alt", ""), quote=True)
            yield FIGURE, f'<img alt="{words}" src="data:image/png;base64,{data["image/png"].strip()}">'
        elif data.get("text/html", "").startswith("<img "):
            yield FIGURE, data["text/html"]
        elif CODE_TAG in tags and "text/html" in data:
            yield CODE, _fitted(data["text/html"], data["text/plain"])
        elif fits_on_a_slide(table := data.get("text/markdown", "")):
            yield TABLE, _without_links(pages.markdown_body(table))


def fits_on_a_slide(table: str) -> bool:
    lines = table.strip().splitlines()
    is_table = len(lines) > 2 and all(line.startswith("|") for line in lines)
    if not is_table:
        return False
    words = re.sub(r"\]\([^)]*\)", "]", table)  # without the addresses of links
    return len(lines) - 2 <= MAX_ROWS and lines[0].count("|") - 1 <= MAX_COLUMNS and len(words) <= MAX_CHARACTERS


def _fitted(listing: str, text: str) -> str:
    """Return a listing in the largest font size in which every line fits on the slide."""
    lines = text.splitlines()
    size_px = min(CODE_WIDTH / (0.61 * max(map(len, lines))), CODE_HEIGHT / (1.4 * len(lines)), MAX_CODE_PX)
    if size_px < MIN_CODE_PX:
        raise ValueError(
            f"a listing of {len(lines)} lines, the longest with {max(map(len, lines))} characters, is too large for a "
            f"slide: take the tag {CODE_TAG!r} from its cell"
        )
    return f'<div class="listing" style="font-size:{size_px:.1f}px">{listing}</div>'


def shortened(slides: list[Slide]) -> list[Slide]:
    """Leave out what a chapter needs least until there are few enough slides: tables, subsections, second figures."""
    first_of = {slide.title: slide for slide in reversed(slides)}

    def importance(slide: Slide) -> int:
        if slide.title == CLOSING or slide.kind == CODE:
            return 4
        is_first = first_of[slide.title] is slide
        if slide.kind == FIGURE:
            return 3 if is_first else 2
        return 0 if not is_first else slide.level == 2

    kept = list(slides)
    while len(kept) > MAX_SLIDES - 1:
        least = min(reversed(kept), key=importance)
        kept.remove(least)
    return [slide for slide in kept if slide.sentence or slide.content]


# ---------------------------------------------------------------- as HTML


def deck(notebook: nbformat.NotebookNode) -> str:
    """Return the slides of a chapter as one page."""
    sections = [title_slide(notebook), *map(as_section, outline(notebook))]
    script = f"<script>{(REVEAL / 'reveal.js').read_text()}</script>\n<script>{START}</script>"
    body = f'<div class="reveal"><div class="slides">\n{"".join(sections)}</div></div>\n{script}'
    return pages.page(pages.title_of(notebook), body, REVEAL / "reveal.css", pages.STYLES / "slides.css")


def title_slide(notebook: nbformat.NotebookNode) -> str:
    """Return the title, the question and the objectives, without the notebook's opening picture and its caption."""
    text = re.split(r"^\*Builds on|^## ", notebook.cells[0].source, flags=re.MULTILINE)[0]
    text = re.sub(r"^!\[[^\]]*\]\([^)]*\)\n+(\*.*\*\n)?", "", text, flags=re.MULTILINE)
    return f'<section class="title">{_without_links(pages.markdown_body(text))}</section>\n'


def as_section(slide: Slide) -> str:
    sentence = _without_links(pages.markdown_body(slide.sentence)) if slide.sentence else ""
    heading = _without_links(pages.markdown_body(f"## {slide.title}"))
    return f'<section class="{slide.kind or "words"}">{heading}{sentence}{slide.content}</section>\n'


def _without_links(body: str) -> str:
    """Return HTML without links, which are useless on a projector, and without the marks of headings."""
    return re.sub(r"</?a\b[^>]*>", "", re.sub(r'<a class="anchor-link".*?</a>', "", body))


def main() -> None:
    parser = argparse.ArgumentParser(description="The notebooks as slides to project.")
    parser.add_argument("names", nargs="*", help="first characters of the notebooks' names, such as 03 (default: all)")
    parser.add_argument(
        "--to", type=Path, default=PROJECT / "slides", metavar="DIR", help="folder to write to (default: slides/)"
    )
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    for path in chosen(options.names):
        written = options.to / f"{path.stem}.html"
        written.write_text(deck(nbformat.read(path, as_version=4)))
        print(written, flush=True)


if __name__ == "__main__":
    main()
