"""The notebooks as printable pages: `make handouts` writes HTML and, if Chromium is on PATH, PDF.

python -m fsdp_helpers.cli.lab.handouts 03 04              # without solutions; hints are on separate pages
python -m fsdp_helpers.cli.lab.handouts 03 --solutions     # for the instructor
"""

import argparse
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

import nbformat

from fsdp_helpers.cli.lab import pages
from fsdp_helpers.cli.lab.pages import PROJECT
from fsdp_helpers.cli.lab.run_notebooks import FOLDER, notebooks_named

FOLDED = re.compile(r"<details><summary>(?P<title>[^<]*)</summary>(?P<text>.*?)</details>\n?", re.DOTALL)
PAPER = pages.STYLES / "paper.css"
HEADING = re.compile(r"^#{2,3} (.+)$", re.MULTILINE)
GLOSSARY = FOLDER / "GLOSSARY.md"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
PRINT_S = 120  # for one page, on a busy machine


def handout(notebook: nbformat.NotebookNode, *, solutions: bool, others: Collection[str] = ()) -> str:
    """Return a notebook as a printable page that links to the `others`. Hints come last, followed by any solutions."""
    hints, answers = [], []
    for exercise, title, text in remove_folded_sections(notebook):
        (answers if title in ("Solution", "Answers") else hints).append(f"**{exercise} · {title}.** {text.strip()}")
    notebook.cells += _section("Hints", hints)
    if solutions:
        notebook.cells += _section("Solutions", answers)
    pages.keep_what_a_page_shows(notebook)
    body = pages.link_to_pages(pages.embed_pictures(pages.notebook_body(notebook), FOLDER), others)
    return pages.page(pages.title_of(notebook), f"<main>\n{body}\n</main>", PAPER)


def remove_folded_sections(notebook: nbformat.NotebookNode) -> Iterator[tuple[str, str, str]]:
    """Remove the folded sections from the text; yield the exercise, title and text of each hint and solution."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for found in FOLDED.finditer(cell.source):
                exercise = (HEADING.findall(cell.source[: found.start()]) or ["Questions"])[-1]
                yield exercise, found["title"], found["text"]
            cell.source = FOLDED.sub("", cell.source)


def _section(title: str, texts: list[str]) -> list[nbformat.NotebookNode]:
    return [nbformat.v4.new_markdown_cell(f"## {title}"), *map(nbformat.v4.new_markdown_cell, texts)] if texts else []


def write_handouts(notebooks: list[Path], folder: Path, *, solutions: bool) -> Iterator[Path]:
    """Write a page for each notebook and one for the glossary that they link to; yield the paths of all pages."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {path.stem for path in (*notebooks, GLOSSARY)}
    for path in notebooks:
        written = folder / f"{path.stem}.html"
        written.write_text(handout(nbformat.read(path, as_version=4), solutions=solutions, others=names))
        yield written
    words = pages.link_to_pages(pages.markdown_body(GLOSSARY.read_text()), names)
    written = folder / f"{GLOSSARY.stem}.html"
    written.write_text(pages.page("Glossary", f"<main>\n{words}\n</main>", PAPER))
    yield written


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, CHROMIUM)), None)


def print_pdf(chromium: str, page: Path, pdf: Path) -> None:
    """Print a local page to a PDF, using the page's style sheet. Raises RuntimeError if Chromium fails."""
    with tempfile.TemporaryDirectory(prefix="fsdp_helpers-print-") as profile:
        command = [chromium, "--headless", "--disable-gpu", f"--user-data-dir={profile}", "--no-pdf-header-footer"]
        # Chromium requires this flag when it's run as root.
        command += ["--no-sandbox"] * (hasattr(os, "getuid") and os.getuid() == 0)
        command += [f"--print-to-pdf={pdf.resolve()}", page.resolve().as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PRINT_S)
    if done.returncode or not pdf.exists():
        raise RuntimeError(f"{chromium} didn't print {page}: {done.stderr.strip()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="first characters of the notebooks' names, such as 03 (default: all)")
    parser.add_argument("--solutions", action="store_true", help="add the solutions, on pages at the end")
    parser.add_argument(
        "--to", type=Path, default=PROJECT / "handouts", metavar="DIR", help="folder to write to (default: handouts/)"
    )
    options = parser.parse_args()
    chromium = find_chromium()
    for path in write_handouts(notebooks_named(options.names), options.to, solutions=options.solutions):
        if chromium:
            print_pdf(chromium, path, path.with_suffix(".pdf"))
        print(f"{path}{' and .pdf' if chromium else ''}", flush=True)
    if not chromium:
        print("no PDF: Chromium isn't on PATH; print the pages from any browser")


if __name__ == "__main__":
    main()
