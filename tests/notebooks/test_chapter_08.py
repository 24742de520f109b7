"""Notebook 08: a changed line of its cells changes what the text says."""

import pytest
from chapters import CellError, Chapter

STARTS = ["wave-vit", "ways", "layer-by-layer", "measured-starts", "start-formulas", "from-rank-0", "from-file"]
LIVE = ["units", "policies", "loop", "train", "start-on-meta", *STARTS, "order", "prefetch"]
NUM_TENSORS = 6 * 12 + 2 + 2 + 2  # of the state dict: six blocks, patches, norm, head; the waves are in none


@pytest.fixture(scope="module")
def chapter(tmp_path_factory):
    with Chapter("08", tmp_path_factory.mktemp("08") / "notebooks") as chapter:
        chapter.run_all(["settings", "imports", "machine", *LIVE])
        yield chapter


@pytest.mark.long
def test_a_cell_run_again_gives_the_same_output(chapter):
    assert chapter.ranks_cells() == [*LIVE, "compile"]  # the last one is compiled twice below
    chapter.run_twice(LIVE)
    assert chapter.others() == []


def test_without_the_loop_there_is_one_unit(chapter):
    units = "[len(found['FSDP2']) for found in ranks['units']]"
    assert chapter.value(units) == [5, 5]
    loop = "    for block in model.blocks:\n        fully_shard(block, mesh=mesh)\n"
    chapter.run("units", {"units": (loop, "")})
    assert chapter.value(units) == [1, 1]
    chapter.run_all(["units", "policies"])


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
    chapter.run_all(["units", "loop", "policies", "train", *STARTS])
    check_starts(chapter)
