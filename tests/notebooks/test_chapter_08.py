"""Notebook 08: a changed line of its cells changes what the text says. Compiling is left to the notebook."""

import pytest
from chapters import CellError, Chapter

LIVE = ["units", "policies", "loop", "train", "start-on-meta", "from-rank-0", "order", "prefetch"]


@pytest.fixture(scope="module")
def chapter(tmp_path_factory):
    with Chapter("08", tmp_path_factory.mktemp("08") / "notebooks") as chapter:
        chapter.run_all(["settings", "imports", "machine", *LIVE])
        yield chapter


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


def test_weights_that_are_not_set_are_not_rank_0s(chapter):
    assert chapter.value("ranks['num_equal'][0]") == 55
    line = "set_model_state_dict(model, dict(weights), options=options)"
    chapter.run("from-rank-0", {"from-rank-0": (line, "")})
    assert chapter.value("ranks['num_equal'][0]") < 55
    chapter.run("from-rank-0")


def test_without_prefetch_the_order_is_the_plain_one(chapter):
    ahead, plain = "ranks['orders'][0]['two ahead'][:3]", ["gather 0", "compute 0", "gather 1"]
    assert chapter.value(ahead) == ["gather 0", "gather 1", "gather 2"]
    line = "block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 1 + ahead])"
    chapter.run_all(["order", "prefetch"], {"order": (line, "pass")})
    assert chapter.value(ahead) == plain
    chapter.run_all(["order", "prefetch"])


def test_cells_run_twice_show_the_same(chapter):
    for cell_id in LIVE:
        assert chapter.run(cell_id) == chapter.run(cell_id), cell_id
