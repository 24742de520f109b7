"""Notebook 08: a changed line of its cells changes what the text says."""

import json

import pytest
from chapters import NOTEBOOKS, CellError, Chapter

STARTS = ["wave-vit", "ways", "layer-by-layer", "start-formulas", "measured-starts", "from-rank-0", "from-file"]
COMPILED = ["compile", "compile-in-place"]
LIVE = ["units", "start-on-meta", *STARTS, "loop", "train", "order", "prefetch"]
NUM_TENSORS = 6 * 12 + 2 + 2 + 2  # of the state dict: six blocks, patches, norm, head; the waves are in none


@pytest.fixture(scope="module")
def chapter(tmp_path_factory):
    with Chapter("08", tmp_path_factory.mktemp("08") / "notebooks") as chapter:
        chapter.run_all(["settings", "imports", "machine", *LIVE])
        yield chapter


@pytest.mark.long
def test_a_cell_run_again_gives_the_same_output(chapter):
    assert [cell for cell in chapter.ranks_cells() if cell not in COMPILED] == LIVE  # those are compiled twice below
    chapter.run_twice(LIVE)
    assert chapter.others() == []


UNITS = """%%ranks
from torch.distributed.fsdp import FSDPModule
found = [name for name, module in shard_blocks(ViT(SHAPE).to(device)).named_modules() if isinstance(module, FSDPModule)]
"""
SEED = "%%ranks\nseed = torch.initial_seed()  # of what dropout draws next"


def test_without_the_loop_there_is_one_unit(chapter):
    chapter.execute(UNITS)
    assert chapter.value("ranks['found']") == [["", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]] * 2
    loop = "    for block in model.blocks:\n        fully_shard(block, mesh=mesh)\n"
    chapter.run("units", {"units": (loop, "")})
    chapter.execute(UNITS)
    assert chapter.value("ranks['found']") == [[""]] * 2
    chapter.run("units")


def test_after_a_start_from_one_seed_each_rank_draws_its_own_dropout(chapter):
    as_on_gpus = chapter.source("start-on-meta").replace('rank if device.type == "cpu" else 0', "0")
    chapter.execute(as_on_gpus)
    chapter.execute(SEED)
    first, second = chapter.value("ranks['seed']")
    assert first != second
    chapter.execute(as_on_gpus.replace("torch.manual_seed(world_size + rank)", ""))
    chapter.execute(SEED)
    first, second = chapter.value("ranks['seed']")
    assert first == second, "without the line, all ranks drop the same units"
    chapter.run("start-on-meta")


def test_without_to_empty_a_meta_model_has_no_values(chapter):
    with pytest.raises(CellError) as failed:
        chapter.run("start-on-meta", {"start-on-meta": ("model.to_empty(device=device)", "")})
    assert "meta" in failed.value.message
    chapter.run("start-on-meta")
    assert chapter.value("[own / full for own, full in zip(ranks['own_bytes'], ranks['full_bytes'])]") == pytest.approx(
        [0.5, 0.5], abs=0.02
    )


def test_three_starts_and_two_files(chapter):
    check_starts(chapter)
    # the memory of the plain model before it may still hold the right waves, so the change empties it
    empty = ("    model.fill_buffers()\n", "    model.positions.zero_()\n")
    chapter.run_all(["layer-by-layer", "measured-starts"], {"layer-by-layer": empty})
    layer_by_layer = chapter.value("ranks['started'][0]['on meta, layer by layer']")
    assert layer_by_layer[1] == layer_by_layer[2] and not layer_by_layer[3]
    chapter.run("layer-by-layer")
    drawn = "own.copy_(distribute_tensor(full, mesh, own.placements, src_data_rank=None))  # nothing is sent"
    chapter.run_all(["layer-by-layer", "measured-starts"], {"layer-by-layer": (drawn, "pass")})
    assert chapter.value("ranks['started'][0]['on meta, layer by layer'][1]") < NUM_TENSORS
    chapter.run_all(["layer-by-layer", "measured-starts"])


def test_the_peaks_are_the_predicted_ones(chapter):
    started, predicted = chapter.value("ranks['started'][0]"), chapter.value("ranks['predicted'][0]")
    for way, (_, num_bytes) in predicted.items():
        assert started[way][0] == pytest.approx(num_bytes, rel=0.02), way
    assert started["in full, then sharded"][0] > chapter.value("ranks['whole'][0]"), "the full model, for a moment"


def check_starts(chapter):
    for started in chapter.value("ranks['started']"):
        (in_full, *rest), own, layers = started.values()
        assert rest == [NUM_TENSORS, NUM_TENSORS, True] and layers[1:] == (NUM_TENSORS, NUM_TENSORS, True)
        assert own[1] == 2 * 13 and own[3]  # constants are equal: weight and bias of thirteen norms
        assert own[0] < layers[0] < 0.9 * in_full
    for from_file in chapter.value("ranks['from_file']"):
        assert [found[1:] for found in from_file.values()] == [(NUM_TENSORS, NUM_TENSORS, True)] * 2


def test_weights_that_are_not_set_are_not_rank_0s(chapter):
    line = "    set_model_state_dict(model, weights, options=options)\n"
    chapter.run_all(["from-rank-0", "from-file"], {"from-rank-0": (line, "")})
    sent, own_rows = chapter.value("ranks['from_file'][0]").values()
    assert sent[1] < NUM_TENSORS == own_rows[1]
    chapter.run_all(["from-rank-0", "from-file"])


def test_without_prefetch_the_order_is_the_plain_one(chapter):
    ahead, plain = "ranks['orders'][0]['two ahead'][:3]", ["gather 0", "compute 0", "gather 1"]
    assert chapter.value(ahead) == ["gather 0", "gather 1", "gather 2"]
    line = "block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 1 + ahead])"
    chapter.run_all(["order", "prefetch"], {"order": (line, "pass")})
    assert chapter.value(ahead) == plain
    chapter.run_all(["order", "prefetch"])
    assert chapter.value("Ranks and __import__('os').path.getsize('my_trace_rank_0.json') > 0")


def test_sharding_changes_no_loss(chapter):
    ddp = "%%ranks\nfrom torch.nn.parallel import DistributedDataParallel\nddp = losses_of(DistributedDataParallel(build()))"
    chapter.execute(ddp)
    for ddp, sharded in chapter.value("list(zip(ranks['ddp'], ranks['losses']))"):
        assert sharded == pytest.approx(ddp, abs=1e-5)
    chapter.run("loop", {"loop": ("[rank].to(device)  # this rank's share", "[0].to(device)")})
    chapter.run("train")
    assert chapter.value("ranks['losses'][0]") != pytest.approx(ddp, abs=1e-4), "rank 0's images twice"
    chapter.run_all(["loop", "train"])


def test_block_compile_before_sharding_compiles_nothing(chapter):
    chapter.execute("%%ranks\nimport logging\nimport torch._dynamo.utils")  # as the cell above it does
    chapter.run("compile-in-place")
    wrapped, in_place = chapter.value("ranks['graphs'][0]").values()
    assert wrapped["graphs"] > 0 == wrapped["breaks"] and in_place["graphs"] == 0 < in_place["breaks"]
    wrap = ('block.compile(backend="eager") or block', 'torch.compile(block, backend="eager")')
    chapter.run("compile-in-place", {"compile-in-place": wrap})
    assert chapter.value("ranks['graphs'][0]['block.compile()']") == wrapped


def test_the_names_in_a_checkpoint_are_those_without_the_wrapper(chapter):
    chapter.execute("""%%ranks
whole = build()
for number, block in enumerate(whole.blocks):
    whole.blocks[number] = torch.compile(block, backend="eager")
wrapped = any("_orig_mod" in name for name in shard_blocks(whole).state_dict())
extra = sorted(set(get_model_state_dict(whole)) ^ set(build().state_dict()))
""")
    assert chapter.value("[ranks['wrapped'], ranks['extra']]") == [[True, True], [[], []]]


def test_five_epochs_on_mnist_reach_97_percent():
    (path,) = NOTEBOOKS.glob("reference/mnist-vit-mnist-*.json")
    accuracies = [epoch["test_accuracy"] for epoch in json.loads(path.read_text())["epochs"]]
    assert len(accuracies) == 5 and round(accuracies[-1], 3) == 0.976


@pytest.mark.long
def test_without_compile_there_is_no_graph(chapter):
    no_compiler = {"compile": ('shutil.which("g++")', "None")}  # the blocks are captured, and machine code is not made
    chapter.run("compile", no_compiler)
    assert chapter.value("ranks['num_graphs']") == [1, 1]
    compiled = chapter.value("ranks['compiled']")
    source = chapter.source("compile", no_compiler)
    chapter.execute(source.replace("torch.compile(block, backend=backend, **settings)", "block"))
    assert chapter.value("ranks['num_graphs']") == [0, 0]
    assert chapter.value("ranks['compiled']") == compiled


@pytest.mark.long
def test_on_three_ranks(chapter):
    """Rows that do not divide, and ranks that have none of a tensor."""
    chapter.execute("ranks.close()")
    chapter.execute("ranks = Ranks(3, device='cpu', timeout_s=120)")
    chapter.run_all(["units", "start-on-meta", *STARTS])
    check_starts(chapter)
