"""The book: every link of it leads somewhere, it asks no other machine, and what is searched for can be found."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from bs4 import BeautifulSoup
from leftovers import PROJECT
from reading_pages import anchors, broken_links, loaded_files, parsed

from fsdp_helpers.cli.lab import book

NOTEBOOKS = sorted((PROJECT / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    """The whole book: links between chapters need all of them."""
    built = tmp_path_factory.mktemp("book")
    book.write_book(NOTEBOOKS, built)
    yield built
    parsed.cache_clear()


def test_every_chapter_is_there_and_every_link_leads_somewhere(folder):
    names = {path.stem for path in folder.glob("*.html")}
    assert names == {"index", "GLOSSARY", "WORKSHOP", *(path.stem for path in NOTEBOOKS)}
    assert broken_links(folder) == []
    contents = BeautifulSoup((folder / "index.html").read_text(), "html.parser").select(".contents a")
    assert len(contents) == len(names) - 1


def test_it_opens_from_its_folder_alone(folder):
    for path in folder.glob("*.html"):
        assert loaded_files(path.read_text()) == ["search.js"], path.name


def test_bold_words_lead_to_the_glossary(folder):
    page = (folder / "03_fsdp.html").read_text()
    assert 'href="GLOSSARY.html#word-all-gather"' in page
    assert "word-all-gather" in anchors((folder / "GLOSSARY.html").read_text())


def test_what_the_search_finds_is_on_the_page(folder):
    text = (folder / "search.js").read_text()
    sections = json.loads(re.match(r"const SECTIONS = (\[.*?\]);\n", text, flags=re.DOTALL)[1])
    assert any("reduce-scatter" in one["text"] for one in sections if one["page"] == "03_fsdp.html")
    ids = {page: anchors((folder / page).read_text()) for page in {one["page"] for one in sections}}
    assert [(one["page"], one["anchor"]) for one in sections if unquote(one["anchor"]) not in ids[one["page"]]] == []
    assert not any("<details>" in one["text"] for one in sections)


def test_a_link_that_leads_nowhere_is_found(folder, tmp_path):
    """One chapter without the glossary beside it: every other page would be parsed once more for nothing."""
    shutil.copy(folder / "03_fsdp.html", tmp_path)
    assert any("GLOSSARY.html" in link for link in broken_links(tmp_path))
