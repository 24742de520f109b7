"""Notebook 03: a changed line of its cells changes what the text says; and its loops are those of the package."""

import ast

import pytest
from chapters import CellError, Chapter, body, contains, defined, read_chapter, statements, tree_of

from fsdp_helpers.teaching.lessons import by_hand

P = 1_199_882  # of ShallowNet


@pytest.fixture(scope="module")
def chapter(tmp_path_factory):
    with Chapter("03", tmp_path_factory.mktemp("03") / "notebooks") as chapter:
        chapter.run_all(chapter.set_up_cells())
        chapter.run_ranks_cells_twice()
        yield chapter


def mean_losses(chapter) -> list[float]:
    return [sum(step) / len(step) for step in zip(*chapter.value("ranks['losses']"), strict=True)]


def failure(chapter, cell_id, changes=None) -> str:
    with pytest.raises(CellError) as failed:
        chapter.run(cell_id, changes)
    return f"{failed.value.message}\n{failed.value.traceback}"


def test_a_cell_run_twice_shows_the_same(chapter):
    assert [cell_id for cell_id, (first, second) in chapter.twice.items() if first != second] == []
    assert len(chapter.twice) >= 10


def test_a_layer_that_is_not_resharded_keeps_its_weight(chapter):
    assert "it is [0] again" in chapter.run("unit-looked-at")
    assert "it is [3, 2] again" in chapter.run("unit-looked-at", {"unit-looked-at": ("unit.reshard()\n", "")})


def test_by_hand_equals_fully_shard_and_a_step_without_reshard_does_not(chapter):
    chapter.run("cell-17")
    fully_shard = mean_losses(chapter)
    chapter.run("cell-13")
    assert mean_losses(chapter) == pytest.approx(fully_shard, abs=1e-5)
    chapter.run("cell-13", {"cell-13": ("    unit.reshard()\n", "")})  # and the gradients stay, too, and add up
    assert max(abs(a - b) for a, b in zip(mean_losses(chapter), fully_shard, strict=True)) > 1e-3


def test_without_a_reduce_scatter_the_halves_are_no_all_reduce(chapter):
    same = "ranks['summed'][0].equal(ranks['full'][0])"
    chapter.run("cell-07")
    assert chapter.value(same) is True
    chapter.run("cell-07", {"cell-07": ("dist.reduce_scatter_tensor(shard, values)", "shard.zero_()")})
    assert chapter.value(same) is False


def test_without_fully_shard_there_is_no_dtensor(chapter):
    chapter.run("cell-17", {"cell-17": ("fully_shard(model, mesh=mesh)\n", "")})
    assert "has no attribute 'placements'" in failure(chapter, "dtensor")
    chapter.run_all(["cell-17", "dtensor"])
    assert sum(chapter.value("ranks['num_local']")) == P


def test_unshard_and_reshard_do_what_they_say(chapter):
    chapter.run("cell-17")
    assert "unsharded: DTensor" in chapter.run("unshard", {"unshard": ("model.unshard()\n", "")})
    assert "has no attribute 'to_local'" in failure(chapter, "unshard", {"unshard": ("model.reshard()\n", "")})


def test_without_fsdp1_each_rank_has_all_parameters(chapter):
    total = "sum(sum(sizes.values()) for sizes in ranks['fsdp1_sizes'])"
    line = "model = FullyShardedDataParallel(model, device_id=device, use_orig_params=True)\n"
    chapter.run_all(["fsdp1", "fsdp1-parameters"], {"fsdp1": (line, "")})
    assert chapter.value(total) == 2 * P
    chapter.run_all(["fsdp1", "fsdp1-parameters"])
    assert chapter.value(total) == P


def test_an_optimizer_built_in_time_learns(chapter):
    chapter.run("habit-optimizer")
    (early, *_) = chapter.value("ranks['early_losses']")
    assert len(set(early)) == 1
    line = "optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate)"
    chapter.run(
        "habit-optimizer",
        {
            "habit-optimizer": (
                f"{line}  # too early\nfully_shard(model, mesh=mesh)\n",
                f"fully_shard(model, mesh=mesh)\n{line}\n",
            )
        },
    )
    (in_time, *_) = chapter.value("ranks['early_losses']")
    assert in_time[0] == early[0] and in_time[-1] < in_time[0] - 0.05


def test_one_unit_instead_of_two(chapter):
    chapter.run("two-units")
    assert list(chapter.value("ranks['two_units'][0]").values()) == [3, 2]
    chapter.run("two-units", {"two-units": ("fully_shard(model.fc1, mesh=mesh)  # a unit\n", "")})
    assert list(chapter.value("ranks['two_units'][0]").values()) == [1, 1]


def test_a_step_has_two_collectives_and_its_optimizer_none(chapter):
    chapter.run_all(["cell-17", "comm-debug"])
    assert list(chapter.value("ranks['one_unit'][0]").values()) == [1, 1]


# ---------------------------------------------------------------- the same lines in cells and in the package


@pytest.mark.parametrize("cell_id, worker", [("cell-13", "train_fsdp_by_hand"), ("cell-17", "train_by_fully_shard")])
def test_the_loops_of_cells_are_those_that_are_compared(cell_id, worker):
    (cell,) = [cell for cell in body(read_chapter("03")) if cell.id == cell_id]
    assert contains(tree_of(cell), by_hand, worker)


def test_the_unit_of_the_cell_is_that_of_the_package():
    in_a_cell = without_annotations(defined(body(read_chapter("03")), "FlatUnit"))
    package = ast.parse(open(by_hand.__file__).read())
    (in_the_package,) = [node for node in package.body if getattr(node, "name", "") == "FlatUnit"]
    assert statements([in_a_cell]) == statements([without_annotations(in_the_package)])


def without_annotations(node):
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef):
            inner.returns = None
        if isinstance(inner, ast.arg):
            inner.annotation = None
    return node
