"""Notebook 10: a changed line of its cells changes what the text says; and what its saved runs show."""

import json

import pytest
from chapters import NOTEBOOKS, Chapter

COPIES = ["four-ranks", "copies-mesh", "copies-apart", "copies-gaps"]
FOUR = "[ranks['apart'][rank][name] for rank in range(4) for name in ('a seed per shard', 'a seed per rank')]"


@pytest.fixture(scope="module")
def bandwidth():
    return json.loads((NOTEBOOKS / "reference/bandwidth.json").read_text())


@pytest.fixture(scope="module")
def chapter(tmp_path_factory):
    with Chapter("10", tmp_path_factory.mktemp("chapter") / "10") as chapter:
        chapter.run_all(["parameters", "imports", "config"])
        yield chapter


def test_copies_that_start_apart_stay_apart(chapter):
    chapter.run_all(COPIES)
    alike, apart = chapter.value(FOUR)[:2]
    assert alike == [0, 0] and apart[0] > 0.1 and apart[1] == pytest.approx(apart[0], rel=1e-3)
    decayed = {"copies-apart": ("lr=0.1)", "lr=0.1, weight_decay=1.0)")}
    chapter.run_all(COPIES[2:], decayed)
    alike, apart = chapter.value(FOUR)[:2]
    assert alike == [0, 0] and apart[1] < 0.9 * apart[0], "weight decay shrinks the gap"
    chapter.execute("ranks.close()")


@pytest.mark.long
def test_slurms_saved_losses_are_those_of_launch_and_each_launcher_names_rank_1(chapter):
    chapter.run_all(["by-launch", "one-agent", "two-agents", "same-losses", "slurm-record", "homes"])
    there, here = chapter.value("[losses['Slurm, two nodes'], losses['launch']]")
    assert there == pytest.approx(here, abs=1e-4), "on the bundled digits"
    assert chapter.value("[variables['RANK'] for variables in found.values()]") == ["1"] * 4


def test_hybrid_sharding_sends_a_third_over_the_cable_and_takes_less_than_half_as_long(bandwidth):
    full, hybrid = ({row["sharding"]: row for row in bandwidth["shardings"]}[name] for name in ("full", "hybrid"))
    assert hybrid["step_s"] < full["step_s"] / 2
    assert hybrid["cable_bytes_per_step"] < 0.4 * full["cable_bytes_per_step"]
