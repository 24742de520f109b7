"""The slides: few enough, with every figure that matters, and complete without a network."""

import nbformat
import pytest
from bs4 import BeautifulSoup
from leftovers import PROJECT
from reading_pages import loaded_files

from fsdp_helpers.cli.lab import slides

NOTEBOOKS = sorted((PROJECT / "notebooks").glob("*.ipynb"))
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8AAAAASUVORK5CYII="


def markdown(text: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_markdown_cell(text)


def figure(**metadata) -> nbformat.NotebookNode:
    drawn = nbformat.v4.new_output("display_data", {"image/png": PIXEL}, metadata={"image/png": {"alt": "a curve"}})
    return nbformat.v4.new_code_cell("draw()", outputs=[drawn], metadata=metadata)


def listing(text: str, **metadata) -> nbformat.NotebookNode:
    shown = nbformat.v4.new_output("execute_result", {"text/html": f"<pre>{text}</pre>", "text/plain": text})
    return nbformat.v4.new_code_cell("show.source(x)", outputs=[shown], metadata=metadata)


def table(num_rows: int, cell: str = "[1](x.ipynb)") -> nbformat.NotebookNode:
    text = "| a | b |\n| :-- | --: |\n" + f"| {cell} | 2 |\n" * num_rows
    return nbformat.v4.new_code_cell("t", outputs=[nbformat.v4.new_output("display_data", {"text/markdown": text})])


def notebook(*cells) -> nbformat.NotebookNode:
    return nbformat.v4.new_notebook(cells=[markdown("# 20 · Halves\n\n**Question: why?**\n\n## Set-up"), *cells])


def test_a_section_becomes_a_heading_a_figure_and_the_sentence_that_reads_it():
    told = "## Cutting\n\nHere is how:\n\nA cut has two ends, one for each of the ranks that share the whole. More."
    read = "The curve falls by half, and then it stays where it is to the end of the step. Then more."
    (one,) = slides.outline(notebook(markdown(told), figure(), markdown(read)))
    assert (one.title, one.kind) == ("Cutting", "figure")
    assert one.sentence == "The curve falls by half, and then it stays where it is to the end of the step."
    (alone,) = slides.outline(notebook(markdown(told)))
    assert alone.sentence == "A cut has two ends, one for each of the ranks that share the whole."


def test_a_heading_without_prose_has_no_sentence():
    heading = markdown("Read this.\n\n## Cutting")
    (shown,) = slides.outline(notebook(heading, figure()))
    assert (shown.sentence, shown.kind) == ("", "figure")
    assert slides.outline(notebook(heading, markdown("Read that."))) == []  # nothing to show


def test_what_is_not_taught_from_a_slide_is_left_out():
    done = slides.outline(
        notebook(
            markdown("## Idea\n\nOne sentence of some length stands here, and it stands alone on its slide."),
            listing("x = 1"),  # no tag
            table(num_rows=30),  # too long
            table(num_rows=3, cell="many words " * 40),  # too full
            markdown("## Check\n\nNothing."),
            figure(),
            markdown("## Exercises\n\n### Exercise 1 · Cut\n\nDo it."),
            markdown("## What you can now say\n\n- This.\n- That."),
        )
    )
    assert [(slide.title, slide.kind) for slide in done] == [("Idea", ""), ("What you can now say", "")]
    assert done[1].sentence == "- This.\n- That."


def test_a_small_table_is_shown_without_its_links():
    (one,) = slides.outline(notebook(markdown("## Idea\n\nSome words."), table(num_rows=3)))
    assert one.kind == "table" and "<td" in one.content and "<a" not in one.content


def test_code_is_shown_where_a_cell_has_the_tag_and_fits():
    tagged = {"tags": ["slide"]}
    (one,) = slides.outline(notebook(markdown("## Idea\n\nSome words."), listing("x = 1", **tagged)))
    assert one.kind == "code" and "x = 1" in one.content
    with pytest.raises(ValueError, match="a listing of 80 lines.* too large"):
        slides.outline(notebook(markdown("## Idea"), listing("x = 1\n" * 80, **tagged)))


def test_a_long_chapter_keeps_its_first_figures():
    sections = [
        cell for number in range(20) for cell in (markdown(f"## Part {number}\n\nWords."), figure(), table(3), figure())
    ]
    done = slides.outline(notebook(*sections, markdown("## What you can now say\n\n- All.")))
    assert len(done) == slides.MAX_SLIDES - 1
    assert {slide.title for slide in done if slide.kind == "figure"} == {f"Part {number}" for number in range(20)}
    assert done[-1].title == "What you can now say" and all(slide.kind != "table" for slide in done)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_chapter_has_few_slides_and_asks_no_other_machine(path):
    page = slides.deck(nbformat.read(path, as_version=4))
    soup = BeautifulSoup(page, "html.parser")
    shown = soup.select(".slides > section")
    assert 5 <= len(shown) <= slides.MAX_SLIDES == 25
    assert soup.find("h1").get_text().startswith(path.stem[:2])
    assert loaded_files(page) == []
    assert [link["href"] for link in soup.find_all("a", href=True)] == []
    assert all(section.find(["h1", "h2"]) for section in shown)
    assert len({str(section) for section in shown}) == len(shown), "no slide twice"
    assert "Reveal.initialize" in page and "Copyright (C) 2011" in page  # the library with its license's notice
