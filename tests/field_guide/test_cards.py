"""Each card has its parts, marks that pair and links that lead somewhere; scripts are short and stand alone."""

import ast
import re
import statistics

import pytest
from guide_cards import SCRIPTS

from fsdp_helpers.field_guide import BROKEN, FIXED, FOLDER, SYMPTOMS, cards, index

ALL = [pytest.param(card, id=card.name) for card in cards().values()]
PARTS = ("Why", "How to tell", "The fix", "Also seen as")
MOST_CARDS, MOST_LINES, MEDIAN_LINES = 142, 100, 50


@pytest.mark.parametrize("card", ALL)
def test_a_card_has_its_parts(card):
    lacking = [part for part in PARTS if not card.part(part)]
    if card.code and not re.search(r"^ {4}\S", card.part("What you see"), re.MULTILINE):
        lacking.append("What you see")
    if not card.code and not re.search(r"^Not run here\. ", card.text, re.MULTILINE):
        lacking.append("Not run here")
    assert lacking == [] and re.match(r"# \S.*\n\n\*\*Why\.\*\* ", card.text)


@pytest.mark.parametrize("card", ALL)
def test_its_links_lead_somewhere(card):
    targets = re.findall(r"\]\(([^)#\s]+\.(?:py|md|ipynb))[)#]", card.text)
    assert [target for target in targets if "://" not in target and not (FOLDER / target).exists()] == []


@pytest.mark.parametrize("card", SCRIPTS)
def test_its_marks_pair(card):
    """There are lines to delete or to add, the fix is at most twelve lines, and no mark has another form."""
    lines = card.code.splitlines()
    fixes = [line for line in lines if FIXED.search(line)]
    marks = [line for line in lines if re.search(r"#\s*(broken|fixed)\b", line, re.IGNORECASE)]
    assert marks == [line for line in lines if FIXED.search(line) or BROKEN.search(line)]
    assert marks and len(fixes) <= 12
    for script in (card.script(broken=True), card.script(fixed=True)):
        ast.parse(script)


@pytest.mark.parametrize("card", SCRIPTS)
def test_it_stands_alone(card):
    """Without the package, and with a proof of its own: an assertion at its end."""
    nodes = list(ast.walk(ast.parse(card.script(fixed=True))))
    imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert not [name for name in imported if name.startswith("fsdp_helpers")]
    assert re.search(r"\bassert(_close|_equal)?\b", card.script(fixed=True).rpartition("\n\n")[2]), "it proves nothing"


@pytest.mark.parametrize("card", SCRIPTS)
def test_it_destroys_its_group(card):
    """A rank that ends while gloo's thread completes a collective is aborted now and then, after a right result."""
    makes = re.search(r"^dist\.init_process_group|^mesh = .*init_device_mesh", card.code, re.MULTILINE)
    assert not makes or "destroy_process_group()" in card.script(fixed=True)


def test_the_scripts_are_short():
    lengths = {
        card.name: len((FOLDER / card.file).read_text("utf-8").splitlines()) for card in cards().values() if card.code
    }
    assert statistics.median(lengths.values()) <= MEDIAN_LINES, lengths
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def test_every_file_is_a_card():
    files = {path.name for path in FOLDER.iterdir() if path.is_file()} - {"README.md"}
    assert files == {card.file for card in cards().values()}, f"a name begins with one of {', '.join(SYMPTOMS)}"
    assert len(files) <= MOST_CARDS


def test_the_index_lists_every_card():
    assert (FOLDER / "README.md").read_text("utf-8") == index(), "run `make failures`"
