"""What README promises about its two scripts is what they say."""

import re
import sys
from unittest.mock import patch

from leftovers import PROJECT

README = (PROJECT / "README.md").read_text()
TAKE_HOME = PROJECT / "notebooks" / "take_home"


def code_of(name: str) -> list[str]:
    """The lines of a script, without comments."""
    return [line.partition("  #")[0].rstrip() for line in (TAKE_HOME / name).read_text().splitlines()]


def test_the_difference_between_ddp_and_fsdp2_is_the_whole_difference():
    (block,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    shown = [(line[0], line[1:]) for line in block.splitlines() if line]
    ddp, fsdp2 = code_of("ddp.py"), code_of("fsdp2.py")
    assert [line for sign, line in shown if sign in "- " and line not in ddp] == []
    assert [line for sign, line in shown if sign in "+ " and line not in fsdp2] == []
    assert [line for sign, line in shown if sign == "-" and line in fsdp2] == []
    assert [line for sign, line in shown if sign == "+" and line in ddp] == []


def test_the_picture_of_peaks_is_in_the_saved_output_of_04():
    with patch("sys.path", [str(PROJECT / "docs"), *sys.path]):
        from figures import PICTURE, saved_picture
    assert PICTURE.read_bytes() == saved_picture(), "make figures takes it from there"


def test_every_picture_has_a_description_and_is_there():
    for described, path in re.findall(r"!\[(.*?)\]\((.*?)\)", README):
        assert len(described) > 40 and (PROJECT / path).is_file(), path
