"""The site of `make book`: every link leads somewhere, no other machine is asked, and a search finds every chapter.

`make test-book` builds it in an environment that has Sphinx; anywhere else these tests are skipped.
"""

import json
import re
from pathlib import Path

import nbformat
import pytest
from bs4 import BeautifulSoup
from leftovers import PROJECT
from reading_pages import anchors, broken_links, build_book, loaded_files

from fsdp_helpers.field_guide import cards

pytest.importorskip("myst_nb", reason="Sphinx is missing: `make test-book` installs it")


@pytest.fixture(scope="module")
def book(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("book")
    build_book(folder, tmp_path_factory.mktemp("doctrees"))
    return folder


def test_every_chapter_is_there_and_every_link_leads_somewhere(book):
    chapters = {path.stem for path in (PROJECT / "notebooks").glob("[0-9][0-9]_*.ipynb")}
    assert {path.stem for path in (book / "notebooks").glob("*.html")} == {*chapters, "GLOSSARY", "WORKSHOP"}
    listed = BeautifulSoup((book / "README.html").read_text(), "html.parser").select("nav.bd-links a")
    assert {Path(link["href"]).stem for link in listed} >= {*chapters, "GLOSSARY", "WORKSHOP", "COMMANDS"}
    assert broken_links(book) == []


def test_every_failure_has_a_page_with_its_script_and_its_fix(book):
    pages = {path.stem: path.read_text() for path in (book / "notebooks" / "failures").glob("*-*.html")}
    assert set(pages) == set(cards())
    text = BeautifulSoup(pages["wrong-forgotten-root"], "html.parser").get_text()
    script = cards()["wrong-forgotten-root"].script(broken=True)
    assert all(line.strip() in text for line in script.splitlines()) and "The fix" in text
    messages = BeautifulSoup((book / "notebooks" / "failures" / "README.html").read_text(), "html.parser").get_text()
    assert [one for card in cards().values() for one in card.messages() if one not in messages] == []


def test_it_opens_from_its_folder_alone_and_every_picture_is_described(book):
    for path in book.rglob("*.html"):
        page = path.read_text()
        assert [one for one in loaded_files(page) if "://" in one] == [], path.name
        for picture in BeautifulSoup(page, "html.parser").select("article img"):
            assert len(words := picture.get("alt", "")) > 10, f"{path.name}: {picture['src'][:60]}"
            assert not words.endswith((".png", ".svg")), f"{path.name}: a file's name instead of a description"


def test_a_figure_has_the_description_of_its_cell(book):
    cells = nbformat.read(PROJECT / "notebooks" / "03_fsdp.ipynb", as_version=4).cells
    metadata = [one.get("metadata", {}).get("image/png", {}) for cell in cells for one in cell.get("outputs", [])]
    page = BeautifulSoup((book / "notebooks" / "03_fsdp.html").read_text(), "html.parser")
    assert {one["alt"] for one in metadata if "alt" in one} <= {one["alt"] for one in page.select("article img")}


def test_no_output_needs_a_kernel_and_no_exercise_shows_its_error(book):
    page = (book / "notebooks" / "03_fsdp.html").read_text()
    assert "widget-view" not in page and "Not yet:" not in page


def test_a_page_shows_what_its_cells_printed(book):
    cells = nbformat.read(PROJECT / "notebooks" / "03_fsdp.ipynb", as_version=4).cells
    shown = [cell for cell in cells if "exercise" not in cell.metadata.get("tags", [])]
    printed = [one.text for cell in shown for one in cell.get("outputs", []) if one.output_type == "stream"]
    text = BeautifulSoup((book / "notebooks" / "03_fsdp.html").read_text(), "html.parser").get_text()
    lines = [line for one in printed for line in one.splitlines() if line.strip()]
    assert lines and [line for line in lines if line not in text] == []


def test_bold_words_lead_to_the_glossary(book):
    assert 'href="GLOSSARY.html#word-all-gather"' in (book / "notebooks" / "03_fsdp.html").read_text()
    assert {"word-all-gather", "word-nccl", "word-zero-2"} <= anchors(
        (book / "notebooks" / "GLOSSARY.html").read_text()
    )


@pytest.mark.parametrize("word, chapter", [("gather", "03_fsdp"), ("debug", "11_when_it_breaks")])
def test_the_search_knows_the_words_of_a_chapter(book, word, chapter):
    text = (book / "searchindex.js").read_text()
    index = json.loads(re.match(r"Search\.setIndex\((.*)\)", text, re.DOTALL)[1])
    found = index["terms"][word]
    numbers = found if isinstance(found, list) else [found]
    assert f"notebooks/{chapter}" in [index["docnames"][number] for number in numbers]
