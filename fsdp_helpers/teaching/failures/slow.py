"""Slow runs. We count collectives and downloads, because times differ from machine to machine."""

import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fsdp_helpers.measuring.collectives import trace_collectives
from fsdp_helpers.ranks.group import num_cores
from fsdp_helpers.teaching.failures.entry import Failure, Numbers
from fsdp_helpers.teaching.failures.small_job import cpu_mesh, images, in_units, small_model

NUM_UNITS = 3  # of the small model: three layers, each a unit


def count_gathers(model: FSDPModule, num_micro_batches: int, keep_unsharded: bool = False) -> Numbers:
    with trace_collectives() as events:
        for number, batch in enumerate(images().chunk(num_micro_batches), start=1):
            model.set_reshard_after_backward(number == num_micro_batches or not keep_unsharded)
            model(batch).square().mean().backward()
    return {"all-gathers of a step": sum(event.op == "all_gather" for event in events)}


# ---------------------------------------------------------------- micro-batches


def gather_for_every_micro_batch(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model())
    return count_gathers(model, num_micro_batches=4)


def keep_parameters_between(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model())
    model.set_reshard_after_forward(False)
    return count_gathers(model, num_micro_batches=4, keep_unsharded=True)


def one_gather_per_unit() -> Numbers:
    return {"all-gathers of a step": NUM_UNITS}


# ---------------------------------------------------------------- a head that is called per chunk


class ChunkedLoss(nn.Module):
    """A body, and a head that computes the logits of one chunk of tokens at a time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return sum(checkpoint(self.loss_of, chunk, use_reentrant=False) for chunk in self.body(tokens).chunk(4))

    def loss_of(self, chunk: Tensor) -> Tensor:
        return self.head(chunk).logsumexp(dim=1).sum()


def head_as_a_unit(rank: int, world_size: int) -> Numbers:
    model = ChunkedLoss()
    fully_shard(model.body, mesh=cpu_mesh())
    fully_shard(model.head, mesh=cpu_mesh())
    return count_gathers_of_a_step(fully_shard(model, mesh=cpu_mesh()))


def head_in_the_root(rank: int, world_size: int) -> Numbers:
    model = ChunkedLoss()
    fully_shard(model.body, mesh=cpu_mesh())
    return count_gathers_of_a_step(fully_shard(model, mesh=cpu_mesh()))


def count_gathers_of_a_step(model: FSDPModule) -> Numbers:
    with trace_collectives() as events:
        model(images()).backward()
    return {"all-gathers of a step": sum(event.op == "all_gather" for event in events)}


def body_twice_and_root_once() -> Numbers:
    return {"all-gathers of a step": 3}


# ---------------------------------------------------------------- too many units


def two_blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(small_model(), nn.Linear(2, 8)) for _ in range(2)])


def shard_every_layer(rank: int, world_size: int) -> Numbers:
    return count_gathers(in_units(two_blocks()), num_micro_batches=1)


def shard_every_block(rank: int, world_size: int) -> Numbers:
    model = two_blocks()
    for block in model:
        fully_shard(block, mesh=cpu_mesh())
    return count_gathers(fully_shard(model, mesh=cpu_mesh()), num_micro_batches=1)


def two_gathers_per_block() -> Numbers:
    return {"all-gathers of a step": 2 * 2}


# ---------------------------------------------------------------- who prepares the data


def shared_folder() -> str:
    """Create a folder on rank 0, and return its path on every rank."""
    found = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


def download(folder: Path) -> None:
    (folder / f"download by rank {dist.get_rank()}").write_text("the data")


def count_downloads(folder: Path) -> Numbers:
    dist.barrier()
    count = len(list(folder.iterdir()))
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    return {"downloads": count}


def download_on_every_rank(rank: int, world_size: int) -> Numbers:
    folder = Path(shared_folder())
    download(folder)
    return count_downloads(folder)


def download_on_one_rank(rank: int, world_size: int) -> Numbers:
    folder = Path(shared_folder())
    if rank == 0:
        download(folder)
    dist.barrier()  # the others wait until it is there
    return count_downloads(folder)


def one_download() -> Numbers:
    return {"downloads": 1}


# ---------------------------------------------------------------- threads


def threads_per_core() -> Numbers:
    threads = torch.tensor(float(torch.get_num_threads()))
    dist.all_reduce(threads)
    torch.set_num_threads(max(1, num_cores() // dist.get_world_size()))  # for the runs after this one
    return {"threads per core": threads.item() / num_cores()}


def start_a_thread_per_core(rank: int, world_size: int) -> Numbers:
    torch.set_num_threads(num_cores())  # as a process does by itself
    return threads_per_core()


def share_the_cores(rank: int, world_size: int) -> Numbers:
    torch.set_num_threads(max(1, num_cores() // world_size))
    return threads_per_core()


def one_thread_per_core() -> Numbers:
    return {"threads per core": max(1, num_cores() // 2) * 2 / num_cores()}


# ---------------------------------------------------------------- one rank has more to do

LENGTHS = (9, 1, 8, 2, 7, 3, 6, 4)  # of texts, in tokens


def tokens_of_the_slowest(lengths: Sequence[int]) -> Numbers:
    tokens = torch.tensor(float(sum(lengths)))
    dist.all_reduce(tokens, op=dist.ReduceOp.MAX)  # every rank waits for the one with the most
    return {"tokens of the slowest rank": tokens.item()}


def deal_texts_as_they_come(rank: int, world_size: int) -> Numbers:
    mine = LENGTHS[rank::world_size]
    return tokens_of_the_slowest(mine)


def deal_texts_by_length(rank: int, world_size: int) -> Numbers:
    by_length = sorted(LENGTHS)
    mine = by_length[rank :: world_size * 2] + by_length[world_size * 2 - 1 - rank :: world_size * 2]  # there and back
    return tokens_of_the_slowest(mine)


def half_of_the_tokens() -> Numbers:
    return {"tokens of the slowest rank": sum(LENGTHS) / 2}


# ---------------------------------------------------------------- gradients in a different layout


def count_other_layouts(model: nn.Module) -> Numbers:
    """Return how many stride warnings DDP issues in one backward pass: one for each gradient in a different layout."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(gray_images()).square().mean().backward()
    return {"gradients in a different layout": sum("Grad strides" in str(warning.message) for warning in caught)}


def gray_images() -> Tensor:
    """Return single-channel images in the channels-last memory format."""
    return images(16).reshape(2, 1, 8, 8).to(memory_format=torch.channels_last)


@contextmanager
def every_warning() -> Iterator[None]:
    """Show every warning from C++ each time it occurs within the block, not just the first time."""
    torch.set_warn_always(True)
    try:
        yield
    finally:
        torch.set_warn_always(False)


def convolve_in_two_layouts(rank: int, world_size: int) -> Numbers:
    model = nn.Conv2d(1, 4, 3)
    with every_warning():
        return count_other_layouts(DistributedDataParallel(model))


def convolve_in_one_layout(rank: int, world_size: int) -> Numbers:
    model = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)
    with every_warning():
        return count_other_layouts(DistributedDataParallel(model))


def no_gradient() -> Numbers:
    return {"gradients in a different layout": 0}


SLOW = (
    Failure(
        name="slow-gather-every-micro-batch",
        title="Gradient accumulation over four micro-batches makes the network four times as busy",
        why="Each micro-batch takes a forward pass and a backward pass, and each pass all-gathers the units again.",
        tell="Count the all-gathers in one step: the count grows with the number of micro-batches.",
        fix=(
            "If the parameters fit, keep them unsharded within a step: call `model.set_reshard_after_forward(False)` "
            "once, and `model.set_reshard_after_backward(is_last)` for each micro-batch."
        ),
        numbers=(
            "the number of all-gathers grows with the number of micro-batches; the network is four times as busy",
        ),
        behavior=(
            "gradient accumulation is no faster: each micro-batch communicates",
            "gradient accumulation under FSDP isn't faster; there's an all-gather in each micro-step; no_sync",
        ),
        broken=gather_for_every_micro_batch,
        fixed=keep_parameters_between,
        right=one_gather_per_unit,
    ),
    Failure(
        name="slow-head-per-chunk",
        title="A chunked loss all-gathers the head again for each chunk",
        why=(
            "Each chunk's logits are computed by calling the head. If the head is a unit, each call all-gathers it, "
            "and so does each recomputation in backward."
        ),
        tell=("Count the all-gathers in one step with 1 chunk and with 4: the count grows with the number of chunks."),
        fix=(
            "Leave the head in the root unit: call `fully_shard(model)`, but not `fully_shard(model.head)`. The root "
            "stays unsharded from forward to backward."
        ),
        numbers=("the number of all-gathers grows with the number of chunks in a chunked loss",),
        broken=head_as_a_unit,
        fixed=head_in_the_root,
        right=body_twice_and_root_once,
    ),
    Failure(
        name="slow-many-units",
        title="Each step has hundreds of small collectives",
        why=(
            "If every linear layer is a unit, each layer is all-gathered separately. A collective costs at least its "
            "latency, however little it sends, and such small units hardly lower peak memory any further."
        ),
        tell="Count the collectives in one step, and compare the largest unit with the average.",
        fix="Make one unit per block: `for block in model.blocks: fully_shard(block)`.",
        numbers=("hundreds of small collectives in a step",),
        behavior=(
            "FSDP is slower than DDP or than a single GPU",
            "FSDP is much slower than DDP; wrapping each layer is slow",
            "FSDP training is very slow",
            "FSDP takes several times as long per step as DDP on the same GPUs; small model, too many wrapped modules",
            "GPU utilization is low with FSDP; many tiny all-gather kernels in the profiler trace",
            "throughput drops after switching from DDP to FSDP",
        ),
        broken=shard_every_layer,
        fixed=shard_every_block,
        right=two_gathers_per_block,
    ),
    Failure(
        name="slow-every-rank-downloads",
        title="Startup takes a long time, and the data is sometimes corrupted",
        why=(
            "Every rank prepares the same folder at the same time. There are N downloads, and one rank may read files "
            "that another is still writing."
        ),
        tell="The download appears in the log once per rank.",
        fix=(
            "Write `if rank == 0: download()`, then `dist.barrier()` on all ranks. On several machines, download on "
            "one rank per machine."
        ),
        numbers=("a download shows up in the log once per rank",),
        behavior=(
            "the start takes a long time; a data file is damaged now and then",
            "every rank tokenizes or preprocesses the same data set",
            "all processes download the data set, tokenizer or model at the same time; 429 Too Many Requests",
            "a race: files are missing, locked, or half written because every rank creates, extracts or caches them",
            "the map or tokenization runs once for each GPU",
            "os.makedirs or a cache file fails on some ranks",
        ),
        quotes={
            "a run on the CPU": (
                "BadZipFile",
                "File is not a zip file",
                "Dataset not found or corrupted",
                "FileExistsError: [Errno 17] File exists",
            ),
            "huggingface_hub": ("429 Client Error: Too Many Requests",),
        },
        broken=download_on_every_rank,
        fixed=download_on_one_rank,
        right=one_download,
    ),
    Failure(
        name="slow-threads",
        title="Ranks on one machine take turns instead of running in parallel",
        why=(
            "Each process starts one thread per core, so N ranks have N times as many threads as the machine has "
            "cores. torchrun therefore limits each rank to one thread, which may be too few."
        ),
        tell=(
            "Multiply `torch.get_num_threads()` by the number of ranks on this machine, and compare the product with "
            "the number of cores."
        ),
        fix="Call `torch.set_num_threads(cores // ranks)`, as `launch` does, or set `OMP_NUM_THREADS`.",
        numbers=("cores are busy, and each rank is slower than one process alone",),
        behavior=(
            "training on the CPU, or the data loading, is slow under torchrun; OMP_NUM_THREADS",
            "CPU usage is 100% on all cores, and each rank is slow",
            "CPU-bound preprocessing or training is slow under torchrun; OMP_NUM_THREADS=1",
            "too many threads; CPU oversubscription; load average in the hundreds",
        ),
        quotes={
            "a run on the CPU": ("Setting OMP_NUM_THREADS environment variable for each process to be 1 in default",),
        },
        broken=start_a_thread_per_core,
        fixed=share_the_cores,
        right=one_thread_per_core,
    ),
    Failure(
        name="slow-straggler",
        title="All ranks wait for the slowest one",
        why=(
            "No collective finishes before the last rank joins. If one GPU is too hot, shares its link or its CPU, or "
            "gets longer sequences, its rank slows all ranks down."
        ),
        tell=(
            "Time forward and backward on each rank *without* collectives, or look for the rank that enters each "
            "all-reduce last. `nvidia-smi -q -d PERFORMANCE,CLOCK` shows throttling and clocks; `nvidia-smi -q` shows "
            "the PCIe link's width."
        ),
        fix=(
            "Balance the work: sort sequences by length, and form batches by number of tokens. Take the slow node out "
            "of the job, or stop whatever else is running on it. On Slurm, pass `--cpu-bind=cores`."
        ),
        behavior=(
            "one GPU or node is slower than the rest: thermal throttling, clocks, shared CPU, PCIe x1",
            "step time varies a lot between steps or ranks; sequence lengths differ between ranks",
            "throughput drops after hours, or with one particular node; jitter, stragglers",
        ),
        broken=deal_texts_as_they_come,
        fixed=deal_texts_by_length,
        right=half_of_the_tokens,
    ),
    Failure(
        name="slow-grad-strides",
        title="Grad strides do not match bucket view strides",
        why=(
            "DDP copies each gradient into its place in a bucket, which has the parameter's layout. If a gradient "
            "arrives in a different layout (after `transpose` or `permute`, in 1 x 1 convolutions, or with "
            "`channels_last` images and a model in a different layout), that copy is slower, in every step."
        ),
        tell="It's only a warning; the results are right. The message shows the parameter's sizes and strides.",
        fix=(
            "Give the model and the images the same layout: `model.to(memory_format=torch.channels_last)`. Call "
            "`.contiguous()` after the `transpose` or `permute` that feeds the layer. Or ignore the warning."
        ),
        behavior=("a warning about strides under DDP; this is not an error, but may impair performance",),
        quotes={
            "a run on the CPU": (
                "Grad strides do not match bucket view strides",
                "This is not an error, but may impair performance",
            ),
        },
        broken=convolve_in_two_layouts,
        fixed=convolve_in_one_layout,
        right=no_gradient,
    ),
)
