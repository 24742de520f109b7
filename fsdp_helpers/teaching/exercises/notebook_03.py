"""Exercises for notebook 03: lower a run's peak memory, and write an FSDP unit."""

import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from torch import nn
from torch.profiler import record_function

from fsdp_helpers.measuring.collectives import count_collectives
from fsdp_helpers.measuring.memory import trace_memory
from fsdp_helpers.quantities import format_bytes
from fsdp_helpers.ranks.group import gather_over_ranks
from fsdp_helpers.records import RunRecord
from fsdp_helpers.teaching.exercises.answers import exercise, expect
from fsdp_helpers.teaching.exercises.on_ranks import RANKS, Findings, judge_on_ranks, losses_differ, norm_differs
from fsdp_helpers.teaching.exercises.runs import AS_IT_IS, RunTask, judge_run
from fsdp_helpers.teaching.exercises.small_net import (
    NET_PARAMS,
    STEPS,
    adam,
    build_net,
    full_gradient,
    load_batch,
    mean_loss,
    over_ranks,
    plain_losses,
    rank_batch,
)
from fsdp_helpers.training.run import train

LOWER_PEAK = RunTask(peak_bytes=30_000_000, fixed={"model": "shallow", "global_batch_size": 96, **AS_IT_IS})
SLACK_BYTES = 4_000  # for step counters, a loss and a batch
BUILT = "the unit is built"  # a mark in the trace
SMALLEST_BYTES = 500  # objects at least this large may hold parameter values; a step's bookkeeping is smaller
SAME_PEAK = 0.01  # relative difference allowed between the peaks of two runs with the same settings


@exercise("03")
def check_lower_peak(record: RunRecord | None) -> str:
    """Notebook 03: check that a run of ShallowNet peaks below 30 MB on every rank with the batch size unchanged."""
    verdict = judge_run(record, LOWER_PEAK)
    again = train(
        replace(record.config, max_steps=3), world_size=record.world_size, device=record.device, progress=False
    )
    for told, measured in zip(record.ranks, again.ranks, strict=True):
        expect(
            abs(told.peak_bytes - measured.peak_bytes) <= SAME_PEAK * measured.peak_bytes,
            f"in your record, rank {told.rank} peaks at {format_bytes(told.peak_bytes)}; when we"
            f" repeated the run with the same settings, it peaked at {format_bytes(measured.peak_bytes)}",
        )
    return verdict


@exercise("03")
def check_unit(module: str = "my_unit", ranks: tuple[int, ...] = RANKS) -> str:
    """Notebook 03: check that `Unit` shards, unshards, reduces gradients and reshards, with 16 P / N bytes per rank."""
    return judge_on_ranks(train_readers_unit, module, ("Unit",), ranks, module)


def train_readers_unit(rank: int, world_size: int, unit_class: Callable, module: str) -> Findings:
    """Train with the reader's unit as notebook 03 does by hand, and check the unit's held bytes and collectives."""
    model = build_net()
    mean_loss(model, *load_batch(0)).backward()
    right_norm = full_gradient(model).norm().item()
    right = plain_losses(model, adam(list(model.parameters())))
    del model
    losses, squares, expected = [], [], -(-NET_PARAMS // world_size)
    tracemalloc.start()
    with trace_memory("cpu") as trace:
        model = build_net()
        unit = unit_class(model, rank, world_size)
        if not isinstance(getattr(unit, "shard", None), nn.Parameter):
            raise TypeError("a Unit needs `shard`, an nn.Parameter that holds this rank's shard")
        lengths = gather_over_ranks(unit.shard.numel())
        differ = f"the ranks' shards differ in length, {' and '.join(map('{:,}'.format, lengths))}; a collective needs"
        yield len(set(lengths)) > 1, f"{differ} the same number of values from every rank, so where does padding go?"
        padded = f"P = {NET_PARAMS:,} parameters, padded once at their end, give a rank ceil(P / N) = {expected:,}"
        yield lengths[0] != expected, f"the shard has {lengths[0]:,} values; {padded}"
        with record_function(BUILT):
            pass
        optimizer = adam([unit.shard])
        for step in range(STEPS):
            optimizer.zero_grad()
            unit.unshard()
            loss = mean_loss(model, *rank_batch(step, rank, world_size))
            loss.backward()
            unit.reduce_gradients()
            if unit.shard.grad is None:
                raise TypeError(
                    "after reduce_gradients, `shard.grad` is None; it should be this rank's shard of the mean"
                )
            squares.append(unit.shard.grad.square().sum())
            unit.reshard()
            optimizer.step()
            losses.append(loss.detach())
        elsewhere_bytes = bytes_outside_of_torch(tracemalloc.take_snapshot(), module)
    tracemalloc.stop()
    last = trace.last_step()
    counts = {counted.op: counted.count for counted in count_collectives(last.collectives)}
    losses, norm = over_ranks(losses), (world_size * over_ranks(squares[:1])[0]) ** 0.5
    too_many = f"a step runs these collectives: {counts or 'none'}; one all-gather and one reduce-scatter are enough"
    yield counts != {"all_gather": 1, "reduce_scatter": 1}, too_many
    built_bytes = trace.between_marks(BUILT)[0][0]
    kept = f"{built_bytes:,} bytes are held after __init__, more than a shard needs; what wasn't freed?"
    yield built_bytes > 4 * expected + SLACK_BYTES, kept
    held_bytes = last.curve.held_bytes
    kept = f"{held_bytes:,} bytes are held between steps, more than four shards need; what wasn't freed?"
    yield held_bytes > 16 * expected + SLACK_BYTES, kept
    # NumPy arrays, and objects created by the reader's lines
    outside = f"{elsewhere_bytes:,} bytes are held between steps outside torch, in NumPy or Python"
    yield elsewhere_bytes > SLACK_BYTES, f"{outside}; a rank should keep only its shard"
    in_forward = (
        "the first loss is wrong, before any gradient is used, so `unshard` doesn't restore all parameters' values"
    )
    yield losses_differ(losses[:1], right[:1], in_forward)
    yield norm_differs(norm, right_norm, world_size)
    yield losses_differ(losses, right, "the losses don't match a single-process run")
    return "Right: on {ranks} ranks, the losses match one process's, and each rank holds 16 P / N bytes."


def bytes_outside_of_torch(snapshot: tracemalloc.Snapshot, module: str) -> int:
    """Return the total size in bytes of all NumPy arrays and of the Python objects created by the module's code.

    Tensor storage isn't included, because `trace_memory` already counts it. Small objects, such as the Python objects
    that wrap tensors, aren't included either.
    """
    arrays = tracemalloc.DomainFilter(inclusive=True, domain=np.lib.tracemalloc_domain)
    own_lines = tracemalloc.Filter(inclusive=True, filename_pattern=f"*{module}.py")
    found = snapshot.filter_traces([arrays, own_lines]).traces
    return sum(block.size for block in found if block.size >= SMALLEST_BYTES)
