"""Is this project fast enough? `python tests/evidence/benchmark.py` measures the ranks; with `fsdp`, sharding.

`ranks`: a cell on live ranks, the time until they are up, and a launch of two workers that do nothing, against
`mp.spawn`. `fsdp`: a step of DeepNet on two CPU ranks, FSDP against DDP and auto-wrap against one unit, for both APIs.
What a step moves does not depend on the batch, so these ratios fall as it grows (`--batch-size`). All ratios are of
medians over interleaved rounds, so that a busy machine slows both sides alike.
Exits 1 if a target is missed. Not a test: run it on a machine that does nothing else.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.multiprocessing
from idle_worker import return_rank

from fsdp_helpers import Ranks
from fsdp_helpers.config import TrainConfig
from fsdp_helpers.data.source import prepare_data
from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.training.watch import STEADY_STEP
from fsdp_helpers.training.worker import train_worker

MP_SPAWN_OVER_LAUNCH, MOST_CELL_S, MOST_UP_S, NUM_CELLS = 20.0, 0.03, 1.0, 50
MOST_OVER_DDP, MOST_OVER_ONE_UNIT = 1.3, 1.15  # this many times the step time, or less
SHARDED = [("fsdp", "fsdp1"), ("fsdp", "fsdp2"), ("fsdp-auto-wrap", "fsdp1"), ("fsdp-auto-wrap", "fsdp2")]


def plain_launch() -> float:
    start_s = time.perf_counter()
    torch.multiprocessing.spawn(return_rank, nprocs=2)
    return time.perf_counter() - start_s


def our_launch() -> float:
    start_s = time.perf_counter()
    launch(return_rank, world_size=2, device="cpu", progress=False)
    return time.perf_counter() - start_s


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def interleaved(ours, plain, rounds: int) -> tuple[float, float]:
    """The medians of both sides, measured in turn."""
    pairs = [(ours(), plain()) for _ in range(rounds)]
    return tuple(statistics.median(side) for side in zip(*pairs, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("section", nargs="?", choices=("ranks", "fsdp"), default="ranks")
    parser.add_argument("--rounds", type=int, help="default: ranks 5, fsdp 2")
    parser.add_argument("--steps", type=int, help="with fsdp: steps of each measurement (default: 10)")
    parser.add_argument("--batch-size", type=int, default=1024, help="with fsdp: images a step (default: %(default)s)")
    options = parser.parse_args()
    if options.section == "fsdp":
        return fsdp_section(options.rounds or 2, options.steps or 10, options.batch_size)
    return in_a_python_of_its_own(options.rounds or 5)


def in_a_python_of_its_own(rounds: int) -> int:
    """Without a script, as a kernel is: else every rank would import this one, `launch`'s and those of `mp.spawn`."""
    code = f"import benchmark; raise SystemExit(benchmark.ranks_section({rounds}))"
    return subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=False).returncode


def ranks_section(rounds: int) -> int:
    """Live ranks and launched ones, two of each on the CPU, against `mp.spawn`."""
    start_s = time.perf_counter()
    launch(return_rank, world_size=2, device="cpu", progress=False)
    print(f"\nonce, the server loads torch: {time.perf_counter() - start_s:.2f} s; from then on:")
    fast_s, slow_s = interleaved(our_launch, plain_launch, rounds)
    up_s, cells_s = zip(*(live_ranks() for _ in range(rounds)), strict=True)
    up_s, cell_s = statistics.median(up_s), statistics.median(itertools.chain(*cells_s))
    missed = False
    for name, value, limit in [
        ("a %%ranks all-reduce, median", f"{cell_s * 1000:.1f} ms", cell_s / MOST_CELL_S),
        ("until ranks are up", f"{up_s:.2f} s", up_s / MOST_UP_S),
        ("a launch", f"{fast_s:.3f} s", fast_s / (slow_s / MP_SPAWN_OVER_LAUNCH)),
        ("mp.spawn", f"{slow_s:.3f} s", 0.0),
    ]:
        missed |= limit > 1
        print(f"{name:30} {value:>10}{'  MISSED' * (limit > 1)}")
    print(f"mp.spawn takes {slow_s / fast_s:.1f} times as long as a launch, {slow_s / up_s:.1f} times as long as Ranks")
    return int(missed)


def live_ranks() -> tuple[float, list[float]]:
    """Seconds until two ranks are up, and of each of 50 cells with an all-reduce."""
    start_s = time.perf_counter()
    with Ranks(2, device="cpu") as ranks:
        up_s, cells_s = time.perf_counter() - start_s, []
        ranks.run("import torch\nimport torch.distributed as dist\nx = torch.ones(1)")
        for _ in range(NUM_CELLS):
            start_s = time.perf_counter()
            ranks.run("dist.all_reduce(x)")
            cells_s.append(time.perf_counter() - start_s)
    return up_s, cells_s


# ---------------------------------------------------------------- sharding


def fsdp_section(rounds: int, steps: int, batch_size: int) -> int:
    if steps <= STEADY_STEP:
        print(f"The first {STEADY_STEP} steps are not timed; --steps must be more than that.", file=sys.stderr)
        return 2
    prepare_data()
    ddp = ("ddp", "fsdp2")  # the API means nothing here
    seconds = {which: [] for which in [ddp, *SHARDED]}
    for _ in range(rounds):
        for which, times_s in seconds.items():
            times_s += steady_step_seconds(*which, steps, batch_size)
    median_s = {which: statistics.median(times_s) for which, times_s in seconds.items()}

    print(f"torch {torch.__version__}, {_num_cores()} cores, DeepNet on two CPU ranks, {batch_size} images a step,")
    print(f"median of {rounds} rounds of {steps - STEADY_STEP} steps; DDP {median_s[ddp]:.3f} s a step\n")
    print(f"{'':24} {'a step':>9} {'against':>9} {'ratio':>7} {'target':>7}")
    missed = 0
    for strategy, api in SHARDED:
        one_unit = strategy == "fsdp"
        against, target = (ddp, MOST_OVER_DDP) if one_unit else (("fsdp", api), MOST_OVER_ONE_UNIT)
        time_s, other_s = median_s[strategy, api], median_s[against]
        verdict = "" if time_s / other_s <= target else "  MISSED"
        missed += bool(verdict)
        name = "DDP" if one_unit else "one unit"
        print(f"{strategy + ', ' + api:24} {time_s:7.3f} s {name:>9} {time_s / other_s:7.2f} {target:7.2f}{verdict}")
    return 1 if missed else 0


def steady_step_seconds(strategy: str, api: str, steps: int, batch_size: int) -> tuple[float, ...]:
    """Seconds of each step that counts, from one launch of two ranks."""
    config = TrainConfig(
        model="deep",
        strategy=strategy,
        api=api,
        epochs=steps,  # as many as needed: one epoch may have a single step
        max_steps=steps,
        global_batch_size=batch_size,
        test_images=1,
    )
    record = launch(train_worker, config, world_size=2, device="cpu", progress=False)[0]
    return record.step_seconds[STEADY_STEP:]


if __name__ == "__main__":
    sys.exit(main())
