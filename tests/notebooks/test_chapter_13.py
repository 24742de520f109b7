"""13 with one line changed: what its text says will change does change, and no file of the package is edited."""

import pytest
from chapters import Chapter


@pytest.fixture(scope="module")
def chapter(tmp_path_factory):
    with Chapter("13", tmp_path_factory.mktemp("chapter")) as chapter:
        chapter.shrink("logits", ("32_000", "2_000"))
        chapter.shrink("step-peaks", ("32_000", "2_000"))
        chapter.shrink("adapters-train", ("range(12):\n    optimizer", "range(4):\n    optimizer"))
        chapter.run_all(chapter.set_up_cells())
        cells = [
            "start-imports",
            "start",
            "look",
            "by-means",
            "by-tokens",
            "errors-pad",
            "errors-data",
            "errors",
            "chunked",
        ]
        chapter.run_all(cells)
        yield chapter


def errors(chapter: Chapter) -> dict[str, float]:
    return chapter.value("ranks['errors'][0]")


def test_without_the_world_size_the_gradient_is_half_as_long(chapter):
    assert errors(chapter)["backward_by_tokens, 2 micro-batch(es)"] < 1e-5
    chapter.run("by-tokens", {"by-tokens": ("(part * world_size).backward()", "part.backward()")})
    chapter.run("errors")  # what is taken for right is half as long, too, so the lengths are compared
    assert errors(chapter)["backward_by_means, 1 micro-batch(es)"] > 1.0
    chapter.run_all(["by-tokens", "errors"])


def test_tokens_that_are_counted_on_one_rank_alone(chapter):
    chapter.run("by-tokens", {"by-tokens": ("    dist.all_reduce(num_tokens)", "    pass")})
    chapter.run("errors")
    assert errors(chapter)["backward_by_tokens, 1 micro-batch(es)"] > 0.2
    chapter.run_all(["by-tokens", "errors"])
    assert errors(chapter)["backward_by_tokens, 1 micro-batch(es)"] < 1e-5


def test_a_buffer_that_is_never_filled(chapter):
    chapter.run(
        "start",
        {"start": ("    model.model.rotary_emb.fill_buffers()\n", "    model.model.rotary_emb.inv_freq.zero_()\n")},
    )
    chapter.run("look")
    chapter.run("look-2")
    assert chapter.value("difference") > 1
    chapter.run_all(["start", "look", "look-2"])
    assert chapter.value("difference") == 0


@pytest.mark.long
def test_a_head_of_its_own_is_gathered_for_every_chunk(chapter):
    chapter.run_all(["logits", "step-peaks", "head-unit"])
    gathers = chapter.value("ranks['gathers'][0]")
    assert gathers["head in the root"][0] == gathers["head in the root"][1]
    assert gathers["head a unit"][1] > gathers["head a unit"][0] + 3


@pytest.mark.long
def test_a_root_that_reshards_after_forward_is_gathered_once_more_in_every_step(chapter):
    chapter.run_all(["logits", "step-peaks", "head-unit", "adapters", "adapters-start", "adapters-train", "generate"])
    counts = "[ranks['gathers_before'], ranks['gathers_after']]"
    assert chapter.value(counts) == [[13, 13], [13, 13]]
    line = "model.set_reshard_after_forward(False, recurse=False)  # the root: backward begins with it\n"
    chapter.run("generate", {"generate": (line, "")})
    assert chapter.value(counts) == [[13, 13], [14, 14]]


def test_without_the_reader_the_shards_have_no_values(chapter):
    line = "    dcp.load(in_files, storage_reader=dcp.HuggingFaceStorageReader(FOLDER))\n"
    chapter.run("start", {"start": (line, "")})
    chapter.run_all(["look", "look-2"])
    assert chapter.value("0 <= difference < 1") is False  # whatever was in memory, NaN among it
    chapter.run_all(["start", "look", "look-2"])
    assert chapter.value("difference") == 0


@pytest.mark.long
def test_every_cell_for_the_ranks_says_the_same_again(chapter):
    chapter.run_twice(chapter.ranks_cells())
    assert chapter.others() == ["adapters-train"]  # it trains on; after a new start it says the same
    chapter.run("adapters-start")
    assert chapter.run("adapters-train") == chapter.twice["adapters-train"][0]
    assert len(chapter.twice) > 12
