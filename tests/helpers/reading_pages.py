"""What tests ask of a page of HTML that somebody will open without a network."""

import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote

from bs4 import BeautifulSoup
from leftovers import PROJECT

LOADING = {
    "script": "src",
    "img": "src",
    "link": "href",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "object": "data",
}


def build_book(folder: Path, read: Path) -> None:
    """Build the site as `make book` does: a reference that leads nowhere ends the build."""
    options = ["--quiet", "--fail-on-warning", "--keep-going", "--doctree-dir", str(read), "--conf-dir", "docs"]
    command = [sys.executable, "-m", "sphinx", *options, ".", str(folder)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@lru_cache(maxsize=24)
def parsed(page: str) -> BeautifulSoup:
    """A page as a tree; several tests ask of the same pages, and a chapter takes a second to parse."""
    return BeautifulSoup(page, "html.parser")


def loaded_files(page: str) -> list[str]:
    """Every address that a browser would load for the page, except what is inside it."""
    soup = parsed(page)
    found = [tag.get(attribute) for name, attribute in LOADING.items() for tag in soup.find_all(name)]
    styles = [*(tag.text for tag in soup.find_all("style")), *(tag["style"] for tag in soup.find_all(style=True))]
    for style in styles:
        found += re.findall(r"url\(['\"]?([^'\")]+)", style) + re.findall(r"@import\s+['\"]([^'\"]+)", style)
    return [address for address in found if address and not address.startswith("data:")]


def anchors(page: str) -> set[str]:
    return {unquote(tag["id"]) for tag in parsed(page).find_all(id=True)}


def broken_links(folder: Path) -> list[str]:
    """Links of a folder of pages that lead to no file of it, or to no anchor of the page that they name."""
    pages = {path.resolve(): path.read_text() for path in folder.rglob("*.html")}
    ids = {path: anchors(page) for path, page in pages.items()}
    broken = []
    for path, page in pages.items():
        for tag in parsed(page).find_all("a", href=True):
            address, _, anchor = tag["href"].partition("#")
            target = (path.parent / address).resolve() if address else path
            if re.match(r"[a-z]+:", address):
                continue  # a website, which nobody needs for reading
            if not target.exists() or (anchor and unquote(anchor) not in ids.get(target, {unquote(anchor)})):
                broken.append(f"{path.name}: {tag['href']}")
    return broken
