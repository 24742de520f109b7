"""What README promises about its two scripts is what they say."""

import difflib
import re
import sys
from unittest.mock import patch

import nbformat
from leftovers import PROJECT

README = (PROJECT / "README.md").read_text()
TAKE_HOME = PROJECT / "notebooks" / "take_home"


def code_of(name: str) -> list[str]:
    """The lines of a script, without its docstring, comments and blank lines."""
    code = (TAKE_HOME / name).read_text().split('"""\n', 1)[1]
    lines = [line.partition("  #")[0].rstrip() for line in code.splitlines()]
    return [line for line in lines if line and not line.lstrip().startswith("#")]


def test_the_difference_between_ddp_and_fsdp2_is_the_whole_difference():
    (block,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    shown = [line for line in block.splitlines() if line]
    changes = list(difflib.unified_diff(code_of("ddp.py"), code_of("fsdp2.py"), n=0, lineterm=""))[2:]
    assert [line for line in shown if line[0] in "+-"] == [line for line in changes if line[0] in "+-"]
    assert [line[1:] for line in shown if line[0] == " " and line[1:] not in code_of("fsdp2.py")] == []


def test_the_picture_of_peaks_is_in_the_saved_output_of_04():
    with patch("sys.path", [str(PROJECT / "docs"), *sys.path]):
        from figures import PICTURE, saved_picture
    assert PICTURE.read_bytes() == saved_picture(), "make figures takes it from there"


def test_every_picture_has_a_description_and_is_there():
    for described, path in re.findall(r"!\[(.*?)\]\((.*?)\)", README):
        assert len(described) > 40 and (PROJECT / path).is_file(), path


def test_each_chapter_asks_the_readmes_question_and_names_no_times():
    asked = {}
    for path in sorted((PROJECT / "notebooks").glob("[0-9][0-9]_*.ipynb")):
        first = nbformat.read(path, as_version=4).cells[0].source
        (asked[path.name],) = re.findall(r"^\*\*Question: (.*)\*\*$", first, re.MULTILINE)
        assert not re.search(r"\b(seconds?|minutes?|hours?)\b", first), f"{path.name}: README's table has the times"
    in_table = dict(re.findall(r"^\| \[\d\d [^\]]*\]\(notebooks/([^)]*)\) \| (.*?) \|", README, re.MULTILINE))
    in_table = {name: text.partition(" (`make xla`")[0] for name, text in in_table.items()}
    assert asked == in_table
