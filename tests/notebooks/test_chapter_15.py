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
        "max(ranks['same'][0][name] for name in ('a split MLP', 'its gradient'))",
    ),
    "the same batch along tensor": (
        ("tensor", 'batches_of(tensor_mesh.get_local_rank("data"), 2)', "batches_of(rank, 4)"),
        [],
        "far(ranks['losses'][0])",
    ),
    "the mask over all keys": (("context-gather", ", attn_mask=mask", ""), ["context"], "far(ranks['losses'][0])"),
    "the places of a rank's tokens": (("context", "first = index * OWN", "first = 0"), [], "far(ranks['losses'][0])"),
    "the sum of the keys' gradients": (
        ("context-gather", "dist.reduce_scatter_tensor(own, terms, group=ctx.group)", "own = terms[: len(own)].clone()"),
        ["context"],
        "far(ranks['losses'][0])",
    ),
    "the shares of a ring's blocks": (
        ("ring", "torch.stack(logs).softmax(dim=0)", "0.5"),
        [],
        "far(ranks['losses'][0])",
    ),
    "the gradients that a ring brings back": (
        ("ring", "kv = pass_on(kv)", "kv = pass_on(kv.detach())"),
        [],
        "far(ranks['losses'][0])",
    ),
    "the mean over micro-batches": (("gpipe", " / MICRO))", "))"), ["gpipe-train"], "ranks['same'][0]['GPipe by hand']"),
    "the mean along data": (("gpipe-train", "            parameter.grad /= 2\n", ""), [], "ranks['same'][0]['GPipe by hand']"),
    "an expert of its own": (
        ("experts-spread", "self.experts[rank : rank + 1]", "self.experts[:1]"),
        ["experts-train"],
        "far(ranks['losses'][0], ranks['experts_alone'][0])",
    ),
}  # fmt: skip
ASIDE = ("redistribute", "hybrid", "clip", "pipeline", "experts-routers")  # no cell of a lever needs them
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
    assert len(chapter.twice) == 21


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
    assert chapter.value("far(ranks['losses'][0])") < TOLERANCE, "both ranks of a pair compute the same"
    assert chapter.value("[sorted(of_rank) for of_rank in ranks['sent']]") == [["all_gather", "reduce_scatter"]] * 4
    chapter.run("tensor")
    assert chapter.value("[of_rank['all_reduce'][0] for of_rank in ranks['sent']]") == [16] * 4
