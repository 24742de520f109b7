"""Exercises for notebook 02: find the smallest bucket that hides latency, and average gradients in buckets."""

from collections.abc import Callable

import torch
from torch.nn.parallel import DistributedDataParallel

from fsdp_helpers.measuring.collectives import trace_collectives
from fsdp_helpers.quantities import format_bytes
from fsdp_helpers.teaching.exercises.answers import DRAW, call, exercise, expect, expect_number
from fsdp_helpers.teaching.exercises.on_ranks import (
    RANKS,
    TOLERANCE,
    Findings,
    judge_on_ranks,
    losses_differ,
)
from fsdp_helpers.teaching.exercises.small_net import NET_PARAMS, build_net, full_gradient, train_averaging

NET_BYTES = 4 * NET_PARAMS
BUCKET_SIZES = (41_000, 1_000_000)  # bytes; the largest gradient fits in either, and all gradients in the second


@exercise("02")
def check_smallest_bucket(smallest_bucket: Callable[[int, float, float], float] | None) -> str:
    """Notebook 02: check the smallest bucket size in bytes at which latency is at most 10% of the all-reduce time."""
    # One pass takes the link's latency plus the time to send one part. Fresh links range from a
    # loopback to one between buildings.
    fresh = [(DRAW.randint(2, 2_048), DRAW.uniform(1, 200) * 1e-6, DRAW.uniform(0.1, 900) * 1e9) for _ in range(5)]
    for world_size, latency_s, bytes_per_s in [(2, 1e-5, 1e10), (8, 1e-5, 1e10), (8, 2e-5, 1e10), *fresh]:
        given = call(smallest_bucket, world_size, latency_s, bytes_per_s)
        expect_number(given)
        says = (
            f"for {world_size} ranks, {latency_s * 1e6:.1f} µs and {bytes_per_s / 1e9:.1f} GB/s, your function returns"
            f" {given:,.0f} bytes; "
        )
        expect(given > 0, f"{says}an empty bucket sends nothing")
        passes = 2 * (world_size - 1)
        latency, bytes_on_their_way = passes * latency_s, passes * given / world_size / bytes_per_s
        share = latency / (latency + bytes_on_their_way)
        expect(share < 0.1 + 1e-6, f"{says}latency then takes {share:.1%} of the all-reduce time")
        expect(share > 0.1 - 1e-6, f"{says}latency is only {share:.1%} of the all-reduce time; a smaller bucket works")
    return "Right: N times the bytes a link sends in nine times its latency. Twice as many ranks need twice the bytes."


@exercise("02")
def check_average_gradients(module: str = "my_ddp", ranks: tuple[int, ...] = RANKS) -> str:
    """Notebook 02: check that `average_gradients(...)` gives DDP's losses with one all-reduce per bucket."""
    return judge_on_ranks(average_by_reader, module, ("average_gradients",), ranks)


def average_by_reader(rank: int, world_size: int, average_gradients: Callable) -> Findings:
    """Train with the reader's function and with DDP, and check the first gradients, the losses and the last collectives."""
    model, right_gradients = DistributedDataParallel(build_net()), []
    right = train_averaging(model, rank, world_size, lambda: right_gradients.append(full_gradient(model)))
    answers = {}
    for bucket_bytes in BUCKET_SIZES:
        model, gradients, seen = build_net(), [], []

        def average(model=model, bucket_bytes=bucket_bytes, gradients=gradients, seen=seen) -> None:
            with trace_collectives() as events:
                average_gradients(model, bucket_bytes)
            gradients.append(full_gradient(model))
            seen[:] = events

        answers[bucket_bytes] = train_averaging(model, rank, world_size, average), gradients, seen
    for bucket_bytes, (losses, gradients, seen) in answers.items():
        says = f"with buckets of {format_bytes(bucket_bytes)}, "
        yield len(seen) == 0, f"{says}there was no collective; gradients that aren't sent aren't averaged"
        mean, own = right_gradients[0], gradients[0]
        summed = f"{says}the gradients are sums over {world_size} ranks, not means"
        yield torch.allclose(own, world_size * mean, atol=TOLERANCE), summed
        off = (~torch.isclose(own, mean, atol=TOLERANCE)).sum().item()
        buckets = "are all buckets sent, and their means copied back?"
        yield off > 0, f"{says}{off:,} of {NET_PARAMS:,} gradients aren't the ranks' mean; {buckets}"
        yield losses_differ(losses, right, f"{says}this rank's first gradients are right, but the losses aren't DDP's")
        # Two neighboring buckets together exceed the limit of one; otherwise they'd be a single bucket.
        most = 2 * NET_BYTES // bucket_bytes + 1
        yield len(seen) > most, f"{says}a step runs {len(seen)} collectives; {most} are enough"
        largest = max(collective.bytes for collective in seen)
        yield largest > bucket_bytes, f"{says}one collective sends {format_bytes(largest)}"
    return "Right: the same losses as DDP on {ranks} ranks, with one collective per bucket."
