"""Chapter 07 with lines of its cells changed: each lever does what the text says, and leaving it out undoes that."""

import pytest
from chapters import CellError, Chapter

CELLS = [
    *("second-step", "fsdp", "checkpointed", "selective", "host", "bf16", "masters", "dtypes", "float8"),
    *("in-parts", "same-gradient", "by-parts", "clipping"),
]
ASIDE = ("masters", "same-gradient", "float8")  # no other cell needs them


@pytest.fixture(scope="module")
def chapter(tmp_path_factory):
    """The chapter with its cells run on a quarter of the images, and on one in bf16, in which some CPUs are slow."""
    with Chapter("07", tmp_path_factory.mktemp("chapter") / "07") as chapter:
        chapter.run_all(chapter.set_up_cells())
        chapter.shrink("second-step", ("randn(64,", "randn(16,"), ("arange(64)", "arange(16)"))
        chapter.shrink("bf16", ("reduce_dtype=torch.float32))[1]", "reduce_dtype=torch.float32), num_images=1)[1]"))
        chapter.run_all([cell_id for cell_id in CELLS if cell_id not in ASIDE])
        yield chapter


@pytest.fixture(scope="module")
def right_differences(chapter):
    chapter.run_all(["in-parts", "same-gradient"])
    return rank_0(chapter, "differences")


def rank_0(chapter, name):
    return chapter.value(f"ranks['{name}'][0]")


def peak_bytes(chapter, name):
    return chapter.value(f"ranks['{name}'][0].curve.peak_bytes")


@pytest.mark.long
def test_a_cell_run_again_gives_the_same_output(chapter):
    ids = [*CELLS, "cell-43", "count-yourself", "uneven-rows"]
    assert chapter.ranks_cells() == ids
    chapter.run_twice(ids)
    assert chapter.others() == []


def test_without_the_wrapper_the_activations_stay(chapter):
    plain, checkpointed = peak_bytes(chapter, "step"), peak_bytes(chapter, "checkpointed_step")
    assert peak_bytes(chapter, "selective_step") > checkpointed
    chapter.run("checkpointed", {"checkpointed": ("fully_shard(checkpoint_wrapper(block)", "fully_shard(block")})
    assert peak_bytes(chapter, "checkpointed_step") == pytest.approx(plain, rel=1e-3)
    assert plain > 1.2 * checkpointed


def test_activations_on_the_host_leave_the_device(chapter):
    assert chapter.value("ranks['host_losses'] == ranks['losses']") is True
    plain, peak = peak_bytes(chapter, "step"), peak_bytes(chapter, "host_step")
    assert peak < plain
    keep = ("lambda array: torch.from_numpy(array).to(device, copy=True)", "lambda tensor: tensor")
    source = chapter.source("host", {"host": keep}).replace("hooks(to_host", "hooks(lambda tensor: tensor")
    chapter.execute(source)
    assert peak_bytes(chapter, "host_step") == pytest.approx(plain, rel=0.02), "kept on the device"
    chapter.run("host")


def test_float8_needs_one_scale_for_all_ranks(chapter):
    assert "'float8': '2.5% off'" in chapter.run("float8")
    line = "dist.all_reduce(largest, dist.ReduceOp.MAX)  # one scale for the full tensor\n"
    shown = chapter.run("float8", {"float8": (line, "largest = largest * (rank + 1)  # as if shards differed more\n")})
    assert "'float8': '2.5% off'" not in shown


def test_reduced_in_bf16_half_as_many_bytes_are_sent(chapter):
    fp32, in_fp32, all_bf16, by_default = rank_0(chapter, "in_bf16").values()
    assert 2 * all_bf16["reduce_scatter"] == in_fp32["reduce_scatter"] == fp32["reduce_scatter"]
    changed = {
        "bf16": ("partial(shard_bf16, reduce_dtype=torch.float32)", "partial(shard_bf16, reduce_dtype=torch.bfloat16)")
    }
    chapter.run("bf16", changed)
    assert rank_0(chapter, "in_bf16")["bf16, reduced in fp32"]["reduce_scatter"] == all_bf16["reduce_scatter"]
    chapter.run(
        "bf16", {"bf16": ("MixedPrecisionPolicy(param_dtype=torch.bfloat16, **policy)", "MixedPrecisionPolicy()")}
    )
    without = rank_0(chapter, "in_bf16")["bf16, reduced in bf16"]
    assert (without["all_gather"], without["reduce_scatter"]) == (fp32["all_gather"], fp32["reduce_scatter"])
    assert fp32["all_gather"] == 2 * in_fp32["all_gather"]


@pytest.mark.parametrize(
    "line, instead",
    [
        (" / num_parts\n", "\n"),
        ("is_last or reduce_each)", "False)"),
    ],
    ids=["parts not divided by their number", "never reduced"],
)
def test_a_gradient_that_is_not_that_of_the_batch(chapter, right_differences, line, instead):
    assert all(difference < 1e-5 for difference in right_differences.values())
    try:
        chapter.run("in-parts", {"in-parts": (line, instead)})
        chapter.run("same-gradient")
    except CellError as error:
        assert "NoneType" in error.message  # no gradient on this rank's shards
    else:
        assert max(rank_0(chapter, "differences").values()) > 0.5
    finally:
        chapter.run("in-parts")


def test_unequal_parts_are_off_unless_they_are_weighted(chapter):
    """A quarter of the chapter's images: 8 per rank, in 3 parts of 3, 3 and 2."""
    unequal = {"same-gradient": ('"reduced once": in_parts', '"reduced once": partial(in_parts, num_parts=3)')}
    chapter.run("same-gradient", unequal)
    assert rank_0(chapter, "differences")["reduced once"] > 0.01
    weighted = {"in-parts": ("/ num_parts\n", "* len(part) / len(images)\n"), **unequal}
    chapter.run_all(["in-parts", "same-gradient"], weighted)
    assert rank_0(chapter, "differences")["reduced once"] < 1e-5
    chapter.run("in-parts")


def test_uneven_rows_are_padded_but_not_in_the_moments(chapter):
    chapter.run_all(["count-yourself", "uneven-rows"])
    assert chapter.value("ranks['sizes']") == [
        {"weight": 12_000, "gradient": 12_000, "moment": 12_000},
        {"weight": 12_000, "gradient": 12_000, "moment": 8_000},
    ]


def test_bytes_counted_by_hand_are_exact(chapter):
    """Again if gloo's thread got no core in 50 ms and freed a buffer later than the cell allows for."""
    for _ in range(5):
        chapter.run_all(["count-yourself", "uneven-rows"])
        held, peak = chapter.value("[ranks['held'], ranks['peak']]")
        if held == [48_004, 40_004]:
            break
    assert held == [48_004, 40_004], "weight, gradient, two moments and a step of 4 bytes"
    assert all(most - kept >= 24_000 for kept, most in zip(held, peak, strict=True)), "the full weight comes on top"


def test_every_part_gathers_again(chapter):
    counts = [row[:2] for row in rank_0(chapter, "by_parts").values()]
    assert counts == [(17, 9), (34, 9), (34, 18), (68, 9), (9, 9)]
    changes = {
        "by-parts": ("fully_shard(block, mesh=mesh, reshard_after_forward=False)", "fully_shard(block, mesh=mesh)"),
        "in-parts": (
            "        model.set_requires_gradient_sync(is_last or reduce_each)  # the last backward reduces the sum\n",
            "",
        ),
    }
    chapter.run_all(["in-parts", "by-parts"], changes)
    kept = rank_0(chapter, "by_parts")["4 parts, units kept unsharded"]
    assert kept[0] == 8 * 4 + 9, "forward reshards each block, so backward gathers it again"
    reductions = [row[1] for row in rank_0(chapter, "by_parts").values()]
    assert reductions == [9, 18, 18, 36, 36], "every part's backward reduces"
    chapter.run("in-parts")


def test_the_norm_is_that_of_all_shards(chapter):
    norms = rank_0(chapter, "norms")
    assert norms["returned"] == pytest.approx(norms["one process"], rel=1e-3)
    assert norms["this rank's shard"] < norms["returned"]
    clip = "nn.utils.clip_grad_norm_(model.parameters(), LIMIT).full_tensor()"
    get = "nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).full_tensor()"
    chapter.run("clipping", {"clipping": (f"norm = {clip}", f"norm = {get}")})
    assert rank_0(chapter, "norms")["afterward"] == norms["returned"] > 0.1, "nothing was clipped"
