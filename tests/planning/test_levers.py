"""The formulas of the memory levers: worked by hand, and held against what real runs keep and peak at."""

from dataclasses import asdict

import pytest
import torch
from runs import mostly_long, train

from fsdp_helpers.measuring.activations import count_block
from fsdp_helpers.models import build_model, count_params
from fsdp_helpers.planning.levers import BlockBytes, Levers, Stack, peak_of_step, transformer_block_bytes

# Two blocks of 10 parameters and nothing around them; autograd keeps 100 bytes of a block, 8 of them its input.
BLOCK = BlockBytes(kept_bytes=100, input_bytes=8, products_bytes=40, working_bytes=60)
TINY = Stack(num_blocks=2, block_params=10, root_params=0, block=BLOCK)


# ---------------------------------------------------------------- by hand


def test_what_is_kept_of_a_waiting_block():
    kinds = ("none", "units", "selective")
    assert [BLOCK.waiting_bytes(kind) for kind in kinds] == [100, 8, 48]


def test_a_block_hand_worked():
    # 1 image of 2 tokens, width 4, 1 head: 24 x 4 + 3 x 1 x 2 + 4 = 106 values a token, 212 values, 848 bytes
    block = transformer_block_bytes(images=1, tokens=2, width=4, num_heads=1)
    assert block.kept_bytes == 848
    assert block.input_bytes == 32  # 2 tokens x 4 values x 4 bytes
    # values a token: q, k, v 12; scores 2; their product with v 4; output 4; hidden layer 16; last product 4
    assert block.products_bytes == 4 * 2 * (12 + 2 + 4 + 4 + 16 + 4)
    assert block.working_bytes == 4 * (2 * 20 + 64)
    # without dropout 12 x 4 + 1 + 4 = 53 values a token: half of it was masks and what they made necessary
    assert transformer_block_bytes(images=1, tokens=2, width=4, num_heads=1, dropout=False).kept_bytes == 424


def test_one_process_hand_worked():
    # Parameters and moments 12 x 20 = 240. In the last block nothing has a gradient yet: 2 x 100 + 60.
    assert peak_of_step(TINY, Levers(strategy="local")) == 240 + 260
    # Checkpointed: in the last block 8 + 100 + 60 = 168; in the first 160, and the last one's gradients, 40: more.
    checkpointed = Levers(strategy="local", activation_checkpointing="units")
    assert peak_of_step(TINY, checkpointed) == 240 + 200
    # DDP's buckets: 4 x 20 more
    assert peak_of_step(TINY, Levers(strategy="ddp", world_size=2)) == 240 + 80 + 260


def test_units_hand_worked():
    # Two ranks: slices and moments 120. In the last block: itself and the next gathered, 40 + 40; 2 x 100 + 60.
    fsdp = Levers(strategy="fsdp-auto-wrap", world_size=2)
    assert peak_of_step(TINY, fsdp) == 120 + 80 + 260
    # bf16 halves what is gathered
    assert peak_of_step(TINY, Levers(strategy="fsdp-auto-wrap", world_size=2, precision="bf16")) == 120 + 40 + 260
    # Two micro-batches: whole gradients wait, 80; or, reduced after each, slices, 40.
    waiting = {"strategy": "fsdp-auto-wrap", "world_size": 2, "micro_batches": 2}
    assert peak_of_step(TINY, Levers(**waiting)) == 120 + 80 + 80 + 260
    assert peak_of_step(TINY, Levers(**waiting, sync_micro_batches=True)) == 120 + 40 + 80 + 260


def test_the_reduction_counts_where_activations_are_small():
    # No activations: FSDP2, last block: next gathered 40, sent 40, its copy 40, the slice 20 -> 140 + 120;
    # first block: the last one's slice 20, what it sent 40, gathered 40; or 20 + sent 40 + copy 40 + slice 20: less.
    nothing = BlockBytes(kept_bytes=0, input_bytes=0, products_bytes=0, working_bytes=0)
    stack = Stack(num_blocks=2, block_params=10, root_params=0, block=nothing)
    assert peak_of_step(stack, Levers(strategy="fsdp-auto-wrap", world_size=2)) == 120 + 140


def test_one_unit_has_no_formula():
    with pytest.raises(ValueError, match="no formula for strategy 'fsdp'; there is one for local, ddp, fsdp-auto-wrap"):
        peak_of_step(TINY, Levers(strategy="fsdp"))


# ---------------------------------------------------------------- against real blocks and real runs

WIDTH, HEADS, TOKENS, THRESHOLD = 64, 4, 16, 40_000  # of "vit"; its blocks have 49,984 parameters each
SETTINGS = {"model": "vit", "min_num_params": THRESHOLD, "max_steps": 3, "test_images": 2}


@pytest.mark.parametrize("dropout", [True, False])
@pytest.mark.parametrize("images", [8, 32])
def test_the_formula_is_what_autograd_keeps(images, dropout):
    block = build_model("vit", dropout=dropout).train().blocks[0]
    tokens = torch.randn(images, TOKENS, WIDTH, requires_grad=True)
    predicted = transformer_block_bytes(images=images, tokens=TOKENS, width=WIDTH, num_heads=HEADS, dropout=dropout)
    assert count_block(block, tokens) == predicted  # to the byte


def predict(levers: Levers, images: int) -> int:
    """The peak of "vit" with so many images on a rank."""
    model = build_model("vit").train()
    block, images = model.blocks[0], images // levers.micro_batches
    dtype = torch.bfloat16 if levers.precision == "bf16" else torch.float32
    tokens = torch.randn(images, TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    block_params = count_params(block)
    root_params = count_params(model) - len(model.blocks) * block_params
    counted = count_block(block.to(dtype), tokens)
    return peak_of_step(Stack(num_blocks=4, block_params=block_params, root_params=root_params, block=counted), levers)


@pytest.fixture(scope="module")
def measure(tmp_path_factory):
    """The peak of a run on the digits, 64 images a rank; one run for each `Levers`."""
    data_dir = str(tmp_path_factory.mktemp("no-mnist"))
    peaks = {}

    def measure_once(levers: Levers) -> int:
        if levers not in peaks:
            settings = {name: value for name, value in asdict(levers).items() if name not in ("strategy", "world_size")}
            settings |= SETTINGS | {"global_batch_size": 64 * levers.world_size, "data_dir": data_dir}
            peaks[levers] = train(levers.strategy, levers.world_size, **settings)[0].ranks[0].peak_bytes
        return peaks[levers]

    return measure_once


UNITS = {"strategy": "fsdp-auto-wrap", "world_size": 2}
RUNGS = {
    "local": Levers(strategy="local"),
    "local, checkpointed": Levers(strategy="local", activation_checkpointing="units"),
    "DDP": Levers(strategy="ddp", world_size=2),
    "FSDP1": Levers(**UNITS, api="fsdp1"),
    "FSDP1, checkpointed": Levers(**UNITS, api="fsdp1", activation_checkpointing="units"),
    "FSDP2": Levers(**UNITS),
    "FSDP2, selective": Levers(**UNITS, activation_checkpointing="selective"),
    "FSDP2, bf16": Levers(**UNITS, precision="bf16"),
    "FSDP2, 4 micro-batches": Levers(**UNITS, micro_batches=4),
    "FSDP2, 4 micro-batches, each reduced": Levers(**UNITS, micro_batches=4, sync_micro_batches=True),
}


@pytest.mark.parametrize("name", mostly_long(RUNGS, telling=(0, 1, 5, 6, 8)))
def test_peak_within_5_percent(name, measure):
    predicted, measured = predict(RUNGS[name], images=64), measure(RUNGS[name])
    print(f"{name}: predicted {predicted:,}, measured {measured:,}, ratio {measured / predicted:.4f}")
    assert abs(measured / predicted - 1) < 0.05


@pytest.mark.parametrize(
    "settings", mostly_long([{"strategy": "local"}, {**UNITS, "api": "fsdp1"}, {**UNITS, "api": "fsdp2"}])
)
def test_activation_checkpointing_takes_off_what_the_formula_says(settings, measure):
    plain, checkpointed = Levers(**settings), Levers(**settings, activation_checkpointing="units")
    predicted = predict(plain, images=64) - predict(checkpointed, images=64)
    measured = measure(plain) - measure(checkpointed)
    print(f"{settings}: predicted fall {predicted:,}, measured {measured:,}, ratio {measured / predicted:.4f}")
    assert measured == pytest.approx(predicted, rel=0.1)
