"""What 09 plans, beside a real step: a language model's peak in the allocator, and the time that a step takes."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_gpu.claims import synchronize
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from fsdp_helpers.cli.doctor.gpu import Check, Finding, Numbers, attempt, judged
from fsdp_helpers.cli.doctor.gpu_checks import RANKS
from fsdp_helpers.cli.doctor.rows import NOTE
from fsdp_helpers.measuring.memory import take_work_spaces
from fsdp_helpers.measuring.own_plan import plan_model
from fsdp_helpers.models.llama import Layer, Llama
from fsdp_helpers.models.shapes import LlamaShape
from fsdp_helpers.planning.cluster import Cluster
from fsdp_helpers.planning.devices import DEVICES
from fsdp_helpers.planning.models import llama_subject
from fsdp_helpers.planning.plan import Plan, Settings, make_plan
from fsdp_helpers.quantities import GB, format_bytes, format_seconds
from fsdp_helpers.ranks.group import rank_device
from fsdp_helpers.sharding.recompute import checkpoint_activations

PEAK = 0.05  # how far the allocator's peak may be from the plan; 09 states a few percent
WARM_UP, TIMED = 3, 5  # steps
CONTEXT = 2048
LARGE = {"width": 2048, "depth": 16, "num_heads": 16, "num_kv_heads": 8, "mlp_width": 5632, "vocabulary": 32000}
SMALL = LARGE | {"width": 1024, "depth": 8, "num_heads": 8, "num_kv_heads": 4, "mlp_width": 2816}
ENOUGH = 40 * GB  # of memory for the large one: 0.8 billion parameters, 16 bytes each, and activations
RUNS = {
    "bf16": {"precision": "bf16"},
    "bf16, recomputed": {"precision": "bf16", "activation_checkpointing": "units"},
    "bf16, recomputed, offload": {
        "precision": "bf16",
        "activation_checkpointing": "units",
        "strategy": "fsdp-offload",
    },
    "fp32, recomputed": {"activation_checkpointing": "units"},
}
SHARE_OF_BF16 = "not planned: published shares of the peak rate are of runs in bf16"


@contextmanager
def group_as_in_scripts() -> Iterator[None]:
    """This process is the only rank, with CUDA's defaults: `process_group` makes its libraries repeat their numbers."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    yield
    dist.destroy_process_group()


def measure_plans() -> Iterator[tuple[str, Any]]:
    with group_as_in_scripts():
        device = rank_device()
        memory_bytes = torch.cuda.get_device_properties(device).total_memory
        is_large = memory_bytes >= ENOUGH
        shape = LlamaShape(**(LARGE if is_large else SMALL), context=CONTEXT, tied=True)
        batch = 4 if is_large else 2
        name = torch.cuda.get_device_name(device)
        yield "gpu", name
        for title, settings in RUNS.items():
            # In fp32, torch 2.11 has no fused kernel for grouped queries, and no plan counts stored scores
            chosen = shape if "precision" in settings else replace(shape, num_kv_heads=shape.num_heads)
            yield title, attempt(partial(beside_the_plan, chosen, batch, settings, planned_device(name)))
            torch.cuda.empty_cache()


def planned_device(name: str) -> str | None:
    """The planner's name of a GPU: "NVIDIA A100-SXM4-40GB" is "a100-40"."""
    words = re.split("[^a-z0-9]+", name.lower())
    for known in sorted(DEVICES, key=len, reverse=True):
        kind, *size = known.split("-")
        if kind in words and all(any(word.startswith(one) for word in words) for one in size):
            return known
    return None


def beside_the_plan(shape: LlamaShape, batch: int, settings: dict, device_name: str | None) -> dict:
    device_name = device_name or "h100"
    chosen = Settings(batch=batch * shape.context, **settings)
    measured = run_steps(shape, batch, settings)
    host = {"host_update_bytes_per_s": measured["host_update_bytes_per_s"]}  # a GPU's name doesn't tell the host's
    cluster = Cluster.of(device_name, world_size=1, precision=chosen.precision, **host)
    by_shape = make_plan(llama_subject("llama", shape), chosen, cluster)
    tokens = tokens_of(shape, batch, torch.device("cpu"))
    how = {"world_size": 1, "device": device_name, "unit_class": Layer, "loss_of": loss_of}
    by_factory, _ = plan_model(partial(on_meta, shape), tokens, **how, **settings)
    return {
        "num_params": by_shape.num_params,
        "plan_by_shape": plan_numbers(by_shape),
        "plan_by_factory": plan_numbers(by_factory),
        "measured": measured,
    }


def on_meta(shape: LlamaShape) -> Llama:
    with torch.device("meta"):
        return Llama(shape)


def plan_numbers(plan: Plan) -> dict:
    return {"peak_bytes": plan.peak.bytes, "when": plan.peak.when, "step_s": plan.step_s}


def tokens_of(shape: LlamaShape, batch: int, device: torch.device) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    return torch.randint(shape.vocabulary, (batch, shape.context), generator=random).to(device)


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The loss is outside the model, as a plan by shape has it."""
    return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def run_steps(shape: LlamaShape, batch: int, settings: dict) -> dict:
    """Train for a few steps; return the allocator's peaks within one of them, and the seconds of others."""
    device = rank_device()
    mesh = init_device_mesh(device.type, (1,))
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    how = {
        "mesh": mesh,
        "mp_policy": bf16 if settings.get("precision") == "bf16" else MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy() if settings.get("strategy") == "fsdp-offload" else OffloadPolicy(),
    }
    take_work_spaces(device)
    others_bytes = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    torch.manual_seed(0)
    with device:
        model = Llama(shape)
    if settings.get("activation_checkpointing") == "units":
        names = [f"model.layers.{number}" for number in range(shape.depth)]
        model = checkpoint_activations(model, names, "units")
    for layer in model.model.layers:
        fully_shard(layer, **how)
    fully_shard(model, **how)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    tokens = tokens_of(shape, batch, device)
    update_seconds = []

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, tokens).backward()
        began_s = time.perf_counter()
        optimizer.step()
        update_seconds.append(time.perf_counter() - began_s)

    for _ in range(WARM_UP):
        step()
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    synchronize(device)
    stats = torch.cuda.memory_stats(device)
    moved_bytes = (3 * 4 + 2 * 8) * sum(parameter.numel() for parameter in model.parameters())  # as plans count them
    seconds = []
    for _ in range(TIMED):
        began_s = time.perf_counter()
        step()
        synchronize(device)
        seconds.append(time.perf_counter() - began_s)
    return {
        "requested_bytes": stats["requested_bytes.all.peak"] - others_bytes,
        "allocated_bytes": stats["allocated_bytes.all.peak"],
        "reserved_bytes": stats["reserved_bytes.all.peak"],
        "seconds": seconds,
        "host_update_bytes_per_s": moved_bytes / median(update_seconds[-TIMED:]),
    }


def judge_plans(numbers: Numbers) -> Iterator[Finding]:
    gpu = planned_device(numbers["gpu"])
    for name, run in numbers.items():
        if name == "gpu":
            continue
        measured, billions = run["measured"], run["num_params"] / 1e9
        for way in ("shape", "factory"):
            planned, peak = run[f"plan_by_{way}"]["peak_bytes"], measured["requested_bytes"]
            said = f"{format_bytes(peak)}, {peak / planned - 1:+.1%}"
            expected = f"{format_bytes(planned)} ± {PEAK:.0%}"
            passed = abs(peak / planned - 1) <= PEAK
            yield judged(f"{billions:.1f} B, {name}: peak, planned by {way}", passed, expected, said)
        said = f"{format_bytes(measured['allocated_bytes'])} in blocks"
        reserved = f"{format_bytes(measured['reserved_bytes'])} reserved"
        yield Finding(f"{billions:.1f} B, {name}: the allocator's peak", "", f"{said}, {reserved}", NOTE)
        rate = measured["host_update_bytes_per_s"]
        if name.endswith("offload"):
            yield Finding(f"{billions:.1f} B, {name}: Adam on the host", "", f"{format_bytes(round(rate))}/s", NOTE)
        yield judge_time(f"{billions:.1f} B, {name}: seconds per step", run, gpu, is_planned=name.startswith("bf16"))


def judge_time(what: str, run: Numbers, gpu: str | None, *, is_planned: bool) -> Finding:
    seconds = median(run["measured"]["seconds"])
    spread = run["plan_by_shape"]["step_s"]
    if not is_planned:
        return Finding(what, SHARE_OF_BF16, format_seconds(seconds), NOTE)
    if gpu is None or spread is None:
        return Finding(what, "no range: the planner doesn't know this GPU", format_seconds(seconds), NOTE)
    expected = f"{format_seconds(spread[0])} to {format_seconds(spread[1])}"
    return judged(what, spread[0] <= seconds <= spread[1], expected, format_seconds(seconds))


CHECKS = (Check(title="plans", measure=measure_plans, judge=judge_plans, needs=RANKS, alone=True, limit_s=150.0),)
