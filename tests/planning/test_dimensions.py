"""What a rank sends along each dimension of a mesh, and a pipeline's order of work: worked by hand."""

import pytest

from fsdp_helpers.planning import dimensions

GPIPE = ["F0", "F1", "F2", "B0", "B1", "B2"]


def test_fsdp_and_hybrid_sharding():
    # 1,000 parameters, 4,000 bytes. Four ranks: two gathers and a reduce-scatter, 3/4 of 4,000 each
    assert dimensions.fsdp_sent_bytes(1_000, 4) == 3 * 3_000
    assert dimensions.fsdp_sent_bytes(1_000, 4, value_bytes=2) == 4_500
    assert dimensions.fsdp_sent_bytes(1_000, 4, reshards=False) == 2 * 3_000
    # Two copies on two ranks each: 3 x 2,000 within, and an all-reduce of 2,000 bytes, 2 x 1/2 of them, between
    assert dimensions.hybrid_sent_bytes(1_000, 2, 2) == 6_000 + 2_000
    # Many copies: 2 x 7/8 of 2,000
    assert dimensions.hybrid_sent_bytes(1_000, 2, 8) == 6_000 + 3_500


def test_activations():
    # 10 tokens of width 6: 240 bytes. Three layers, four all-reduces each, 2 x 3/4 of 240
    assert dimensions.tensor_sent_bytes(3, 10, 6, 4) == 3 * 4 * 360
    # Keys and values of width 2: 160 bytes; a gather and a reduce-scatter, 3/4 of them each
    assert dimensions.context_sent_bytes(3, 10, 2, 4) == 3 * 2 * 120
    assert dimensions.pipeline_sent_bytes(10, 6) == 480
    assert dimensions.pipeline_sent_bytes(10, 6, at_the_end=True, value_bytes=2) == 120
    # 5 rows out and 7 in, in forward; as many again in backward
    assert dimensions.expert_sent_bytes(3, 5, 7, 6) == 3 * 2 * 12 * 24


def test_one_rank_along_a_dimension_sends_nothing():
    assert dimensions.fsdp_sent_bytes(1_000, 1) == 0
    assert dimensions.tensor_sent_bytes(3, 10, 6, 1) == dimensions.context_sent_bytes(3, 10, 6, 1) == 0


def test_a_pipeline_is_laid_out_as_early_as_possible():
    # Stage 1 begins when F0 arrives, at 1; its B0 ends at 6, and only then can stage 0's B0 begin
    first, last = dimensions.pipeline_spans([GPIPE, GPIPE])
    assert [(work.start, work.end) for work in first] == [(0, 1), (1, 2), (2, 3), (6, 8), (8, 10), (10, 12)]
    assert [(work.start, work.end) for work in last] == [(1, 2), (2, 3), (3, 4), (4, 6), (6, 8), (8, 10)]


@pytest.mark.parametrize("num_stages, micro_batches, backward", [(2, 4, 2.0), (4, 4, 1.0), (3, 9, 2.5), (1, 3, 2.0)])
def test_the_bubble_is_that_of_the_formula(num_stages, micro_batches, backward):
    order = [f"{kind}{number}" for kind in "FB" for number in range(micro_batches)]
    spans = dimensions.pipeline_spans([order] * num_stages, backward=backward)
    assert dimensions.idle_share(spans) == pytest.approx(dimensions.pipeline_bubble(num_stages, micro_batches))


def test_a_worse_order_has_a_larger_bubble():
    one_by_one = ["F0", "B0", "F1", "B1"]
    spans = dimensions.pipeline_spans([one_by_one, one_by_one])
    assert dimensions.idle_share(spans) == pytest.approx(0.5)  # by the formula it would be 1 / 3


def test_stages_that_wait_for_each_other_are_refused():
    with pytest.raises(ValueError, match="wait for each other: B0, F1 can never begin"):
        dimensions.pipeline_spans([["F0", "B0", "F1"], ["F0", "F1", "B0"]])


def test_micro_batches_in_flight():
    assert dimensions.most_in_flight(GPIPE) == 3
    assert dimensions.most_in_flight(["F0", "B0", "F1", "B1"]) == 1


def test_a_published_mesh():
    # A rank of 2 x 2 x 2 x 2: half of the layers, half of each matrix, half of the tokens
    run = dimensions.DimensionedRun(
        model="small", params=1_600, layers=4, width=8, kv_width=4,
        data=2, tensor=2, context=2, pipeline=2, sequences=3, length=10,
    )  # fmt: skip
    assert run.num_gpus == 16
    assert run.sent_bytes() == {
        "FSDP": 2 * 600,  # 400 parameters, 800 bytes, on the 4 ranks of data and context: 2 x 3/4 of them
        "tensor": 2 * 4 * 240,  # 2 layers, 15 tokens x 8 x 2 bytes
        "context": 2 * 2 * 120,  # 2 layers; keys and values of 30 tokens x 2 of width, 240 bytes, half of them each way
        "pipeline": 240,  # either of two stages is at an end
    }
    assert [one.num_gpus for one in dimensions.PUBLISHED_DIMENSIONS] == [256, 512, 512, 512, 512, 512]
