"""Notebook 03: a changed line of its cells changes what the text says."""

import ast

import pytest
import torch
from chapters import CellError, Chapter, body, defined, difference, fenced, read_chapter
from torch import nn

P = 1_199_882  # of ShallowNet
NEEDED = ["rank-batches", "cell-11", "cell-17"]  # by other cells; each test runs its own


@pytest.fixture(scope="module")
def chapter(tmp_path_factory):
    with Chapter("03", tmp_path_factory.mktemp("03") / "notebooks") as chapter:
        chapter.run_all(chapter.set_up_cells())
        chapter.run_all(NEEDED)
        yield chapter


def mean_losses(chapter) -> list[float]:
    return [sum(step) / len(step) for step in zip(*chapter.value("ranks['losses']"), strict=True)]


def failure(chapter, cell_id, changes=None) -> str:
    with pytest.raises(CellError) as failed:
        chapter.run(cell_id, changes)
    return f"{failed.value.message}\n{failed.value.traceback}"


@pytest.mark.long
def test_a_cell_run_twice_shows_the_same(chapter):
    chapter.run_twice(chapter.ranks_cells())
    assert chapter.others() == []
    assert len(chapter.twice) >= 10


def test_a_layer_that_is_not_resharded_keeps_its_weight(chapter):
    assert "it is [0] again" in chapter.run("unit-looked-at")
    assert "it is [3, 2] again" in chapter.run("unit-looked-at", {"unit-looked-at": ("unit.reshard()\n", "")})


def test_by_hand_equals_fully_shard(chapter):
    chapter.run("cell-17")
    fully_shard = mean_losses(chapter)
    chapter.run("cell-13")
    assert mean_losses(chapter) == pytest.approx(fully_shard, abs=1e-5)


def test_a_step_without_reshard_learns_the_same_and_holds_the_full_parameters(chapter):
    chapter.run_all(["cell-13", "held-by-hand"])
    losses = mean_losses(chapter)
    assert chapter.value("ranks['in_model']") == [0, 0]
    chapter.run_all(["cell-13", "held-by-hand"], {"cell-13": ("    unit.reshard()\n", "")})
    assert mean_losses(chapter) == pytest.approx(losses, abs=1e-5)
    assert chapter.value("ranks['in_model']") == [4 * P, 4 * P]
    chapter.run_all(["cell-13", "held-by-hand"])


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


def test_a_norm_is_partial_until_the_full_tensor_is_asked_for(chapter):
    chapter.run("cell-17")
    chapter.run("dtensor")
    chapter.execute("%%ranks\nterm, norm = weight.norm().item(), weight.norm().full_tensor().item()")
    terms, norms = chapter.value("[ranks['term'], ranks['norm']]")
    assert terms[0] != terms[1] and norms[0] == norms[1]
    assert sum(term**2 for term in terms) ** 0.5 == pytest.approx(norms[0], rel=1e-5), "each rank's is of its shard"


def test_without_a_root_the_ranks_drift_apart(chapter):
    chapter.run_all(["cell-17", "habit-root"])
    assert chapter.value("ranks['num_plain']") == [6, 6] and len(set(chapter.value("ranks['bias']"))) == 2
    line = "fully_shard(model.fc1, mesh=mesh)  # and the root is forgotten\n"
    fixed = f"{line}fully_shard(model, mesh=mesh)\n"
    chapter.run("habit-root", {"habit-root": (line, fixed)})
    assert chapter.value("ranks['num_plain']") == [0, 0]
    whole_bias = "model.features[0].bias.full_tensor()[0].item()"
    chapter.execute(
        chapter.source("habit-root", {"habit-root": (line, fixed)}).replace(
            "model.features[0].bias[0].item()", whole_bias
        )
    )
    assert len(set(chapter.value("ranks['bias']"))) == 1


# ---------------------------------------------------------------- what needs no rank


@pytest.mark.parametrize(
    "text, before, after",
    [
        ("cell-13-difference-text", ("02", "cell-20"), ("03", "cell-13")),
        ("cell-17-difference", ("03", "cell-13"), ("03", "cell-17")),
    ],
)
def test_the_text_shows_what_differs_between_the_loops(text, before, after):
    (shown,) = [cell for cell in read_chapter("03").cells if cell.id == text]
    one, other = (cell_of(*place) for place in (before, after))
    assert fenced(shown, "diff") == difference(one, other, "for parameter in model.parameters():\n")


def cell_of(number, cell_id):
    (cell,) = [cell for cell in read_chapter(number).cells if cell.id == cell_id]
    return cell


def units_on(world_size: int) -> list:
    """A layer of nine values as the `FlatUnit` of each rank."""
    names = {"torch": torch, "nn": nn}
    exec(ast.unparse(defined(body(read_chapter("03")), "FlatUnit")), names)

    def layer():
        made = nn.Linear(2, 3)
        made.weight.data = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        made.bias.data = torch.tensor([7.0, 8.0, 9.0])
        return made

    return [names["FlatUnit"](layer(), rank, world_size) for rank in range(world_size)]


def test_a_flat_unit_pads_with_zeros():
    units = units_on(4)  # 9 values become 12: shards of 3, the last of them all padding
    assert [unit.padding for unit in units] == [3] * 4
    assert [unit.shard.tolist() for unit in units] == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [0, 0, 0]]
    assert all(parameter.numel() == 0 for unit in units for parameter in unit.parameters)  # freed
    assert [units_on(count)[0].padding for count in (3, 1)] == [0, 0]
