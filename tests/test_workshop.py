"""WORKSHOP.md: every section that it names is there, its minutes add up, and its commands exist."""

import re
from urllib.parse import unquote

from chapters import headings
from leftovers import PROJECT

NOTEBOOKS = PROJECT / "notebooks"
TEXT = (NOTEBOOKS / "WORKSHOP.md").read_text()
LINK = re.compile(r"\[[^\]]*\]\((?P<file>[^)#\s]*)#?(?P<anchor>(?:[^()\s]|\([^()]*\))*)\)")


def test_every_section_that_the_workshop_names_is_there():
    links = list(LINK.finditer(TEXT))
    assert [link[0] for link in links if not (NOTEBOOKS / link["file"]).exists()] == []
    anchored = [link for link in links if link["anchor"]]
    assert anchored
    assert [link[0] for link in anchored if unquote(link["anchor"]) not in headings(NOTEBOOKS / link["file"])] == []


def test_the_minutes_add_up():
    """A heading that ends in minutes promises the sum of its table's first column."""
    promises = 0
    for section in re.split(r"^#{2,3} ", TEXT, flags=re.MULTILINE):
        title = section.partition("\n")[0]
        if promised := re.search(r": (\d+) minutes$", title):
            assert int(promised[1]) == sum(map(int, re.findall(r"^\| (\d+) \|", section, flags=re.MULTILINE))), title
            promises += 1
    assert promises == 4


def test_every_command_exists():
    makefile, front = ((PROJECT / path).read_text() for path in ("Makefile", "fsdp_helpers/__main__.py"))
    targets, commands = (set(re.findall(rf"{how} ([a-z-]+)", TEXT)) for how in ("`make", "python -m fsdp_helpers"))
    assert {name for name in targets if not re.search(rf"^{name}:", makefile, flags=re.MULTILINE)} == set()
    assert len(commands) >= 3 and {name for name in commands if f'"{name}"' not in front} == set()
