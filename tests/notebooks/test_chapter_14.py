"""Notebook 14: a changed line of the moved job, or of a cell for the ranks, changes what the text says."""

import inspect
import re

import pytest
from chapters import CellError, Chapter, read_chapter
from torch.distributed.fsdp import FullyShardedDataParallel

MOVED = [
    "fsdp2-shard",
    "fsdp2-step",
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
COUNT_REDUCTIONS = """%%writefile -a fsdp2_job.py


from fsdp_helpers.measuring.collectives import trace_collectives


def count_reductions(rank, world_size):
    model = shard(common.build_model(seed=0), init_device_mesh(rank_device().type, (world_size,)))
    (parts,) = common.load_steps(rank, world_size, 0, 1)
    with trace_collectives() as seen:
        take_step(model, common.make_optimizer(model), parts)
    return [collective.op for collective in seen].count("reduce_scatter")
"""
OLD = ["old-train", "old-folder", "old-run", "old-twins", "old-moved"]


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
    chapter.execute(COUNT_REDUCTIONS)
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


# ---------------------------------------------------------------- the cells for the ranks


@pytest.fixture(scope="module")
def live(chapter):
    """The chapter, with two ranks that are ready for its cells."""
    chapter.run_all(["special-ranks", "special-common", "migration-run"])  # the last one imports FSDP1
    yield chapter
    chapter.execute("ranks.close()")


def found(chapter, cell, name, *change):
    """What `name` is on each rank after `cell`, with its change if there is one."""
    chapter.run(cell, {cell: change} if change else None)
    return chapter.value(f"ranks[{name!r}]")


def test_heads_that_only_some_ranks_use_get_mixed_gradients_unless_unused_ones_are_reduced_as_zeros(live):
    heads = found(live, "unused-run", "heads")
    assert [own["as it is"] for own in heads] == [[11.0, None], [None, 11.0]]
    assert [own["unused as zeros"] for own in heads] == [[1.0, 10.0]] * 2


def test_heads_that_every_rank_calls_with_an_empty_batch_if_necessary_get_the_right_gradients(live):
    called = "sum(head(x[: rank % 2 == number]).sum() for number, head in enumerate(self.heads))"
    heads = found(live, "unused-run", "heads", "self.heads[rank % 2](x).sum()", called)
    assert [own["as it is"] for own in heads] == [[1.0, 10.0]] * 2


def test_heads_as_units_of_their_own_mix_up_the_weights_too(live):
    """Each rank has one row of its own head and one of the other's: 2 x (1 + 2) and 20 x (1 + 2), not 4 and 80."""
    model = "    model = fully_shard(TwoHeads().to(device), mesh=mesh)\n"
    units = """    model = TwoHeads().to(device)
    for head in model.heads:
        fully_shard(head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model(torch.full((1, 1), 2 * 10.0 ** (rank % 2), device=device)).item()
"""
    heads = found(live, "unused-run", "heads", model, units)
    assert [own["as it is"] for own in heads] == [6.0, 60.0]


def test_if_one_ranks_loss_is_infinite_a_scaler_skips_the_step_on_all_ranks(live):
    assert found(live, "lines-run", "changed") == [[False, True]] * 2
    assert found(live, "lines-run", "changed", 'float("inf")', "1.0") == [[True, True]] * 2


DDP_LINES = """%%ranks
import copy

layer, errors = fully_shard(nn.Linear(4, 4).to(device), mesh=mesh), []
with torch.autocast(device.type, torch.bfloat16):
    outputs = layer(torch.ones(2, 4, device=device))
outputs.float().sum().backward()
scalar = nn.Module()
scalar.scale = nn.Parameter(torch.ones(()))
for line in (lambda: copy.deepcopy(layer), lambda: fully_shard(scalar, mesh=mesh)):
    try:
        line()
    except (AssertionError, ValueError) as error:
        errors.append(f"{type(error).__name__}: {error}")
dtypes = str(outputs.dtype), str(layer.weight.grad.dtype)
"""


def test_a_sharded_model_cannot_be_copied_nor_hold_a_scalar_and_autocast_works(live):
    live.execute(DDP_LINES)
    for copied, scalar in live.value("ranks['errors']"):
        assert copied.startswith("AssertionError: FSDP does not support deepcopy")
        assert scalar.startswith("ValueError: fully_shard doesn't support scalar parameters")
    assert live.value("ranks['dtypes']") == [("torch.bfloat16", "torch.float32")] * 2


def test_tied_in_one_unit_trains_as_in_one_process_and_across_units_is_refused(live):
    for own in found(live, "tied", "tied"):
        right = own["not sharded"]
        assert right[1] and own["root only"] == own["both ends"] == right
        assert "is shared with a parameter already managed" in own["the head"]
    for own in found(live, "tied", "tied", "    head.weight = embed.weight  # tied\n", ""):
        assert own["root only"][0] != right[0] and not own["root only"][1] and "the head" not in own


def test_under_fsdp1_a_unit_for_a_tied_head_fails_in_forward(live):
    policy = "CustomPolicy(lambda module: module is head)"
    wrap = f"FSDP(model, auto_wrap_policy={policy}, device_id=device, use_orig_params=True)"
    live.execute("%%ranks\nfrom torch.distributed.fsdp.wrap import CustomPolicy")
    with pytest.raises(CellError, match="'weight' must be 2-D"):
        found(live, "tied", "tied", 'model if unit == "not sharded" else fully_shard(model, mesh=mesh)', wrap)


def test_frozen_parameters_cost_no_gradients_no_moments_and_no_reduction(live):
    adapters = 4 * 4 * 1_024  # bytes: four adapters of 64 x 4 and 4 x 192 values
    live.run("low-rank")
    for own in found(live, "frozen", "frozen"):
        kept = own["adapters"]
        assert (kept["gradients"], kept["optimizer state"]) == (adapters // 2, adapters)
        assert kept["reduce_scatter"] == adapters < own["all"]["reduce_scatter"]
        assert kept["all_gather"] > own["all"]["all_gather"], "the adapters come on top"


def test_fsdp1_reduces_what_is_frozen_too(live):
    live.run("low-rank")
    wrapped = "FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=device, use_orig_params=True)"
    for own in found(live, "frozen", "frozen", "common.shard(model.to(device), mesh)", wrapped):
        assert own["adapters"]["reduce_scatter"] == 4 * 4 * (49_984 + 1_024)


def test_ignored_parameters_drift_apart_unless_averaged(live):
    for own in found(live, "ignored", "ignored"):
        assert own["as it is"] > 1e-5 and own["gradient averaged"] == 0
    assert found(live, "ignored", "ignored", "/= world_size", "*= rank + 1")[0]["gradient averaged"] > 1e-5


def test_buffers_drift_apart_unless_averaged_variances_included(live):
    for own in found(live, "buffers", "buffers"):
        assert min(own["as it is"]) > 1e-3 and own["averaged"] == [0.0, 0.0]
    mean_only = found(live, "buffers", "buffers", "in (norm.running_mean, norm.running_var)", "in (norm.running_mean,)")
    assert mean_only[0]["averaged"][0] == 0.0 < mean_only[0]["averaged"][1]


def test_both_apis_have_the_same_gradient_norms(live):
    live.run("migration-run")
    norms = found(live, "migration-fsdp2", "norms")[0]
    assert len(norms["FSDP1"]) == 4 and norms["FSDP2"] == pytest.approx(norms["FSDP1"], rel=0.01)  # bf16: three digits
    first = "    F.cross_entropy(model(first[0]), first[1]).backward()\n"
    assert found(live, "migration-fsdp2", "norms", first, "")[0]["FSDP2"] != pytest.approx(norms["FSDP1"], rel=0.01)


def test_every_argument_of_fsdp1_is_mapped():
    arguments = set(inspect.signature(FullyShardedDataParallel.__init__).parameters) - {"self"}
    (table,) = [cell.source for cell in read_chapter("14").cells if cell.id == "migration-table"]
    first_columns = [line.split(" | ")[0] for line in table.splitlines()[2:]]
    methods = {
        "with",
        "model",
        "summon_full_params",
        "state_dict_type",
        "optim_state_dict",
        "transformer_auto_wrap_policy",
    }
    rows = {name for column in first_columns for name in re.findall(r"`(\w+)", column)} - methods
    assert rows == arguments


def test_fsdp1s_shards_go_on_exactly_and_its_full_file_on_cpu_ranks_does_not(live):
    live.run_all(OLD)
    assert live.value("twins") == {"one_file.pt": 55, "from_shards.pt": 0}
    for own in live.value("ranks['off']"):
        assert own["from_shards"] < 1e-5 and own["from_one_file"] > 1e-3
    whole = 'f"{old_folder}/one_file.pt"'
    merged = found(live, "old-moved", "off", whole, 'f"{old_folder}/from_shards.pt"')
    assert merged[0]["from_one_file"] < 1e-5, "the file that's made of the shards"
    weights_only = found(
        live, "old-moved", "off", 'dcp.load({"model": weights, "optimizer": moments}', 'dcp.load({"model": weights}'
    )
    assert weights_only[0]["from_shards"] > 1e-3


@pytest.mark.long
def test_a_cell_for_the_ranks_says_the_same_again(live):
    live.run_twice([cell for cell in live.ranks_cells() if cell not in OLD])
    assert live.others() == []
