"""Notebook 14: a changed line of the moved job, or of a cell for the ranks, changes what the text says."""

import pytest
from chapters import CellError, Chapter

MOVED = [
    "fsdp2-shard",
    "fsdp2-step",
    "count-reductions",
    "fsdp2-evaluate",
    "fsdp2-loop",
    "read-ddp",
    "load-ddp",
    "save-like-ddp",
]
GO_ON = """
import importlib, fsdp2_job
importlib.reload(fsdp2_job)
moves = moved_job.Job(last_step=LAST_STEP, resume_from=moving_file, seed=1)
found = launch(fsdp2_job.train_fsdp2, moves, world_size=NUM_RANKS, device="cpu", progress=False)[0]
differ = moved_job.differences(baseline, found)
"""


@pytest.fixture(scope="module")
def chapter(tmp_path_factory):
    with Chapter("14", tmp_path_factory.mktemp("14") / "notebooks") as chapter:
        chapter.shrink("parameters", ("= 10, 20", "= 6, 11"))
        chapter.run_all(["parameters", "imports", "ddp-step", "ddp-loop", "ddp-file", "job-run-code", *MOVED])
        yield chapter


def go_on(chapter, changes=None) -> dict[str, float]:
    """By how much five steps under FSDP2 differ from the baseline, with the module written anew."""
    chapter.run_all(MOVED, changes)
    chapter.execute(GO_ON)
    return dict(zip(("losses", "norms", "held out"), chapter.value("differ"), strict=True))


def test_the_moved_job_goes_on(chapter):
    assert max(go_on(chapter).values()) < 1e-5


@pytest.mark.parametrize(
    "cell, line, instead, differs",
    [
        ("load-ddp", "    set_optimizer_state_dict(model, optimizer, adam, options=options)\n", "", "losses"),
        ("load-ddp", "    set_model_state_dict(model, weights, options=options)\n", "", "losses"),
        ("fsdp2-step", " / len(parts)\n", "\n", "norms"),
    ],
    ids=["Adam's state", "the weights", "micro-batches averaged"],
)
def test_a_line_left_out(chapter, cell, line, instead, differs):
    assert go_on(chapter, {cell: (line, instead)})[differs] > 1e-3


@pytest.mark.parametrize(
    "cell, line, instead, reductions",
    [
        ("fsdp2-step", "        model.set_requires_gradient_sync(index == len(parts) - 1)\n", "", 10),
        ("fsdp2-shard", "        fully_shard(block, mesh=mesh)", "        pass", 1),
    ],
    ids=["in every micro-batch", "in one unit"],
)
def test_each_unit_is_reduced_once_in_a_step(chapter, cell, line, instead, reductions):
    assert count_reductions(chapter) == 5
    assert count_reductions(chapter, {cell: (line, instead)}) == reductions


def count_reductions(chapter, changes=None) -> int:
    chapter.run_all(MOVED, changes)
    chapter.execute("import importlib, fsdp2_job\nimportlib.reload(fsdp2_job)")
    job = "fsdp2_job.count_reductions, world_size=NUM_RANKS, device='cpu', progress=False"
    return chapter.value(f"launch({job})[0]")


@pytest.mark.long
def test_a_schedule_that_is_built_after_the_load_starts_each_rank_at_its_own_rate(chapter):
    built = "    schedule = common.make_schedule(optimizer)\n"
    start = '    start = {"step": 0, "schedule": schedule.state_dict()}\n'
    used = '    schedule.load_state_dict(start["schedule"])\n'
    rates = "[one.rates[0] for one in launch(fsdp2_job.train_fsdp2, moves, world_size=2, device='cpu', progress=False)]"
    assert go_on(chapter)["losses"] < 1e-5
    right, same = chapter.value(rates)
    assert right == same
    late = chapter.source("fsdp2-loop", {"fsdp2-loop": (used, built + used)}).replace(built + start, "", 1)
    chapter.run_all(MOVED[: MOVED.index("fsdp2-loop")])
    chapter.execute(late)
    chapter.run_all(MOVED[MOVED.index("fsdp2-loop") + 1 :])
    chapter.execute(GO_ON)
    first, second = chapter.value(rates)
    assert (
        len({first, second, right}) == 3
    )  # rank 0 has `initial_lr` from the file, rank 1 takes the current rate for it
    assert chapter.value("differ[0]") > 1e-3


def test_an_average_that_stays_unsharded_is_not_updated(chapter):
    with pytest.raises(CellError, match="mixed torch.Tensor and DTensor"):
        go_on(chapter, {"fsdp2-evaluate": ("    average.reshard()", "    pass")})


@pytest.mark.long
def test_without_fully_shard_a_rank_keeps_everything(chapter):
    go_on(chapter)
    shards, everything = chapter.value("(found.parameter_bytes, baseline.parameter_bytes)")
    assert shards < 0.6 * everything
    whole = {"fsdp2-shard": ("    return fully_shard(model, mesh=mesh)", "    return model.to(rank_device())")}
    with pytest.raises(CellError):  # what is no DTensor has no `full_tensor`, and a module no `reshard`
        go_on(chapter, whole)


def test_without_ddp_there_is_nothing_to_unwrap(chapter):
    line = ("DistributedDataParallel(common.build_model(job.seed).to(rank_device()))", "common.build_model(job.seed)")
    chapter.run_all(["ddp-step", "ddp-loop", "ddp-file"], {"ddp-loop": line})
    with pytest.raises(CellError, match="'ViT' object has no attribute 'module'"):
        chapter.run("job-run-code")
    chapter.run_all(["ddp-step", "ddp-loop", "ddp-file"])


@pytest.mark.long
def test_a_cell_for_the_ranks_says_the_same_again(chapter):
    chapter.run("tied-ranks")
    assert chapter.run("tied-cell") == chapter.run("tied-cell")
    assert chapter.ranks_cells() == ["tied-cell"]
