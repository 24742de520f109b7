"""Chapter 04 with lines of its cells changed: what the text says will change does change."""

import pytest
from chapters import Chapter

FIRST_PART = ["blocks", "second-step", "choices", "auto-wrap", "auto-wrap-default"]
BY_HAND = ["empty-storage", "hooked-unit", "shard-by-hand", "units-compare"]
OF_FOUR = ["four-ranks", "knob", "lost-change"]


@pytest.fixture(scope="module")
def chapter(tmp_path_factory):
    with Chapter("04", tmp_path_factory.mktemp("chapter") / "04") as chapter:
        for cell_id in ("auto-wrap", "auto-wrap-default"):
            chapter.shrink(cell_id, ("DeepNet", "ShallowNet"))  # 1.2 million parameters instead of 94
        chapter.run_all(chapter.set_up_cells())
        *_, compared = chapter.run_all(FIRST_PART + BY_HAND)
        assert compared.count("True") == 2, "with nothing changed: the same losses, the same collectives"
        yield chapter


def rank_0(chapter, name):
    return chapter.value(f"ranks['{name}'][0]")


@pytest.mark.long
def test_a_cell_run_again_gives_the_same_output(chapter):
    ids = [cell_id for cell_id in chapter.ranks_cells() if cell_id in FIRST_PART + BY_HAND]
    assert ids == FIRST_PART + BY_HAND
    chapter.run_twice(ids)
    assert chapter.others() == []
    assert chapter.twice["units-compare"][0].count("True") == 2


def test_without_the_loop_over_blocks_there_is_one_unit(chapter):
    change = {"blocks": ("fully_shard(block, mesh=mesh)", "pass")}
    assert chapter.run("blocks", change).strip() == "['root']"


def test_every_unit_costs_two_gathers_and_a_reduction(chapter):
    assert [counts[:3] for counts in rank_0(chapter, "found").values()] == [(1, 1, 1), (9, 17, 9), (25, 49, 25)]
    changes = {"choices": ("lambda model: model.blocks,", "lambda model: model.blocks[:4],")}
    peak_bytes = rank_0(chapter, "found")["one per block"][3]
    chapter.run("choices", changes)
    *counts, fewer_peak_bytes = rank_0(chapter, "found")["one per block"]
    assert counts == [5, 9, 5], "half of the blocks are in the root now"
    assert fewer_peak_bytes > 1.1 * peak_bytes, "which is unsharded throughout"


def test_a_policy_makes_the_units_of_fsdp1(chapter):
    without = {"auto-wrap": ("auto_wrap_policy=at_least_20_000,", "")}
    chapter.run("auto-wrap")
    assert len(rank_0(chapter, "wrapped_units")) == 2, "fc1, and the root"
    chapter.run("auto-wrap", without)
    assert len(rank_0(chapter, "wrapped_units")) == 1


def test_a_parameter_in_place_of_a_storage_frees_nothing(chapter):
    assert rank_0(chapter, "num_bytes") == {"an empty parameter": 4 * 1024**2, "an empty storage": 0}
    chapter.run("empty-storage", {"empty-storage": ("full.untyped_storage().resize_(0)", "")})
    assert rank_0(chapter, "num_bytes")["an empty storage"] == 4 * 1024**2
    shown = chapter.run("empty-storage", {"empty-storage": ("dist.all_gather_into_tensor(full, shard)\n", "")})
    assert shown.count("False") == 1 and "True" not in shown, "without the all-gather, NaN on both ranks"


@pytest.mark.parametrize(
    "change, equal",
    [
        ({"hooked-unit": ("self.shard.grad /= self.world_size", "pass")}, [False, True]),
        (
            {"shard-by-hand": ("block.register_forward_hook(lambda *_, unit=unit: unit.reshard())", "pass")},
            [True, False],
        ),
        (
            {
                "shard-by-hand": (
                    "block.register_full_backward_pre_hook(lambda *_, before=before: before.start_unshard())",
                    "pass",
                )
            },
            [True, False],
        ),
    ],
    ids=["a sum in place of the mean", "no reshard after forward", "not one unit ahead"],
)
def test_a_unit_by_hand_with_a_line_changed_is_another(chapter, change, equal):
    """What is printed: the same losses, the same collectives in the same order."""
    try:
        shown = chapter.run_all(BY_HAND[1:], change)[-1]
        assert [line.endswith("True") for line in shown.splitlines()] == equal
    finally:
        chapter.run_all(["hooked-unit", "shard-by-hand"])


@pytest.mark.long
def test_four_ranks(chapter):
    chapter.run_all(OF_FOUR)
    try:
        knob = chapter.value("four['knob'][0]")
        assert [gathers for _, gathers, _ in knob.values()] == [8, 8, 0]
        assert chapter.run_all(["knob", "lost-change"]) == chapter.run_all(["knob", "lost-change"])
        lost, stays = chapter.value("four['swaps'][0]").values()
        assert lost["after the next reshard"] == lost["evaluated"] != stays["after the next reshard"]
        # The second reshard gives the memory back; the first one decides what becomes of the change.
        chapter.run("lost-change", {"lost-change": ("        if reshard_first:\n            layer.reshard()\n", "")})
        first, second = chapter.value("four['swaps'][0]").values()
        assert first == second == lost
        chapter.run("knob", {"knob": ("reshard_after_forward=choice", "reshard_after_forward=True")})
        assert len({kept for kept, _, _ in chapter.value("four['knob'][0]").values()}) == 1
    finally:
        chapter.execute("four.close()")
