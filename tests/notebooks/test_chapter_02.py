"""Notebook 02: a changed line of its cells changes what the text says."""

import pytest
from chapters import CellError, Chapter


@pytest.fixture(scope="module")
def chapter(tmp_path_factory):
    with Chapter("02", tmp_path_factory.mktemp("02") / "notebooks") as chapter:
        chapter.run_all(chapter.set_up_cells())
        chapter.run_all(["all-reduce", "cell-17", "cell-20", "one-process-batches", "one-process-norm"])
        yield chapter


def mean_losses(chapter) -> list[float]:
    return [sum(step) / len(step) for step in zip(*chapter.value("ranks['losses']"), strict=True)]


def difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def ddp_losses(chapter) -> list[float]:
    chapter.run("cell-24-ddp")
    return mean_losses(chapter)


@pytest.mark.long
def test_a_cell_run_twice_shows_the_same(chapter):
    chapter.run_twice(chapter.ranks_cells())
    assert chapter.others() == []
    assert len(chapter.twice) >= 5


def test_by_hand_equals_ddp(chapter, ddp_losses):
    chapter.run("cell-20")
    assert difference(mean_losses(chapter), ddp_losses) < 1e-5


def test_without_an_all_reduce_every_rank_learns_from_its_own_images(chapter, ddp_losses):
    line = "        dist.all_reduce(parameter.grad)  # the sum over all ranks ...\n"
    chapter.run("cell-20", {"cell-20": (line, "")})
    assert difference(mean_losses(chapter), ddp_losses) > 1e-2


def test_a_forgotten_division_is_hidden_by_adam_and_not_by_sgd(chapter, ddp_losses):
    line = "        parameter.grad /= world_size  # ... becomes the mean: the gradient of the whole global batch\n"
    chapter.run("cell-20", {"cell-20": (line, "")})
    assert 5e-6 < difference(mean_losses(chapter), ddp_losses) < 1e-2, "three decimals agree, and the Check refuses it"
    adam = "torch.optim.Adam(model.parameters(), lr=config.learning_rate, fused=True)  # one pass over all values"
    found = {}
    for divided in (True, False):
        source = chapter.source("cell-20", {"cell-20": (adam, "torch.optim.SGD(model.parameters(), lr=0.05)")})
        chapter.execute(source if divided else source.replace(line, ""))
        found[divided] = mean_losses(chapter)
    assert difference(found[True], found[False]) > 2e-2


def test_a_broadcast_makes_all_ranks_start_from_rank_0(chapter, ddp_losses):
    chapter.run("cell-20", {"cell-20": ("    dist.broadcast(parameter.data, src=0)", "    pass")})
    assert difference(mean_losses(chapter), ddp_losses) > 1e-3


def test_without_ddp_nothing_is_averaged(chapter, ddp_losses):
    chapter.run("cell-24-ddp", {"cell-24-ddp": ("model = DistributedDataParallel(model)\n", "")})
    assert difference(mean_losses(chapter), ddp_losses) > 1e-2


def test_without_the_division_the_gradient_is_as_many_times_as_long_as_there_are_ranks(chapter):
    alone = chapter.value("norm_alone")
    chapter.run("cell-37")
    assert chapter.value("ranks['norm_of_mean'][0]") == pytest.approx(alone, rel=1e-3)
    chapter.run("cell-37", {"cell-37": ("gradient /= world_size\n", "")})
    assert chapter.value("ranks['norm_of_mean'][0]") == pytest.approx(2 * alone, rel=1e-3)


def test_without_set_epoch_each_epoch_is_the_first(chapter):
    chapter.run("cell-40")
    assert chapter.value("remembered[0] != remembered[1]") is True
    chapter.run("cell-40", {"cell-40": ("    sampler.set_epoch(epoch)\n", "")})
    assert chapter.value("remembered[0] == remembered[1] == forgotten[0]") is True


def test_a_spawned_worker_is_the_one_in_the_module(chapter):
    """Each rank's own number; in the chapter, which asserts it, the sum of both."""
    chapter.run_all(["cell-10", "cell-11"], {"cell-10": ("dist.all_reduce(value)", "dist.barrier()")})
    assert chapter.value("sums") == [0.0, 1.0]
    with pytest.raises(CellError, match="No such file or directory"):
        chapter.run("cell-11", {"cell-11": ("    mp.spawn(add_up, args=(2, folder), nprocs=2)\n", "")})
