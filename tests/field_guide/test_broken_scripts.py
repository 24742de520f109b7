"""Each broken script fails as its card shows; and so does each script that has neither its broken lines nor its fix."""

import pytest
from guide_cards import SCRIPTS

from fsdp_helpers.field_guide import Card
from fsdp_helpers.teaching.run_failure import missing_lines, run


@pytest.mark.parametrize("card", SCRIPTS)
def test_the_broken_script_fails_as_its_card_shows(card):
    seen = run(card.name, card.script(broken=True))
    assert seen.errors, "it works"
    assert missing_lines(card, seen) == [], seen


@pytest.mark.parametrize("card", SCRIPTS)
def test_deleting_the_broken_lines_is_no_fix(card):
    without = card.script()
    if without != card.script(broken=True):
        assert run(card.name, without).errors


def test_a_line_that_no_rank_said_is_noticed():
    text = "# Title\n\n**What you see.**\n\n    ValueError: 1 of 2\n    AssertionError: 1 of 2\n"
    card = Card("crash-x", text, "assert False, '3 of 4'\n")
    seen = run(card.name, card.script(broken=True))
    assert missing_lines(card, seen) == ["ValueError: 1 of 2", "AssertionError: 1 of 2"]
    assert missing_lines(Card("crash-x", text.replace("1 of 2", "3 of 4"), card.code), seen) == ["ValueError: 3 of 4"]
