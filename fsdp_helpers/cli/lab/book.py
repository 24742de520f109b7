"""The executed notebooks as a small site: `make book`. It works from its folder, with navigation and search.

Every page is a notebook with its saved outputs, or one of the two Markdown files next to them. Bold words link to the
glossary. Building it executes no code, and no page loads anything from another machine.
"""

import argparse
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import quote

import nbformat

from fsdp_helpers.cli.lab import pages
from fsdp_helpers.cli.lab.pages import PROJECT
from fsdp_helpers.cli.lab.run_notebooks import FOLDER, chosen

TITLE = "FSDP, learned by running it"
MARKDOWN_PAGES = ("GLOSSARY", "WORKSHOP")
FOLDERS = ("take_home", "cluster")  # files that pages link to
SEARCH = Path(__file__).resolve().parent / "search.js"
DEFAULT_FOLDER = PROJECT / "book"
BOOK = pages.STYLES / "book.css"


@dataclass(frozen=True)
class Page:
    """One page of the book: its file's name without .html, its title, its text in Markdown and its body in HTML."""

    name: str
    title: str
    text: str
    body: str

    @property
    def sections(self) -> list[tuple[str, str]]:
        """Title and text of each section, the part before the first heading of the second level included."""
        parts = re.split(r"^(?=#{1,3} )", re.sub(r"```.*?```", "", self.text, flags=re.DOTALL), flags=re.MULTILINE)
        headed = (re.match(r"#+ (.+)\n?((?s:.*))", part) for part in parts)
        return [(found[1].strip(), found[2]) for found in headed if found]


def read_pages(notebooks: list[Path]) -> Iterator[Page]:
    for path in notebooks:
        notebook = nbformat.read(path, as_version=4)
        text = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
        pages.keep_what_a_page_shows(notebook)
        yield Page(path.stem, pages.title_of(notebook), text, pages.notebook_body(notebook))
    for name in MARKDOWN_PAGES:
        text = (FOLDER / f"{name}.md").read_text()
        yield Page(name, text.partition("\n")[0].removeprefix("# "), text, pages.markdown_body(text))


def anchor_of(title: str) -> str:
    """Return the anchor that a heading has on a notebook's page."""
    return quote(title.replace("`", "").replace(" ", "-"), safe="?$:,'()!&;=+@/")


# ---------------------------------------------------------------- words


def words_of(glossary: str) -> dict[str, str]:
    """Return each word of the glossary's table, in small letters, with its anchor."""
    cells = re.findall(r"^\| ([^|]+?) \|", glossary, flags=re.MULTILINE)
    words = (word.strip().lower() for cell in cells[1:] for word in cell.split(",") if not cell.startswith(":"))
    return {word: f"word-{re.sub(r'[^a-z0-9]+', '-', word)}" for word in words}


def link_words(body: str, words: dict[str, str]) -> str:
    def linked(found: re.Match) -> str:
        anchor = words.get(found[1].lower())
        return f'<a class="word" href="GLOSSARY.html#{anchor}">{found[0]}</a>' if anchor else found[0]

    return re.sub(r"<strong>([^<]+)</strong>(?![^<]*</a>)", linked, body)


def anchor_words(body: str, words: dict[str, str]) -> str:
    """Add anchors to the words of the glossary's table."""

    def anchored(found: re.Match) -> str:
        named = (f'<span id="{words[word.strip().lower()]}">{word}</span>' for word in found[2].split(","))
        return found[1] + ",".join(named) + found[3]

    return re.sub(r"(<tr>\s*<td[^>]*>)([^<]+)(</td>)", anchored, body)


# ---------------------------------------------------------------- pages


def navigation(book: list[Page], current: Page | None) -> str:
    items = []
    for page in book:
        chosen_one = ' aria-current="page"' if page is current else ""
        items.append(f'<li><a href="{page.name}.html"{chosen_one}>{escape(page.title)}</a>')
        if page is current:
            second = re.findall(r'<h2 id="([^"]+)">(.*?)<a class="anchor-link"', page.body)
            items.append(
                "<ul>" + "".join(f'<li><a href="#{anchor}">{name}</a></li>' for anchor, name in second) + "</ul>"
            )
        items.append("</li>")
    return (
        f'<nav><a class="home" href="index.html">{TITLE}</a>'
        '<input id="search" type="search" placeholder="Search" aria-label="Search all chapters"><ul id="found"></ul>'
        f"<ul>{''.join(items)}</ul></nav>"
    )


def framed(book: list[Page], current: Page | None, title: str, body: str) -> str:
    scripts = '<script src="search.js"></script>'
    return pages.page(title, f"{navigation(book, current)}\n<main>\n{body}\n</main>\n{scripts}", BOOK)


def neighbors(book: list[Page], page: Page) -> str:
    place = book.index(page)
    links = [
        f'<a href="{book[other].name}.html">{arrow.format(escape(book[other].title))}</a>'
        for other, arrow in ((place - 1, "← {}"), (place + 1, "{} →"))
        if 0 <= other < len(book)
    ]
    return f'<p class="neighbors">{" ".join(links)}</p>'


def first_page(book: list[Page]) -> str:
    """Return the table of contents: every chapter with its question."""
    rows = []
    for page in book:
        question = re.search(r"\*\*Question: (.+?)\*\*", page.text)
        rows.append(
            f'<li><a href="{page.name}.html">{escape(page.title)}</a> {escape(question[1]) if question else ""}</li>'
        )
    return f'<h1>{TITLE}</h1><ul class="contents">{"".join(rows)}</ul>'


def search_index(book: list[Page]) -> str:
    entries = [
        {
            "page": f"{page.name}.html",
            "anchor": anchor_of(title),
            "chapter": page.title,
            "title": title,
            "text": plain(text),
        }
        for page in book
        for title, text in page.sections
    ]
    return f"const SECTIONS = {json.dumps(entries, ensure_ascii=False)};\n{SEARCH.read_text()}"


def plain(text: str) -> str:
    """Return Markdown without its markup, in lowercase, for searching."""
    unmarked = re.sub(
        r"<[^>]+>|\]\([^)]*\)|[*`\[\]|#]", " ", re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL)
    )
    return " ".join(unmarked.lower().split())


def write_book(notebooks: list[Path], folder: Path) -> list[Path]:
    """Write the book into `folder`; return its pages."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FOLDERS:
        shutil.copytree(FOLDER / name, folder / name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    book = list(read_pages(notebooks))
    words = words_of((FOLDER / "GLOSSARY.md").read_text())
    names = {page.name for page in book}
    written = [folder / "index.html"]
    written[0].write_text(framed(book, None, TITLE, first_page(book)))
    for page in book:
        body = anchor_words(page.body, words) if page.name == "GLOSSARY" else link_words(page.body, words)
        body = pages.link_to_pages(pages.embed_pictures(body, FOLDER), names, FOLDERS)
        written.append(folder / f"{page.name}.html")
        written[-1].write_text(framed(book, page, page.title, body + neighbors(book, page)))
    (folder / "search.js").write_text(search_index(book))
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description="The executed notebooks as a small site.")
    parser.add_argument("names", nargs="*", help="first characters of the notebooks' names, such as 03 (default: all)")
    parser.add_argument(
        "--to", type=Path, default=DEFAULT_FOLDER, metavar="DIR", help="folder to write to (default: book/)"
    )
    options = parser.parse_args()
    written = write_book(chosen(options.names), options.to)
    print(f"{len(written)} pages; open {written[0]}")


if __name__ == "__main__":
    main()
