"""What notebooks 01 to 08 claim, measured on GPUs: bytes, peaks, losses, levers, copies, graphs and streams."""

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile

from fsdp_helpers.checkpointing.resume import run_checkpoints
from fsdp_helpers.cli.doctor.gpu import Check, Finding, Numbers, attempt, count, judged
from fsdp_helpers.cli.doctor.gpu_checks import RANKS, largest_difference
from fsdp_helpers.cli.doctor.rows import NOTE, PASS
from fsdp_helpers.config import TrainConfig
from fsdp_helpers.data.images import Dataset, Split
from fsdp_helpers.measuring.offload_copies import TO_DEVICE, TO_HOST, trace_copies
from fsdp_helpers.measuring.step_profile import predicted_peaks
from fsdp_helpers.models.shapes import VIT_SHAPES
from fsdp_helpers.models.vit import ViT
from fsdp_helpers.quantities import format_bytes, format_seconds
from fsdp_helpers.ranks.group import process_group, rank_device
from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.training.worker import run_training

DEVICE = "cuda"
NUM_PARAMS = 1_199_882  # of ShallowNet
STEPS = 6
# Above the formula: a step counter of 4 bytes for each tensor, and a loss for each step. Chapters 01 to 05 assert this.
HELD = 1.0001
STAYS = 0.1  # of the state: at most this much of it stays on the device under offload
PEAK = 0.05  # how far a peak may be from its prediction; 09 states a few percent
SAME, SAME_IN_BF16, SAME_COMPILED = 1e-5, 0.05, 1e-4
STRATEGIES = {
    "local": {"strategy": "local"},
    "ddp": {"strategy": "ddp"},
    "fsdp2": {"strategy": "fsdp"},
    "fsdp1": {"strategy": "fsdp", "api": "fsdp1"},
    "auto-wrap, fsdp2": {"strategy": "fsdp-auto-wrap"},
    "auto-wrap, fsdp1": {"strategy": "fsdp-auto-wrap", "api": "fsdp1"},
    "offload, fsdp2": {"strategy": "fsdp-offload"},
    "offload, fsdp1": {"strategy": "fsdp-offload", "api": "fsdp1"},
}
VIT = {"model": "vit-deep", "strategy": "fsdp-auto-wrap", "min_num_params": 500_000, "global_batch_size": 256}
LEVERS = {
    "none": VIT,
    "units": VIT | {"activation_checkpointing": "units"},
    "selective": VIT | {"activation_checkpointing": "selective"},
    "bf16": VIT | {"precision": "bf16"},
}


@contextmanager
def group_of_one() -> Iterator[None]:
    """This process is the only rank."""
    with tempfile.TemporaryDirectory() as folder:
        with process_group(0, 1, device=DEVICE, init_method=f"file://{folder}/meeting-point"):
            yield


def config_of(changes: dict, world_size: int = 1) -> TrainConfig:
    settings = {"global_batch_size": 32} | changes
    settings["global_batch_size"] *= world_size
    return TrainConfig(max_steps=STEPS, dropout=False, **settings)


def train_on_noise(rank: int, world_size: int, config: TrainConfig) -> Any:
    """A run of the package's worker on random images."""
    random = torch.Generator().manual_seed(0)
    images = torch.randn(STEPS * config.global_batch_size, 1, 28, 28, generator=random)
    split = Split(images=images, labels=torch.randint(10, (len(images),), generator=random)).to(rank_device())
    dataset = Dataset(source="random", train=split, test=Split(images=split.images[:16], labels=split.labels[:16]))
    with run_checkpoints(config, rank, dataset.source) as checkpoints:
        return run_training(rank, world_size, config, dataset, checkpoints)


def numbers_of(record: Any) -> dict:
    """A record's plain numbers, and the peak that was predicted for it."""
    rank = asdict(record.ranks[0])
    kept = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "held_bytes", "peak_bytes", "num_units")
    is_planned = record.config.api == "fsdp2"  # nobody predicts FSDP1's peak
    return {name: rank[name] for name in kept} | {
        "predicted_peak_bytes": predicted_peaks({"": record})[""].bytes if is_planned else None,
        "losses": list(record.step_losses),
        "step_s": median(record.step_seconds),
        "reserved_bytes": record.traces[0].reserved_bytes,
        "collectives": [[one["op"], one["count"], one["bytes"]] for one in rank["collectives"]],
    }


def measure_runs(table: dict[str, dict], names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the numbers of these runs, all in this process; a run that fails leaves its traces on, so it's the last."""
    with group_of_one():
        for name in names:
            yield name, numbers_of(train_on_noise(0, 1, config_of(table[name])))
            gc.collect()
            if DEVICE == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()


def judge_strategy(name: str, numbers: Numbers) -> Iterator[Finding]:
    run = numbers[name]
    state = [run[f"{kind}_bytes"] for kind in ("parameter", "gradient", "optimizer")]
    expected = [4 * NUM_PARAMS, 4 * NUM_PARAMS, 8 * NUM_PARAMS]
    yield judged(f"{name}: parameters, gradients, moments", state == expected, f"{expected} bytes", str(state))
    yield judge_held(name, run["held_bytes"])
    yield judge_peak(name, run)
    if name != "local":
        apart = largest_difference(run["losses"], numbers["local"]["losses"])
        yield judged(f"{name}: losses of one process", apart <= SAME, f"within {SAME:g}", f"{apart:.1e}")


def judge_held(name: str, held_bytes: int) -> Finding:
    """Return the verdict on the bytes between two steps: 16 per parameter, 20 with DDP's buckets, none offloaded."""
    what, measured = f"{name}: bytes held on the GPU", f"{held_bytes:,}"
    if name.startswith("offload"):
        gradients = 4 * NUM_PARAMS * name.endswith("fsdp1")  # stay on the GPU with one rank, which FSDP1 doesn't shard
        most = round(STAYS * 16 * NUM_PARAMS) + gradients
        return judged(what, held_bytes <= most, f"at most {most:,}", measured)
    formula = (20 if name == "ddp" else 16) * NUM_PARAMS
    passed = formula <= held_bytes <= HELD * formula
    return judged(what, passed, f"{formula:,} to {HELD * formula:,.0f}", measured)


def judge_peak(name: str, run: Numbers) -> Finding:
    predicted, peak = run["predicted_peak_bytes"], run["peak_bytes"]
    if predicted is None:
        return Finding(f"{name}: peak", "not planned for FSDP1", format_bytes(peak), NOTE)
    said = f"{format_bytes(peak)}, {peak / predicted - 1:+.1%}"
    expected = f"{format_bytes(predicted)} ± {PEAK:.0%}"
    return judged(f"{name}: peak", abs(peak / predicted - 1) <= PEAK, expected, said)


def judge_lever(name: str, numbers: Numbers) -> Iterator[Finding]:
    plain, run = numbers["none"], numbers[name]
    yield judge_peak(f"transformer, before {name}", plain)
    yield judge_peak(f"transformer, {name}", run)
    lower = run["peak_bytes"] < plain["peak_bytes"]
    said = format_bytes(run["peak_bytes"])
    yield judged(f"transformer, {name}: lower peak", lower, f"below {format_bytes(plain['peak_bytes'])}", said)
    apart = largest_difference(run["losses"], plain["losses"])
    passed, said = apart <= SAME, f"within {SAME:g}"
    if name == "bf16":
        passed, said = 0 < apart <= SAME_IN_BF16, f"above 0, at most {SAME_IN_BF16:g}"
    yield judged(f"transformer, {name}: losses", passed, said, f"{apart:.1e}")


# ---------------------------------------------------------------- on all GPUs


def train_each(rank: int, world_size: int, runs: dict[str, TrainConfig]) -> dict[str, dict]:
    return {name: numbers_of(train_on_noise(rank, world_size, config)) for name, config in runs.items()}


def measure_all_gpus() -> Iterator[tuple[str, Any]]:
    num_gpus = count()
    chosen = {name: config_of(changes, num_gpus) for name, changes in STRATEGIES.items() if name != "local"}
    yield "runs", launch(train_each, chosen, world_size=num_gpus, device=DEVICE, progress=False)[0]
    yield "num_gpus", num_gpus


def judge_all_gpus(numbers: Numbers) -> Iterator[Finding]:
    runs, ranks = numbers["runs"], numbers["num_gpus"]
    for name, run in runs.items():
        yield judge_peak(f"{name}, {ranks} GPUs", run)
        apart = largest_difference(run["losses"], runs["ddp"]["losses"])
        yield judged(f"{name}, {ranks} GPUs: losses of DDP", apart <= SAME, f"within {SAME:g}", f"{apart:.1e}")
        if name == "fsdp2":
            state = sum(run[f"{kind}_bytes"] for kind in ("parameter", "gradient", "optimizer"))
            most = 16 * NUM_PARAMS // ranks + 16 * 10_000  # rank 0 has the larger part of every tensor
            yield judged(f"{name}, {ranks} GPUs: state", state <= most, f"at most {most:,}", f"{state:,}")


# ---------------------------------------------------------------- offload and streams

WIDTH, NUM_BLOCKS, ROWS = 2048, 8, 4096
BLOCK_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


def measure_streams() -> Iterator[tuple[str, Any]]:
    """Yield what ran on each stream in a step under FSDP2, without and with offload."""
    with group_of_one():
        for name, offload in (("fsdp2", False), ("offload", True)):
            yield name, attempt(lambda offload=offload: streams_of(offload))


def streams_of(offload: bool) -> dict:
    device = rank_device()
    mesh = init_device_mesh(device.type, (1,))
    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS)])
    for block in model:
        fully_shard(block, mesh=mesh, offload_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    inputs = torch.randn(ROWS, WIDTH, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    with trace_copies(model) as copies:
        step()
    synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        step()
        synchronize(device)
    found = summarize(events_on_gpu(profiled))
    copied = [(copy.way, copy.bytes) for copy in copies if copy.was_made]
    found["to_device_bytes"] = sum(size for way, size in copied if way == TO_DEVICE)
    found["to_host_bytes"] = sum(size for way, size in copied if way == TO_HOST)
    shards = [parameter.to_local() for parameter in model.parameters()]
    found["pinned"] = sum(shard.is_pinned() for shard in shards if device.type == "cuda")
    found["shards"] = len(shards)
    return found


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def events_on_gpu(profiled: profile) -> list[tuple[str, int, int, int]]:
    """Name, stream, start and end in ns of all that ran on the GPU."""
    events = profiled.profiler.kineto_results.events()
    return [
        (event.name(), event.device_resource_id(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if "CUDA" in str(event.device_type()) and event.duration_ns() and not event.is_user_annotation()
    ]


def summarize(events: list[tuple[str, int, int, int]]) -> dict:
    """The busy time of each stream and of copies, and how long work on other streams ran beside the busiest one's."""
    by_stream: dict[int, list] = {}
    for event in events:
        by_stream.setdefault(event[1], []).append(event)
    busy = {stream: busy_ns(found) for stream, found in by_stream.items()}
    main = max(busy, key=busy.get, default=None)
    beside = [event for event in events if event[1] != main]
    to_device = [event for event in events if "HtoD" in event[0]]
    compute = [event for event in by_stream.get(main, []) if not event[0].startswith("Mem")]  # no copies
    return {
        "streams": sorted(by_stream),
        "beside_us": busy_ns(beside) / 1e3,
        "overlap_us": overlap_ns(beside, compute) / 1e3,
        "to_device_us": busy_ns(to_device) / 1e3,
        "to_device_overlap_us": overlap_ns([one for one in to_device if one[1] != main], compute) / 1e3,
        "copies_from": sorted({name for name, *_ in to_device}),
    }


def merged(events: list) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    for start, end in sorted((start, end) for *_, start, end in events):
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((start, end))
    return spans


def busy_ns(events: list) -> int:
    return sum(end - start for start, end in merged(events))


def overlap_ns(some: list, others: list) -> int:
    """How long something of both ran."""
    pairs = ((one, other) for one in merged(some) for other in merged(others))
    return sum(max(0, min(one[1], other[1]) - max(one[0], other[0])) for one, other in pairs)


def judge_streams(numbers: Numbers) -> Iterator[Finding]:
    for name, run in numbers.items():
        said = f"{run['overlap_us']:.0f} of {run['beside_us']:.0f} µs on {len(run['streams']) - 1} other streams"
        is_idle = run["beside_us"] == 0  # with one rank, some versions of torch gather without copying
        result = NOTE if is_idle or run["overlap_us"] == 0 else PASS
        yield Finding(f"{name}: work beside the arithmetic", "some of it overlaps", said, result)
    run = numbers["offload"]
    shards = run["shards"]
    yield judged("offload: pinned shards", run["pinned"] == shards, str(shards), str(run["pinned"]))
    expected, copied = 2 * NUM_BLOCKS * BLOCK_BYTES, run["to_device_bytes"]
    yield judged("offload: bytes to the GPU in a step", copied == expected, f"{expected:,}", f"{copied:,}")
    expected, copied = NUM_BLOCKS * BLOCK_BYTES, run["to_host_bytes"]
    yield judged("offload: bytes to the host in a step", copied == expected, f"{expected:,}", f"{copied:,}")
    # A single rank gathers nothing: torch 2.11 to 2.15 copy in the stream of the arithmetic (`wait_for_unshard`), and
    # the planner counts on it. With more ranks, copies have a stream of their own; that needs as many GPUs.
    hidden, total = run["to_device_overlap_us"], run["to_device_us"]
    passed, expected = hidden == 0 < total, "none: a single rank waits for each"
    yield judged("offload: copies to the GPU beside arithmetic", passed, expected, f"{hidden:.0f} of {total:.0f} µs")


# ---------------------------------------------------------------- compile per block


def measure_compiled() -> Iterator[tuple[str, Any]]:
    """Yield losses and seconds per step, eager and compiled block by block, and the number of graphs."""
    import torch._dynamo.utils

    with group_of_one():
        yield "eager", losses_and_seconds(compiles=False)
        torch._dynamo.utils.counters.clear()
        yield "compiled", losses_and_seconds(compiles=True)
        yield "num_graphs", torch._dynamo.utils.counters["stats"]["unique_graphs"]


def losses_and_seconds(compiles: bool) -> dict:
    device = rank_device()
    mesh = init_device_mesh(device.type, (1,))
    torch.manual_seed(0)
    model = ViT(VIT_SHAPES["vit-mnist"])
    for number, block in enumerate(model.blocks):
        if compiles:
            model.blocks[number] = torch.compile(block)
        fully_shard(model.blocks[number], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    images = torch.randn(256, 1, 28, 28, generator=torch.Generator().manual_seed(0)).to(device)
    labels = torch.arange(256, device=device) % 10
    losses, seconds = [], []
    for _ in range(8):
        began_s = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began_s)
    return {"losses": losses, "first_s": seconds[0], "step_s": median(seconds[3:])}


def judge_compiled(numbers: Numbers) -> Iterator[Finding]:
    graphs, eager, compiled = numbers["num_graphs"], numbers["eager"], numbers["compiled"]
    yield judged("compiled blocks: graphs for all four", graphs == 1, "1", str(graphs))
    apart = largest_difference(compiled["losses"], eager["losses"])
    yield judged("compiled blocks: losses", apart <= SAME_COMPILED, f"within {SAME_COMPILED:g}", f"{apart:.1e}")
    said = f"{format_seconds(compiled['step_s'])}, first step {format_seconds(compiled['first_s'])}"
    yield Finding("compiled blocks: seconds per step", f"{format_seconds(eager['step_s'])} eager", said, NOTE)


def check(title: str, measure: Callable, judge: Callable, **settings: Any) -> Check:
    return Check(title=title, measure=measure, judge=judge, needs=RANKS, **settings)


CHECKS = (
    *(
        check(name, partial(measure_runs, STRATEGIES, dict.fromkeys(["local", name])), partial(judge_strategy, name))
        for name in STRATEGIES
    ),
    *(
        check(name, partial(measure_runs, LEVERS, ["none", name]), partial(judge_lever, name))
        for name in LEVERS
        if name != "none"
    ),
    check("compile per block", measure_compiled, judge_compiled, limit_s=150.0),
    check("all GPUs", measure_all_gpus, judge_all_gpus, num_gpus=2, limit_s=150.0),
    check("streams", measure_streams, judge_streams, alone=True),
)
