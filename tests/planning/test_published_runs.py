"""Plans next to runs that others published: speeds in the printed range, memory, and nothing refused that ran.

`fixtures/mosaicml_fsdp.csv` has 47 rows of MosaicML's table of MPT models (llm-foundry,
`scripts/train/benchmarking/README.md`). All of them ran, so none may be refused. Their loss is a fused kernel that needs
fewer bytes than torch's; CHUNKS says in how many parts torch's has to be computed to fit as well.
"""

import csv
from functools import cache

import pytest
from runs import FIXTURES

from fsdp_helpers.models.shapes import LlamaShape
from fsdp_helpers.planning.cluster import Cluster
from fsdp_helpers.planning.models import llama_subject
from fsdp_helpers.planning.plan import Plan, Settings, make_plan
from fsdp_helpers.planning.published_runs import PUBLISHED

WITH_MEMORY = [run for run in PUBLISHED if run.memory_bytes]


@pytest.mark.parametrize("run", PUBLISHED, ids=lambda run: f"{run.model}-{run.world_size}-{run.device}")
def test_throughput_lies_in_the_range(run):
    plan = run.plan()
    most, least = (speed / run.world_size for speed in plan.items_per_s)
    assert least <= run.tokens_per_s <= most
    assert most / least <= 1.25 / 0.75 * 1.0001


@pytest.mark.parametrize("run", WITH_MEMORY, ids=lambda run: f"{run.model}-{run.world_size}")
def test_memory_within_a_tenth(run):
    assert run.plan().peak.bytes == pytest.approx(run.memory_bytes, rel=0.1)


DEVICES = {"h100_80gb": "h100", "a100_80gb": "a100", "a100_40gb": "a100-40"}
PRECISIONS = {"amp_bf16": "bf16", "bf16": "pure-bf16"}
# (model, sequence, GPUs, GPU) -> chunks of the loss; all others fit with one
CHUNKS = {
    ("3b", 32768, 8, "h100_80gb"): 2,
    ("1b", 2048, 64, "h100_80gb"): 4,
    ("760m", 512, 8, "h100_80gb"): 2,
    ("3b", 2048, 128, "a100_40gb"): 4,
}
with (FIXTURES / "mosaicml_fsdp.csv").open() as file:
    ROWS = list(csv.DictReader(line for line in file if not line.startswith("#")))


@cache
def plan_of(number: int) -> Plan:
    row = ROWS[number]
    width, sequence, heads = int(row["width"]), int(row["sequence"]), int(row["heads"])
    biases = dict.fromkeys(("norm_bias", "qkv_bias", "out_bias", "mlp_bias", "tied"), True)
    shape = LlamaShape(
        width=width, depth=int(row["depth"]), num_heads=heads, num_kv_heads=heads, mlp_width=4 * width,
        vocabulary=50_368, context=sequence, positions=sequence, gated=False, **biases,
    )  # fmt: skip
    subject = llama_subject(row["model"], shape)
    assert subject.num_params == int(row["parameters"])
    settings = Settings(
        batch=int(row["micro_batch"]) * sequence,
        precision=PRECISIONS[row["precision"]],
        activation_checkpointing={"full": "units", "none": "none"}[row["recompute"]],
        micro_batches=int(row["accumulation"]),
        loss_chunks=CHUNKS.get((row["model"], sequence, int(row["gpus"]), row["gpu"]), 1),
    )
    assert settings.batch * settings.micro_batches * int(row["gpus"]) == int(row["global_batch"]) * sequence
    return make_plan(subject, settings, Cluster.of(DEVICES[row["gpu"]], int(row["gpus"]), settings.precision))


def test_every_published_run_fits_with_its_own_micro_batches():
    assert len(ROWS) == 47
    assert [row for number, row in enumerate(ROWS) if not plan_of(number).fits] == []


def test_more_than_nine_in_ten_published_speeds_lie_in_the_range():
    outside = []
    for number, row in enumerate(ROWS):
        plan = plan_of(number)
        most, least = (speed / plan.cluster.world_size for speed in plan.items_per_s)
        if not least <= float(row["tokens_per_s_per_gpu"]) <= most:
            outside.append((row["model"], row["gpus"], row["gpu"]))
    # 2 sequences on each of 64 ranks: whatever connected them was slower than the machines that this device is sold in
    assert outside == [("70b", "64", "a100_40gb")]
