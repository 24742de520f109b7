"""The slides: the cells that say so, each with its code, table or figure, and complete without a network."""

import base64
import math
import re
import struct
from pathlib import Path

import nbformat
import pytest
from bs4 import BeautifulSoup
from leftovers import PROJECT
from reading_pages import loaded_files

from fsdp_helpers.cli.lab import slides
from fsdp_helpers.teaching.figures import style

NOTEBOOKS = sorted((PROJECT / "notebooks").glob("*.ipynb"))
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8AAAAASUVORK5CYII="
SLIDE = {"slideshow": {"slide_type": "slide"}}
PROJECTED = {  # what WORKSHOP projects, by chapter: words that its slides must have
    "02_ddp_baseline": ("%%ranks", "dist.all_reduce("),
    "10_many_machines": ("losses", "torchrun"),
    "11_when_it_breaks": ("TORCH_DISTRIBUTED_DEBUG=DETAIL", "faulthandler"),
    "14_moving_over": ("DistributedDataParallel", "fully_shard"),
}


def markdown(text: str, **metadata) -> nbformat.NotebookNode:
    return nbformat.v4.new_markdown_cell(text, metadata=metadata)


def code(source: str, output: nbformat.NotebookNode) -> nbformat.NotebookNode:
    return nbformat.v4.new_code_cell(source, outputs=[output], metadata=SLIDE)


def shown(*cells: nbformat.NotebookNode) -> list[tuple[str, str, str]]:
    """Heading, kind and text of each slide."""
    notebook = nbformat.v4.new_notebook(cells=[markdown("# 20 · Halves\n\n## Set-up"), *cells])
    found = slides.slides_of(notebook)
    return [(heading, kind, BeautifulSoup(body, "html.parser").get_text()) for heading, (kind, body) in found]


def test_a_cell_shows_its_figure_or_its_code_with_what_it_printed():
    figure = nbformat.v4.new_output("display_data", {"image/png": PIXEL}, metadata={"image/png": {"alt": "a curve"}})
    printed = nbformat.v4.new_output("stream", text="f, 2 ranks on cpu: ended after 1.0 s\nhalf: 0.5\n")
    left_out = nbformat.v4.new_code_cell("x = 1")
    done = shown(markdown("## Halves\n\n### Cutting"), code("draw()", figure), left_out, code("print(half)", printed))
    assert done == [("Cutting", "figure", ""), ("Cutting", "code", "print(half)\nhalf: 0.5")]


def test_long_code_goes_on_on_the_next_slide_in_type_that_can_be_read():
    source = "\n".join(f"x_{number} = {number}" for number in range(60))
    done = shown(code(source, nbformat.v4.new_output("stream", text="")))
    assert len(done) == 3 and "".join(text for _, _, text in done).split() == source.split()


def test_a_class_goes_on_between_two_methods():
    body = "        x = 1\n" * 8
    methods = "\n".join(f"    def method_{number}(self):\n{body}" for number in range(7))
    done = shown(code(f"class Long:\n{methods}", nbformat.v4.new_output("stream", text="")))
    assert len(done) > 1 and all(text.lstrip().startswith(("class", "def ")) for _, _, text in done)
    assert "".join(text for _, _, text in done).split() == f"class Long:\n{methods}".split()


def test_code_has_colors_and_differences_red_and_green():
    """Each class that the highlighter writes has a rule in the page's style, and the rule's selector finds it."""
    text = "# 20\n\n```diff\n-old = 1\n+new = 2\n```\n"
    cell = nbformat.v4.new_code_cell("for x in y: pass", metadata=SLIDE)
    page = slides.deck(nbformat.v4.new_notebook(cells=[markdown("# 20"), markdown(text, **SLIDE), cell]))
    soup, colors = BeautifulSoup(page, "html.parser"), {}
    for selector, color in re.findall(r"^(\.highlight \.\w+) \{ color: (#\w{6})", page, re.MULTILINE):
        colors |= {found.get_text().strip(): color for found in soup.select(selector)}
    assert colors["for"] == "#008000" and (colors["-old = 1"], colors["+new = 2"]) == ("#A00000", "#008400")


def test_a_table_has_no_links_and_goes_on_under_the_same_head():
    rows = "| [one](x.ipynb) | 2 |\n" * 40
    table = nbformat.v4.new_output("display_data", {"text/markdown": f"| name | n |\n| :-- | --: |\n{rows}"})
    done = shown(code("t", table))
    assert len(done) > 1 and sum(text.count("one") for _, _, text in done) == 40
    assert all("name" in text for _, _, text in done)


def test_a_row_is_as_high_as_its_highest_cell():
    """Short text wraps, too, in a column that a long one leaves little room."""
    long, narrow = ("| " + " | ".join("word " * n for n in counts) + " |\n" for counts in ((7, 5, 29), (1, 5, 1)))
    table = nbformat.v4.new_output(
        "display_data", {"text/markdown": f"| a | b | c |\n|{' :-- |' * 3}\n{long}{narrow * 8}"}
    )
    assert len(shown(code("t", table))) == 2


def test_text_is_shown_without_its_folds():
    text = "## What you can now explain\n\n- This.\n\n<details><summary>Answers</summary>No.</details>"
    ((heading, kind, said),) = shown(markdown(text, **SLIDE))
    assert (heading, kind, said.strip()) == ("What you can now explain", "words", "This.")


def test_no_text_of_a_figure_is_smaller_than_the_style_says():
    for path in Path(style.__file__).parent.glob("*.py"):
        assert re.findall(r"fontsize=|\"fontsize\"|labelsize", path.read_text()) == [], path.name


def text_sizes_px(section):
    """Return the size of the smallest text in each of a slide's plots: as large as the slide's width and height allow.

    A saved plot has 220 pixels per inch, and no text in it is smaller than the style's font size. The room is what the
    paddings and the heading in `styles/slides.css` leave.
    """
    heading = section.find("h2")
    room_px = 720 - 26 - 40 - (12 + 39 * math.ceil(len(heading.get_text()) / 58) if heading else 0)
    for image in section.find_all("img", src=re.compile("^data:image/png")):
        width, height = struct.unpack(">II", base64.b64decode(image["src"].partition(",")[2])[16:24])
        yield style.STYLE["font.size"] / 72 * 220 * min(1180 / width, room_px / height)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_chapter_shows_what_is_projected_and_asks_no_other_machine(path):
    page = slides.deck(nbformat.read(path, as_version=4))
    soup = BeautifulSoup(page, "html.parser")
    sections = soup.select(".slides > section")
    assert soup.find("h1").get_text().startswith(path.stem[:2]) and len(sections) >= 5
    assert sum(bool(one.find(["pre", "table", "img"])) for one in sections) >= len(sections) - 2
    assert loaded_files(page) == [] and soup.find_all("a", href=True) == []
    assert all(float(size) >= 18 for size in re.findall(r"font-size:([\d.]+)px", "".join(map(str, soup.select("pre")))))
    assert [size for one in sections for size in text_sizes_px(one) if size < 18] == []
    assert all(len(image["alt"]) > 10 for image in soup.find_all("img"))
    text = soup.get_text()
    assert [words for words in PROJECTED.get(path.stem, ()) if words not in text] == []
    assert "Reveal.initialize" in page and "Copyright (C) 2011" in page  # the library with its license's notice
