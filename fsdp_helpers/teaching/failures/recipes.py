"""Wrong results without an error: every rank follows a recipe for a single process."""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_helpers.teaching.failures.entry import Failure, Numbers
from fsdp_helpers.teaching.failures.saving import shared_folder
from fsdp_helpers.teaching.failures.small_job import images, in_units, small_model

NUM_IMAGES, BATCH_SIZE = 32, 8  # of the recipe

# ---------------------------------------------------------------- the batch size


def train_for_an_epoch(model: nn.Module, batches: Iterator[Tensor]) -> Numbers:
    """Train on the batches, and return the number of steps and the final loss on all images."""
    optimizer, num_steps = torch.optim.SGD(model.parameters(), lr=0.1), 0
    for batch in batches:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        num_steps += 1
    with torch.no_grad():
        return {"steps": num_steps, "loss after an epoch": model(images(NUM_IMAGES)).square().mean().item()}


def batches_of(rank: int, world_size: int, batch_size: int) -> Iterator[Tensor]:
    """Yield this rank's batches of `batch_size` images each."""
    for batch in images(NUM_IMAGES).split(batch_size * world_size):
        yield batch.chunk(world_size)[rank]


def keep_the_batch_size(rank: int, world_size: int) -> Numbers:
    batches = batches_of(rank, world_size, BATCH_SIZE)
    return train_for_an_epoch(in_units(small_model()), batches)


def divide_the_batch_size(rank: int, world_size: int) -> Numbers:
    batches = batches_of(rank, world_size, BATCH_SIZE // world_size)
    return train_for_an_epoch(in_units(small_model()), batches)


def epoch_alone() -> Numbers:
    return train_for_an_epoch(small_model(), batches_of(0, 1, BATCH_SIZE))


# ---------------------------------------------------------------- a schedule that steps too often

NUM_STEPS, MICRO_BATCHES = 4, 2


def with_schedule(model: nn.Module) -> tuple[torch.optim.SGD, torch.optim.lr_scheduler.LinearLR]:
    """Return an optimizer, and a schedule that reduces its learning rate to 0 after the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=NUM_STEPS)


def step_per_micro_batch(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model())
    optimizer, schedule = with_schedule(model)
    for _ in range(NUM_STEPS // 2):
        for batch in images().chunk(MICRO_BATCHES):
            model(batch).square().mean().backward()
            schedule.step()
        optimizer.step()
    return {"learning rate halfway": schedule.get_last_lr()[0]}


def step_with_the_optimizer(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model())
    optimizer, schedule = with_schedule(model)
    for _ in range(NUM_STEPS // 2):
        for batch in images().chunk(MICRO_BATCHES):
            model(batch).square().mean().backward()
        optimizer.step()
        schedule.step()
    return {"learning rate halfway": schedule.get_last_lr()[0]}


def half_the_rate() -> Numbers:
    return {"learning rate halfway": 0.1 / 2}


# ---------------------------------------------------------------- dropout that is the same on every rank


def different_masks() -> Numbers:
    """Return the number of different dropout masks across the ranks."""
    mask = nn.functional.dropout(torch.ones(64))
    masks = [torch.empty(64) for _ in range(dist.get_world_size())]
    dist.all_gather(masks, mask)
    return {"different masks": len({tuple(mask.tolist()) for mask in masks})}


def keep_one_seed(rank: int, world_size: int) -> Numbers:
    torch.manual_seed(0)
    in_units(small_model())
    return different_masks()


def seed_each_rank(rank: int, world_size: int) -> Numbers:
    torch.manual_seed(0)
    in_units(small_model())
    torch.manual_seed(0 + rank)  # after the model is built
    return different_masks()


def one_mask_per_rank() -> Numbers:
    return {"different masks": 2}


# ---------------------------------------------------------------- a log of all ranks


def write_on_every_rank(rank: int, world_size: int) -> Numbers:
    with shared_folder() as folder:
        with (folder / "log").open("a") as log:
            log.write("step 1\n")
        return lines_of(folder / "log")


def write_on_rank_0(rank: int, world_size: int) -> Numbers:
    with shared_folder() as folder:
        if dist.get_rank() == 0:
            with (folder / "log").open("a") as log:
                log.write("step 1\n")
        return lines_of(folder / "log")


def lines_of(path: Path) -> Numbers:
    dist.barrier()
    return {"lines in the log": len(path.read_text().splitlines())}


def one_line() -> Numbers:
    return {"lines in the log": 1}


RECIPES = (
    Failure(
        name="wrong-schedule-steps",
        title="The schedule runs N times too fast or too slow",
        why=(
            "In every training step, accelerate's scheduler steps once per process, as if the data weren't split "
            "across ranks. So a schedule computed from the sharded loader's length ends after 1/N of the training. "
            "With accumulation, stepping the scheduler once per micro-batch has the same effect."
        ),
        tell=(
            "Print the learning rate over an epoch, with one rank and with two. The number of steps per epoch is "
            "`len(loader)` *after* `prepare`."
        ),
        fix=(
            "Create the schedule with `num_training_steps * accelerator.num_processes`, keep the scheduler out of "
            "`prepare`, or use `Accelerator(step_scheduler_with_optimizer=False)`. Step the scheduler only when the "
            "optimizer steps."
        ),
        behavior=(
            (
                "the learning rate scheduler steps too fast on multiple GPUs with accelerate; lr_scheduler.step "
                "counts twice"
            ),
            "warmup ends early, the learning rate reaches zero too soon, or the cosine repeats",
            "the learning rate decays N times too fast, reaches zero early, or warms up too soon, on N GPUs",
            "scheduler.step is called per process, per micro-batch or per epoch by mistake",
        ),
        quotes={
            "a run on the CPU": ("Detected call of `lr_scheduler.step()` before `optimizer.step()`",),
        },
        broken=step_per_micro_batch,
        fixed=step_with_the_optimizer,
        right=half_the_rate,
    ),
    Failure(
        name="wrong-global-batch",
        title="More GPUs, same recipe, worse accuracy",
        why=(
            "The batch size is per rank: with eight ranks, each step covers eight batches, and an epoch has an eighth "
            "as many steps. After the same number of epochs, the model has had fewer updates, and the learning rate is "
            "still the one for a small batch."
        ),
        tell=(
            "Compare the global batch size (per-rank batch size × ranks × micro-batches) and the number of steps with "
            "the single-GPU run. If you divide one rank's counts by the size of the full data set, the result is off "
            "by a factor of N."
        ),
        fix=(
            "Divide the per-rank batch size by N (which gives the same curve), or keep that size and raise the "
            "learning rate, with a warmup. For metrics, call `dist.all_reduce(correct)` before dividing."
        ),
        numbers=(
            "the accuracy is divided by the number of GPUs: 89% on one, 29% on three",
            "the reported accuracy or loss is N times too small with N GPUs",
        ),
        behavior=(
            "with the same number of epochs, the result on multiple GPUs is much lower",
            "accuracy varies with the number of GPUs used",
            "multi-GPU training converges more slowly or to a lower accuracy than single-GPU training",
            "results differ between one GPU and several GPUs with DDP",
            "training on 4 GPUs has a worse loss or accuracy than on 1",
            "DDP performs slightly worse, or much worse, than a single GPU or than DataParallel",
            "the gradients are different between single-GPU and multi-GPU runs, with the same seed and data",
            "the model does not converge, or the performance drops, with multiple GPUs",
            (
                "accuracy shrinks or is divided by the number of GPUs; one rank's correct predictions divided by the "
                "size of the whole data set"
            ),
            (
                "the loss or accuracy with DDP is worse than on a single GPU with the same hyperparameters; effective "
                "batch size, linear scaling"
            ),
            "convergence is slower or worse with 8 GPUs than with 1",
        ),
        broken=keep_the_batch_size,
        fixed=divide_the_batch_size,
        right=epoch_alone,
    ),
    Failure(
        name="wrong-same-random-numbers",
        title="Every rank, or every worker, draws the same random numbers",
        why=(
            "Every rank needs the same seed so that the weights start out equal, but that seed also gives every rank "
            "the same dropout, noise and augmentations. Loader workers get their seeds (torch's, Python's and NumPy's) "
            "from the rank's torch generator, so each rank's workers draw the same numbers as the other ranks' "
            "workers. A generator of your own, such as `numpy.random.default_rng(0)` in the dataset, is copied into "
            "every worker, so all workers draw the same numbers."
        ),
        tell="Print `torch.rand(1)` and `numpy.random.rand()` on each rank and in each worker.",
        fix=(
            "After the model is built, call `torch.manual_seed(seed + rank)` or, with accelerate, "
            "`accelerate.utils.set_seed(seed, device_specific=True)`. Create your own generators in a "
            "`worker_init_fn`, from `torch.initial_seed()`."
        ),
        behavior=(
            "augmentations, noise or dropout are identical on all GPUs or workers",
            "the same augmentation, noise, mask or dropout on every GPU; all ranks have the same seed; worker seeds",
        ),
        broken=keep_one_seed,
        fixed=seed_each_rank,
        right=one_mask_per_rank,
    ),
    Failure(
        name="wrong-every-rank-logs",
        title="Everything is printed, logged or written once per rank",
        why=(
            "Each rank runs the full script, so you get N progress bars, N Weights & Biases runs, and N processes "
            "writing to one file. And the number that one rank prints isn't the mean across ranks."
        ),
        tell="The same line appears as many times as there are ranks.",
        fix=(
            "Put `if dist.get_rank() == 0:` around printing, logging and writing plain files, but never around a "
            "collective or a forward pass. Reduce numbers across ranks before you print them."
        ),
        behavior=(
            "logs, progress bars or wandb runs appear once for each GPU",
            "every line is printed 8 times; several wandb or TensorBoard runs; N progress bars",
            "files are overwritten or corrupted because all ranks write them",
        ),
        broken=write_on_every_rank,
        fixed=write_on_rank_0,
        right=one_line,
    ),
)
