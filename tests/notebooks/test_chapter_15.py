"""Chapter 15 with lines of its cells changed: each collective and each factor is needed for the losses of one process."""

import pytest
from chapters import Chapter
from runs import mostly_long

TOLERANCE, WRONG = 1e-5, 1e-4  # as in its Check

# The cell with the change, what is changed in it, the cells that run after it, and what is then far from one process.
LEVERS = {
    "the all-reduce of a row-parallel layer": (
        ("tensor-functions", "        dist.all_reduce(total, group=group)\n", ""),
        ["tensor-by-hand"],
        "max(ranks['mlps_off'][0]['split'].values())",
    ),
    "the same batch along tensor": (
        ("tensor", 'batches_of(tensor_mesh.get_local_rank("data"), 2)', "batches_of(rank, 4)"),
        [],
        "far(ranks['runs'][0]['tensor'][0])",
    ),
    "the mask over all keys": (("context-gather", ", attn_mask=mask", ""), ["context"], "far(ranks['runs'][0]['context, gathered'][0])"),
    "the places of a rank's tokens": (("context", "first = index * OWN", "first = 0"), [], "far(ranks['runs'][0]['context, gathered'][0])"),
    "the sum of the keys' gradients": (
        ("context-gather", "dist.reduce_scatter_tensor(own, terms, group=ctx.group)", "own = terms[: len(own)].clone()"),
        ["context"],
        "far(ranks['runs'][0]['context, gathered'][0])",
    ),
    "the shares of a ring's blocks": (
        ("ring", "torch.stack(logs).softmax(dim=0)", "0.5"),
        [],
        "far(ranks['runs'][0]['context, ring'][0])",
    ),
    "the gradients that a ring brings back": (
        ("ring", "kv = pass_on(kv)", "kv = pass_on(kv.detach())"),
        [],
        "far(ranks['runs'][0]['context, ring'][0])",
    ),
    "the mean over micro-batches": (("gpipe", " / MICRO))", "))"), ["gpipe-train"], "ranks['by_hand'][0]"),
    "the mean along data": (("gpipe-train", "            parameter.grad /= 2\n", ""), [], "ranks['by_hand'][0]"),
    "an expert of its own": (
        ("experts-spread", "self.experts[rank : rank + 1]", "self.experts[:1]"),
        ["experts-train"],
        "far(ranks['runs'][0]['expert'][0], ranks['experts_alone'][0])",
    ),
}  # fmt: skip
ASIDE = ("product", "hybrid", "clip", "pipeline", "experts-routers")  # no cell of a lever needs them
FAR = """
def far(losses, right=None):
    pairs = zip(losses, right or ranks["alone"][0], strict=True)
    return max(abs(loss - one) for loss, one in pairs)
"""


@pytest.fixture(scope="module")
def chapter(tmp_path_factory):
    with Chapter("15", tmp_path_factory.mktemp("chapter") / "15") as chapter:
        chapter.run_all(chapter.set_up_cells())
        chapter.execute(FAR)
        chapter.right = {}  # by lever, how far it is from one process if nothing is changed
        for cell_id in chapter.ranks_cells():
            if cell_id not in ASIDE:
                chapter.run(cell_id)
            for lever, ((cell, *_), behind, difference) in LEVERS.items():
                if cell_id == [cell, *behind][-1]:
                    chapter.right[lever] = chapter.value(difference)
        yield chapter


@pytest.mark.long
def test_a_cell_run_again_gives_the_same_output(chapter):
    chapter.run_twice(chapter.ranks_cells())
    assert chapter.others() == []
    assert len(chapter.twice) == 22


@pytest.mark.parametrize("lever", mostly_long(LEVERS, telling=(0, 2, 4, 6, 7, 9)))
def test_without_it_a_rank_learns_something_else(chapter, lever):
    (cell, before, after), behind, difference = LEVERS[lever]
    assert chapter.right[lever] < TOLERANCE
    try:
        chapter.run_all([cell, *behind], {cell: (before, after)})
        assert chapter.value(difference) > WRONG
    finally:
        if behind:  # which other cells call
            chapter.run(cell)


@pytest.mark.long
def test_what_is_not_parallelized_sends_nothing_along_tensor(chapter):
    chapter.run("tensor", {"tensor": ('parallelize_module(block, tensor_mesh["tensor"], plan)', "pass")})
    assert chapter.value("far(ranks['runs'][0]['tensor'][0])") < TOLERANCE, "both ranks of a pair compute the same"
    sent = "[of_rank['tensor'][1] for of_rank in ranks['runs']]"
    assert [sorted(of_rank) for of_rank in chapter.value(sent)] == [["all_gather", "reduce_scatter"]] * 4
    chapter.run("tensor")
    assert [of_rank["all_reduce"][0] for of_rank in chapter.value(sent)] == [16] * 4


# ---------------------------------------------------------------- what the text says of its cells, beside the Check


def test_a_term_of_a_product_is_not_the_product(chapter):
    chapter.run("product")
    assert min(chapter.value("ranks['term_off']")) > 1 and max(chapter.value("ranks['sum_off']")) < TOLERANCE


def test_each_change_of_placement_sends_what_its_collective_sends(chapter):
    gather = (4 - 1) * 4 * 16 * 16 // 4  # bytes of 16 x 16 values on four ranks; on a CPU, an exchange is a gather
    for changes in chapter.value("ranks['changes']"):
        assert [sum(size for _, size in seen) for *_, seen in changes] == [gather, gather, 2 * gather, gather]


def test_only_a_sum_along_shard_is_the_gradient_norm_of_one_process(chapter):
    chapter.run("hybrid")
    for norms in chapter.value("ranks['norms']"):
        one, rows, twice, summed, by_torch = norms.values()
        assert abs(summed - one) < TOLERANCE and abs(by_torch - one) < TOLERANCE and rows < 0.9 * one
        assert abs(twice / one - 2**0.5) < TOLERANCE, "each square counted twice"


def test_clipping_by_mesh_finds_the_norm_of_one_process_and_scales_to_the_limit(chapter):
    chapter.run_all(["hybrid", "clip"])
    one = chapter.value("ranks['norms'][0]['one process']")
    for norm, after in chapter.value("ranks['clipped']"):
        assert abs(norm - one) < TOLERANCE and abs(after - 0.1) < TOLERANCE


def test_without_enter_the_output_of_a_split_mlp_is_right_and_its_gradient_wrong(chapter):
    chapter.run("tensor-by-hand")
    for off in chapter.value("ranks['mlps_off']"):
        assert max(off["split"].values()) < TOLERANCE and off["two biases"]["output"] > WRONG
        assert off["no Enter"]["output"] < TOLERANCE < WRONG < off["no Enter"]["gradient"]


def test_a_pipeline_gathers_each_unit_once_unless_it_reshards_in_between(chapter):
    chapter.run("pipeline")
    for of_rank in chapter.value("ranks['runs']"):
        sent = of_rank["pipeline"][1]
        assert sent["all_gather"][0] == sent["reduce_scatter"][0] == 3
    assert [sent["all_gather"][0] for sent in chapter.value("ranks['resharded']")][:2] == [15, 15]
    for name in ("pipeline", "pipeline, GPipe"):
        assert chapter.value(f"far(ranks['runs'][0][{name!r}][0])") < TOLERANCE


def test_a_stage_sends_the_bytes_of_its_formula(chapter):
    chapter.run("pipeline")
    whole, first = 210_368, 106_112  # parameters, of all layers and of the first stage's
    of_stage = "4 * {} + dimensions.pipeline_sent_bytes(128, 64, at_the_end=True)"
    predicted = [chapter.value(of_stage.format(params)) for params in (first, first, whole - first, whole - first)]
    counted = [sum(size for _, size in of["pipeline"][1].values()) for of in chapter.value("ranks['runs']")]
    assert counted == predicted


def test_what_experts_exchange_is_as_predicted_with_any_router(chapter):
    chapter.run("experts-routers")
    for routed in chapter.value("ranks['routed']"):
        assert routed.keys() == {"best", "balanced", "first_only"}
        assert all(predicted == counted for predicted, counted in routed.values())


def test_the_gradient_of_an_expert_without_tokens_is_zeros_not_none(chapter):
    chapter.run("experts-routers")
    assert chapter.value("[bool(gradient.any()) for gradient in ranks['unseen']]") == [True, False, False, False]
