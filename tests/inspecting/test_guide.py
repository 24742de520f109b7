"""The field guide is the test set: silent failures are named by their own card, and nothing that works is blamed."""

import random

import pytest
from guide_cards import SCRIPTS
from inspected import TAKE_HOME, take_home, watch

from fsdp_helpers.field_guide import cards

LEAST_SHARE = 0.23
OWN_CHECK = "AssertionError: "  # a script that only its own last lines can tell from one that works
NOT_NAMED = {  # reason -> cards
    "the same lines are right elsewhere: it's a choice, or was meant": """memory-accumulation memory-activations
        slow-gather-every-micro-batch slow-many-units wrong-bf16-reduction wrong-filled-dict wrong-global-batch
        wrong-local-metric wrong-metric-order wrong-same-random-numbers wrong-sampler-padding wrong-summed-loss""",
    "it takes two runs, another job, an epoch, a failure or a step, which the script doesn't take": """memory-after-oom
        memory-loader-workers save-batch-size-changed save-schedule-lost save-two-writers slow-data-loader slow-straggler
        wrong-unwrapped-module""",
    "it happens when a script loads, saves or writes, where only torch.save of one path is looked at": """
        memory-every-rank-loads memory-full-state-dict save-average-lost save-not-loaded save-not-set
        save-plain-optimizer-state slow-every-rank-downloads wrong-every-rank-logs""",
    "rare, so a probe would mostly be code": """memory-default-threshold memory-frozen-in-fp32 memory-graph-kept
        slow-grad-strides slow-threads wrong-fp16-nan wrong-meta-buffers wrong-muon-local-rows wrong-schedule-per-rank
        wrong-schedule-steps wrong-unused-parameters wrong-unused-units""",
}


def is_silent(card) -> bool:
    shown = [line.strip() for line in card.part("What you see").splitlines() if line.startswith("    ")]
    own = bool(shown) and all(line.startswith(OWN_CHECK) for line in shown)
    return bool(card.code) and (
        card.name.startswith("wrong-") or own and card.name.startswith(("memory", "slow", "save"))
    )


SILENT = [name for name, card in cards().items() if is_silent(card)]
NAMED = sorted({*SILENT} - {*" ".join(NOT_NAMED.values()).split()})


def some_now(values: list, seed: int, num: int) -> list:
    """A few cases drawn by seed; the others are the long evidence."""
    now = random.Random(seed).sample(range(len(values)), num)
    return [
        pytest.param(*value.values, id=value.id, marks=value.marks if i in now else [*value.marks, pytest.mark.long])
        for i, value in enumerate(values)
    ]


def test_every_silent_failure_is_named_or_has_a_reason():
    assert len(NAMED) + len(" ".join(NOT_NAMED.values()).split()) == len(SILENT)
    assert len(NAMED) >= LEAST_SHARE * len(SILENT)


@pytest.mark.parametrize("card", some_now([one for one in SCRIPTS if one.id in NAMED], seed=1, num=6))
def test_a_silent_failure_is_named_by_its_own_card(card):
    found, records, _ = watch(f"{card.name}.py", card.script(broken=True))
    assert card.name in found and not any(record.troubles for record in records)


@pytest.mark.parametrize("card", some_now(SCRIPTS, seed=2, num=10))
def test_a_fixed_script_has_no_finding(card):
    found, records, printed = watch(f"{card.name}.py", card.script(fixed=True))
    assert found == {}, printed
    assert not any(record.troubles or record.end for record in records), printed


@pytest.mark.parametrize(
    "num_ranks", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("name", TAKE_HOME)
def test_a_take_home_script_has_no_finding(name, num_ranks, tmp_path):
    found, records, printed = watch(name, *take_home(name, tmp_path), num_ranks)
    assert (found, {record.end for record in records}) == ({}, {""}), printed
    assert not any(record.troubles for record in records) and records[0].num_steps
