"""13 with one line changed: what its text says will change does change, and no file of the package is edited."""

import json

import pytest
from chapters import NOTEBOOKS, Chapter

ADAPTERS = ["step-peaks", "step-chunks", "head-unit", "adapters", "adapters-start", "adapters-train"]


WHOLE_RUN = ["worker", "fine-tune", "fine-tune-2", "after", "peers"]  # of processes that torchrun starts


@pytest.fixture(scope="module")
def chapter(tmp_path_factory):
    with Chapter("13", tmp_path_factory.mktemp("chapter")) as chapter:
        chapter.shrink("step-peaks", ("32_000", "2_000"))
        chapter.shrink("adapters-train", ("range(12):\n    optimizer", "range(4):\n    optimizer"))
        chapter.run_all([cell for cell in chapter.set_up_cells() if cell not in WHOLE_RUN])
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
    chapter.run_all(["step-peaks", "step-chunks", "head-unit"])
    gathers = chapter.value("ranks['gathers'][0]")
    assert gathers["head in the root"][0] == gathers["head in the root"][1]
    assert gathers["head a unit"][1] > gathers["head a unit"][0] + 3


@pytest.mark.long
def test_a_root_that_reshards_after_forward_is_gathered_once_more_in_every_step(chapter):
    chapter.run_all([*ADAPTERS, "generate"])
    counts = "[ranks['gathers_before'], ranks['gathers_after']]"
    assert chapter.value(counts) == [[13, 13], [13, 13]]
    line = "model.set_reshard_after_forward(False, recurse=False)  # the root: backward begins with it\n"
    chapter.run("generate", {"generate": (line, "")})
    assert chapter.value(counts) == [[13, 13], [14, 14]]


def test_each_rank_keeps_its_part_and_a_buffer_of_zeros_is_felt(chapter):
    assert chapter.value("{4 * P // NUM_RANKS} == set(ranks['own_bytes']) and all(ranks['is_tied'])")
    chapter.run("no-buffers")
    assert min(chapter.value("ranks['without_buffers']")) > 1


def test_packed_is_padded_with_its_mask_and_only_with_it(chapter):
    def losses() -> list[float]:
        chapter.run("packing")
        return chapter.value("[loss for _, loss in packing.values()]")

    padded, packed, without_mask = losses()
    assert packed == pytest.approx(padded, abs=1e-5) and abs(without_mask - padded) > 0.01
    chapter.run("packing", {"packing": ("wanted, documents=owners)", "wanted)")})
    assert chapter.value("packing['packed']") == chapter.value("packing['packed, no mask']")
    chapter.run("packing")


def test_adapters_are_few_learn_alone_and_cost_what_the_formula_says(chapter):
    chapter.run_all([*ADAPTERS, "adapters-merge"])
    first, *_, last = chapter.value("ranks['losses'][0]")
    assert last < first - 0.1, "in four steps"
    assert chapter.value("0 < A <= 0.05 * P")
    assert chapter.value("all(name.endswith(('lora_a', 'lora_b')) for name in adapters)"), "and nothing else"
    assert chapter.value("ranks['state_bytes'][0] == (4 * P + 16 * A) // NUM_RANKS"), "4 bytes frozen, 16 trained"
    merged = chapter.value("loss_merged")
    assert chapter.value("ranks['loss_after'][0]") == pytest.approx(merged, abs=1e-5)
    scaled = "merged.get_submodule(name).weight += 2.0 *"
    chapter.run("adapters-train")  # writes the file that the cell below removes
    chapter.run("adapters-merge", {"adapters-merge": (scaled, scaled.replace("2.0", "1.0"))})
    assert abs(chapter.value("ranks['loss_after'][0] - loss_merged")) > 1e-3


def test_hugging_faces_llama_gave_the_same_logits():
    saved = json.loads((NOTEBOOKS / "reference" / "language" / "transformers.json").read_text())
    assert saved["largest_difference"] < 1e-4


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
