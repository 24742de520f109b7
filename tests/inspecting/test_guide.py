"""The field guide is the test set: silent failures are named by their own card, and nothing that works is blamed."""

import random

import pytest
from guide_cards import SCRIPTS
from inspected import TAKE_HOME, take_home, watch

from fsdp_helpers.field_guide import cards

LEAST_SHARE = 0.8
OWN_CHECK = "AssertionError: "  # a script that only its own last lines can tell from one that works
NOT_NAMED = {
    "memory-activations": "recomputation is a choice between memory and time",
    "memory-loader-workers": "copies of the names grow over an epoch, in processes of the loader",
    "save-batch-size-changed": "it takes two runs, and numbers that mean nothing by themselves",
    "save-two-writers": "the other run is another job",
    "slow-gather-every-micro-batch": "gathering again is a choice between memory and traffic",
    "slow-straggler": "the work of a rank is lengths in a list",
    "wrong-filled-dict": "the values in the dictionary are the model's parameters, whose use is normal",
    "wrong-global-batch": "a batch size is a choice; it takes a run on one rank to compare",
    "wrong-local-metric": "a rank's own number may be meant",
    "wrong-metric-order": "two tensors of one shape, reduced by one line, can't be told apart",
}


def is_silent(card) -> bool:
    shown = [line.strip() for line in card.part("What you see").splitlines() if line.startswith("    ")]
    own = bool(shown) and all(line.startswith(OWN_CHECK) for line in shown)
    return bool(card.code) and (
        card.name.startswith("wrong-") or own and card.name.startswith(("memory", "slow", "save"))
    )


SILENT = [name for name, card in cards().items() if is_silent(card)]


def some_now(values: list, seed: int, num: int = 10) -> list:
    """Ten cases drawn by seed; the others are the long evidence."""
    now = random.Random(seed).sample(range(len(values)), num)
    return [
        pytest.param(*value.values, id=value.id, marks=value.marks if i in now else [*value.marks, pytest.mark.long])
        for i, value in enumerate(values)
    ]


def test_most_silent_failures_are_named_and_the_rest_has_a_reason():
    assert set(NOT_NAMED) <= set(SILENT)
    assert len(SILENT) - len(NOT_NAMED) >= LEAST_SHARE * len(SILENT)


@pytest.mark.parametrize("card", some_now([one for one in SCRIPTS if one.id in {*SILENT} - {*NOT_NAMED}], seed=1))
def test_a_silent_failure_is_named_by_its_own_card(card):
    found, records, _ = watch(f"{card.name}.py", card.script(broken=True))
    assert card.name in found and not any(record.troubles for record in records)


@pytest.mark.parametrize("card", some_now(SCRIPTS, seed=2))
def test_a_fixed_script_has_no_finding(card):
    found, records, printed = watch(f"{card.name}.py", card.script(fixed=True))
    assert (found, [record.troubles for record in records], [record.end for record in records]) == (
        {},
        [{}] * 2,
        [""] * 2,
    ), printed


@pytest.mark.parametrize(
    "num_ranks", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("name", TAKE_HOME)
def test_a_take_home_script_has_no_finding(name, num_ranks, tmp_path):
    found, records, printed = watch(name, *take_home(name, tmp_path), num_ranks)
    assert (found, {record.end for record in records}) == ({}, {""}), printed
    assert not any(record.troubles for record in records) and records[0].seen["optimizer"]
