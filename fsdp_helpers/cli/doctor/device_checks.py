"""Checks of the GPU: it is usable, CPU ranks leave it alone, and its memory is what a trace says."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from fsdp_helpers.cli.doctor.gpu_workers import collectives_on_device, lose_rank_1, train_and_look_at_cuda
from fsdp_helpers.cli.doctor.rows import NOISE_BYTES, Outcome
from fsdp_helpers.config import TrainConfig
from fsdp_helpers.measuring.memory import trace_memory
from fsdp_helpers.models.series import build_model
from fsdp_helpers.quantities import format_bytes
from fsdp_helpers.ranks.launching.errors import RankError
from fsdp_helpers.ranks.launching.launch import launch

GPU = torch.device("cuda", 0)
CPU_RANKS = 2
SMALL = {"model": "simple", "global_batch_size": 24, "max_steps": 4, "train_images": 240, "test_images": 24}
WAIT_S = 8.0  # for a rank that does not come
POLL_S = 0.05
STEPS, BATCH = 3, 64


def use_gpu() -> float:
    """Compare a matrix product on the GPU with the CPU's: the largest difference, relative to the largest value."""
    values = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    expected = values @ values
    return float(((values.to(GPU) @ values.to(GPU)).cpu() - expected).abs().max() / expected.abs().max())


def usable_in_this_process(num_gpus: int) -> Outcome:
    apart = use_gpu()
    return Outcome(apart < 1e-2, f"a product {apart:.1e} from the CPU's", {"relative_difference": apart})


def usable_through_launch(num_gpus: int) -> Outcome:
    """Use the GPUs in ranks whose parent uses one as well, as a notebook's kernel may."""
    use_gpu()
    found = launch(collectives_on_device, world_size=num_gpus, device="cuda", progress=False)
    everything = [float(rank + 1) for rank in range(num_gpus)]
    expected = [(f"cuda:{rank}", sum(everything), everything, [num_gpus * (rank + 1.0)]) for rank in range(num_gpus)]
    devices = ", ".join(device for device, *_ in found)
    return Outcome(found == expected, f"{devices}: sums are {'right' if found == expected else found}")


def cpu_ranks_leave_it_alone(num_gpus: int) -> Outcome:
    """Check that no CPU rank initialized CUDA, and that the GPU's free memory does not shrink while they run."""
    config = TrainConfig(strategy="fsdp-auto-wrap", **SMALL)
    with least_free_memory() as free:
        found = launch(train_and_look_at_cuda, config, world_size=CPU_RANKS, device="cpu", progress=False)
    taken = max(0, free[0] - min(free))
    touched = sum(initialized for _, initialized in found)
    on_cpu = all(device == "cpu" for device, _ in found)
    measured = f"{touched} of {CPU_RANKS} ranks initialized CUDA, {format_bytes(taken)} taken meanwhile"
    return Outcome(on_cpu and not touched and taken <= NOISE_BYTES, measured, {"taken_bytes": taken})


@contextmanager
def least_free_memory() -> Iterator[list[int]]:
    """Within the block, keep noting how many bytes of the first GPU are free; the first note is from before it."""
    free, ended = [torch.cuda.mem_get_info(GPU)[0]], threading.Event()

    def watch() -> None:
        while not ended.wait(POLL_S):
            free.append(torch.cuda.mem_get_info(GPU)[0])

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield free
    finally:
        ended.set()
        watcher.join()


def stopped_cpu_rank_is_named(num_gpus: int) -> Outcome:
    return who_is_blamed("stopped", CPU_RANKS, "cpu")


def who_is_blamed(way: str, world_size: int, device: str) -> Outcome:
    """Lose rank 1, and see which rank the error names."""
    try:
        launch(lose_rank_1, way, world_size=world_size, device=device, progress=False, group_timeout_s=WAIT_S)
    except RankError as error:
        # A dead rank is the one that failed; a stopped one is named by the rank that waited for it.
        named = error.rank == 1 if way == "dead" else "rank 1 did not answer" in str(error)
        return Outcome(named, str(error).splitlines()[0])
    return Outcome(False, "no rank failed")


def memory_is_what_a_trace_says(num_gpus: int) -> Outcome:
    """Compare a trace with the allocator's counts: the same bytes requested; blocks and segments are larger."""
    torch.cuda.set_device(GPU)
    with trace_memory(GPU) as trace:
        torch.cuda.reset_peak_memory_stats(GPU)
        before = torch.cuda.memory_stats(GPU).get("requested_bytes.all.current", 0)
        train_a_little()
        stats = torch.cuda.memory_stats(GPU)
        allocated = torch.cuda.max_memory_allocated(GPU)
    traced = trace.whole().curve.peak_bytes
    requested, reserved = stats["requested_bytes.all.peak"] - before, stats["reserved_bytes.all.peak"]
    values = {"traced_bytes": traced, "requested_bytes": requested}
    values |= {"max_memory_allocated_bytes": allocated, "reserved_bytes": reserved}
    measured = ", ".join(f"{name.removesuffix('_bytes')} {format_bytes(size)}" for name, size in values.items())
    passed = abs(traced - requested) <= 0.01 * requested and requested + before <= allocated <= reserved
    return Outcome(passed, measured, values)


def train_a_little() -> None:
    """Train a small network for a few steps on the first GPU."""
    model = build_model("shallow", dropout=False).to(GPU)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    images, labels = torch.randn(BATCH, 1, 28, 28, device=GPU), torch.zeros(BATCH, dtype=torch.long, device=GPU)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    torch.cuda.synchronize(GPU)
