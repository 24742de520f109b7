"""WORKSHOP.md: every section that it names is there, its minutes add up, and its commands exist."""

import re
from pathlib import Path
from urllib.parse import unquote

import nbformat
from leftovers import PROJECT

NOTEBOOKS = PROJECT / "notebooks"
TEXT = (NOTEBOOKS / "WORKSHOP.md").read_text()
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<file>[^)#\s]*)#?(?P<anchor>(?:[^()\s]|\([^()]*\))*)\)")


def headings(path: Path) -> set[str]:
    """Return the anchors of a notebook's headings, as JupyterLab makes them."""
    cells = nbformat.read(path, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    unfolded = re.sub(r"<details>.*?</details>|```.*?```", "", text, flags=re.DOTALL)
    return {
        name.strip().replace("`", "").replace(" ", "-")
        for name in re.findall(r"^#{1,4} (.+)$", unfolded, flags=re.MULTILINE)
    }


def missing_places(text: str, folder: Path) -> list[str]:
    missing = []
    for found in LINK.finditer(text):
        path = folder / found["file"]
        if not path.exists() or found["anchor"] and unquote(found["anchor"]) not in headings(path):
            missing.append(found[0])
    return missing


def plans(text: str) -> dict[str, tuple[int, int]]:
    """Return for each heading that ends in minutes what it promises, and the sum of its table's first column."""
    found = {}
    for section in re.split(r"^#{2,3} ", text, flags=re.MULTILINE):
        title = section.partition("\n")[0]
        if promised := re.search(r": (\d+) minutes$", title):
            rows = re.findall(r"^\| (\d+) \|", section, flags=re.MULTILINE)
            found[title] = int(promised[1]), sum(map(int, rows))
    return found


def test_every_section_that_the_workshop_names_is_there():
    assert missing_places(TEXT, NOTEBOOKS) == []


def test_the_minutes_add_up():
    found = plans(TEXT)
    assert len(found) == 4
    assert {title: pair for title, pair in found.items() if pair[0] != pair[1]} == {}


def test_every_command_exists():
    targets = set(re.findall(r"`make ([a-z-]+)", TEXT))
    makefile = (PROJECT / "Makefile").read_text()
    assert {name for name in targets if not re.search(rf"^{name}:", makefile, flags=re.MULTILINE)} == set()
    front = (PROJECT / "fsdp_helpers" / "__main__.py").read_text()
    commands = set(re.findall(r"python -m fsdp_helpers ([a-z-]+)", TEXT))
    assert len(commands) >= 3 and {name for name in commands if f'"{name}"' not in front} == set()
