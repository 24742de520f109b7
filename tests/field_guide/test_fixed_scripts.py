"""Each fixed script ends well, which it asserts itself in its last lines, even if a rank is late."""

import random

import pytest
from guide_cards import SCRIPTS

from fsdp_helpers.teaching.run_failure import run

LATE_S = 5.0
LATE = random.Random(11).sample(SCRIPTS, min(3, len(SCRIPTS)))


@pytest.mark.parametrize("card", SCRIPTS)
def test_the_fixed_script_gives_the_right_result(card):
    seen = run(card.name, card.script(fixed=True))
    assert not seen.errors, seen


@pytest.mark.parametrize("card", LATE)
def test_a_rank_that_is_late_does_not_fail_the_fixed_script(card):
    seen = run(card.name, card.script(fixed=True), late_s=LATE_S)
    assert not seen.errors, seen
