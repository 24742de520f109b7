"""Hangs: some ranks wait in a collective that other ranks don't call."""

import re
from datetime import timedelta

import torch
import torch.distributed as dist

from fsdp_helpers.teaching.failures.entry import Failure, Numbers
from fsdp_helpers.teaching.failures.small_job import images, in_units, set_timeout, small_model

# ---------------------------------------------------------------- an evaluation with uneven batches


@torch.no_grad()
def evaluate_own_images(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model())
    mine = images(5)[rank::world_size]  # three images on rank 0, two on rank 1
    total = sum(model(image[None]).sum() for image in mine)
    dist.all_reduce(total)
    return {"sum of outputs": total.item()}


@torch.no_grad()
def evaluate_even_batches(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model())
    batches = [batch.tensor_split(world_size)[rank] for batch in images(5).split(world_size)]  # the last may be empty
    total = sum(model(batch).sum() for batch in batches)
    dist.all_reduce(total)
    return {"sum of outputs": total.item()}


def evaluate_alone() -> Numbers:
    with torch.no_grad():
        return {"sum of outputs": small_model()(images(5)).sum().item()}


# ---------------------------------------------------------------- a gather on rank 0 alone


def gather_on_rank_0(rank: int, world_size: int) -> Numbers:
    weight = in_units(small_model())[0].weight
    norm = torch.zeros(())
    if rank == 0:  # only this rank writes the log
        norm = weight.full_tensor().norm()
    dist.barrier()
    return {"norm": norm.item()}


def gather_on_every_rank(rank: int, world_size: int) -> Numbers:
    weight = in_units(small_model())[0].weight
    norm = weight.full_tensor().norm()
    if rank == 0:
        print(f"norm {norm:.3f}")
    dist.barrier()
    return {"norm": norm.item()}


def norm_alone() -> Numbers:
    return {"norm": small_model()[0].weight.norm().item()}


# ---------------------------------------------------------------- a decision that each rank makes by itself

VALIDATION_LOSSES = ((0.5, 0.2, 0.1), (0.7, 0.6, 0.1))  # on rank 0 and on rank 1, epoch by epoch
GOOD_ENOUGH = 0.3


def stop_on_own_loss(rank: int, world_size: int) -> Numbers:
    epochs = 0
    for loss in VALIDATION_LOSSES[rank]:
        dist.all_reduce(torch.ones(1))  # an epoch's gradients
        epochs += 1
        if loss < GOOD_ENOUGH:
            break
    dist.barrier()
    return {"epochs": epochs}


def stop_on_mean_loss(rank: int, world_size: int) -> Numbers:
    epochs = 0
    for loss in map(torch.tensor, VALIDATION_LOSSES[rank]):
        dist.all_reduce(torch.ones(1))  # an epoch's gradients
        epochs += 1
        dist.all_reduce(loss)
        if loss / world_size < GOOD_ENOUGH:
            break
    dist.barrier()
    return {"epochs": epochs}


def stop_by_hand() -> Numbers:
    means = [sum(losses) / len(losses) for losses in zip(*VALIDATION_LOSSES, strict=True)]
    return {"epochs": 1 + next(epoch for epoch, mean in enumerate(means) if mean < GOOD_ENOUGH)}


# ---------------------------------------------------------------- collectives in a different order


def log_in_own_order(rank: int, world_size: int) -> Numbers:
    loss, seen = torch.tensor([rank + 1.0]), [torch.zeros(2) for _ in range(world_size)]
    collect = {"loss": lambda: dist.all_reduce(loss), "seen": lambda: dist.all_gather(seen, torch.ones(2))}
    names = ["loss", "seen"] if rank == 0 else ["seen", "loss"]  # as they happened to come up
    for name in names:
        collect[name]()
    return {"loss": loss.item(), "seen": sum(part.sum().item() for part in seen)}


def log_in_sorted_order(rank: int, world_size: int) -> Numbers:
    loss, seen = torch.tensor([rank + 1.0]), [torch.zeros(2) for _ in range(world_size)]
    collect = {"loss": lambda: dist.all_reduce(loss), "seen": lambda: dist.all_gather(seen, torch.ones(2))}
    names = ["loss", "seen"] if rank == 0 else ["seen", "loss"]
    for name in sorted(names):
        collect[name]()
    return {"loss": loss.item(), "seen": sum(part.sum().item() for part in seen)}


def logged_by_hand() -> Numbers:
    return {"loss": 1.0 + 2.0, "seen": 2 * 2.0}


# ---------------------------------------------------------------- a group that not every rank creates


def make_group_on_rank_0(rank: int, world_size: int) -> Numbers:
    everyone = list(range(world_size))
    if rank == 0:
        pair = dist.new_group(everyone)
    total = torch.ones(1)
    dist.all_reduce(total, group=pair if rank == 0 else None)
    return {"ranks": total.item()}


def make_group_on_every_rank(rank: int, world_size: int) -> Numbers:
    everyone = list(range(world_size))
    pair = dist.new_group(everyone)
    total = torch.ones(1)
    dist.all_reduce(total, group=pair)
    return {"ranks": total.item()}


def two_ranks() -> Numbers:
    return {"ranks": 2.0}


# ---------------------------------------------------------------- a timeout that names no rank

PATIENCE = timedelta(seconds=2)


def wait_without_a_name(rank: int, world_size: int) -> Numbers:
    elsewhere, impatient = dist.new_group(), dist.new_group()
    set_timeout(PATIENCE, impatient)
    if rank == 1:
        dist.barrier(elsewhere)  # busy until rank 0 has given up, as if it wrote a checkpoint
        return {"missing rank": -1}
    try:
        dist.all_reduce(torch.ones(1), group=impatient)
    except RuntimeError as error:
        dist.barrier(elsewhere)
        raise TimeoutError(str(error).partition("] ")[2]) from error
    return {"missing rank": -1}


def wait_with_a_name(rank: int, world_size: int) -> Numbers:
    elsewhere, impatient = dist.new_group(), dist.new_group()
    if rank == 1:
        dist.barrier(elsewhere)  # busy until rank 0 has given up, as if it wrote a checkpoint
        return {"missing rank": 1}
    try:
        dist.monitored_barrier(impatient, PATIENCE)
    except RuntimeError as error:
        dist.barrier(elsewhere)
        return {"missing rank": int(re.search(r"Rank (\d+) failed to pass", str(error))[1])}
    return {"missing rank": -1}


def rank_1_is_missing() -> Numbers:
    return {"missing rank": 1}


HANGS = (
    Failure(
        name="hang-uneven-batches",
        title="The evaluation of a sharded model never ends",
        why=(
            "With five images on two ranks, rank 0 has one extra batch. Each forward pass all-gathers every unit, so "
            "rank 0 waits in an all-gather while rank 1 is already in the final all-reduce. The same loop works under "
            "DDP, or with a single unit that stays unsharded, because a forward pass then needs no collective."
        ),
        tell="One rank waits inside the model, and the other waits after the loop. Count the batches on each rank.",
        fix=(
            "Give every rank the same number of batches, even if some of the batches are empty. An empty batch still "
            "runs the all-gathers."
        ),
        messages=(
            "Timed out waiting 1800000ms for send operation to complete",
            "Timed out waiting 1800000ms for recv operation to complete",
        ),
        behavior=(
            "hangs with FSDP at the end of evaluation, or at the end of an epoch; works fine with DDP",
            "generate hangs when ranks generate texts of different lengths; synced_gpus",
            "one rank stops early, breaks out of the loop, or has an empty batch, and the others wait",
            "a different number of batches on each GPU",
            "the program hangs with all GPUs",
            "stuck at 0% of a new epoch, or after a few epochs",
            "one rank has more samples or batches than the others: training hangs at the end of an epoch",
            "training freezes or gets stuck after the first epoch, before or after validation, with no error",
            "uneven inputs; the last batch; IterableDataset or streaming data hangs at the end",
            "stuck at 99% of the epoch, with all GPUs at 100% except one at 0%",
            "hangs at loss.backward() with several nodes or GPUs",
            "DDP hangs with uneven batches, a different number of batches on each rank",
            "training hangs after one epoch, at the end of the first epoch, or at the last batch",
            "stuck at the beginning of a new epoch; randomly stops between epochs",
            "early stopping, StopIteration, break or a skipped batch on one rank only; the other ranks hang",
            "data sets or shards of a different length on each rank; len(dataloader) differs between ranks",
            "drop_last=False; the last incomplete batch; join() for uneven inputs",
            (
                "training hangs in the middle or near the end of an epoch; a filtered, bucketed, packed or "
                "variable-length data set"
            ),
            (
                "validation never ends or gets stuck on several GPUs, but is fine on a single one; the validation set "
                "is not divisible by the number of GPUs"
            ),
            "always stops at the same step or iteration; with more GPUs it stops earlier",
        ),
        quotes={
            "Lightning, CosyVoice, fairseq": (
                "Detected uneven workload distribution",
                "uneven number of batches",
            ),
        },
        broken=evaluate_own_images,
        fixed=evaluate_even_batches,
        right=evaluate_alone,
        says="in evaluate_own_images",
    ),
    Failure(
        name="hang-gather-on-rank-0",
        title="Training stops as soon as rank 0 logs or saves",
        why=(
            "`full_tensor()`, `get_model_state_dict` and `summon_full_params` are collectives: every rank has to "
            "contribute its shard. Inside `if rank == 0`, only rank 0 does."
        ),
        tell=(
            "Rank 0 waits in `full_tensor()`, and the other ranks wait in whichever collective comes next. Search for "
            "collectives inside `if rank == 0`."
        ),
        fix="Run the all-gather on every rank, but print or write the result on just one.",
        messages=("Timed out waiting 1800000ms for",),
        behavior=(
            "freezes when rank 0 logs, gathers or saves the full state dict",
            "hangs in a save, after the final training step",
            (
                "validation, evaluation or logging on rank 0 only (is_main_process) while the others wait in a "
                "barrier: hangs indefinitely"
            ),
            "save_state, save_model or state_dict inside if rank == 0 hangs",
            "hangs on or after saving an intermediate checkpoint",
            "hangs at evaluation: only the main process evaluates, or loads cached features",
            "the training freezes in accelerator.save_state()",
            (
                "hangs when the checkpoint is saved in the middle of training; save_checkpoint, save_pretrained or "
                "model.state_dict() never returns"
            ),
            "deadlock after validation or early stopping: only one rank logs, computes a metric or stops",
            "torch.distributed.barrier() hangs",
            "gets stuck after saving a checkpoint, or at the last step",
            "hangs when saving a checkpoint, when saving the model, or after validation",
            "stuck during evaluation, during validation, or when computing metrics on rank 0 only",
            (
                "if rank == 0, is_main_process or local_rank == 0 around an evaluation, a save or a log; the other "
                "processes hang or time out"
            ),
            (
                "only rank 0 validates with the DDP model; BatchNorm buffers are broadcast in its forward pass; "
                "broadcast_buffers=False helps"
            ),
            "the hang goes away if every rank saves, evaluates or logs",
            "trainer.save_model, save_pretrained, state_dict() or get_state_dict is called on rank 0 only",
            "a callback, a metric or self.log with rank_zero_only hangs; sync_dist",
            "print(loss), .item() or .full_tensor() of a DTensor inside if rank == 0 hangs",
            "training hangs after evaluation; the validation loop runs on one GPU while the others wait",
            (
                "FSDP hangs at the beginning of the second epoch, after rank 0 alone has evaluated or saved; with DDP "
                "everything is fine"
            ),
        ),
        broken=gather_on_rank_0,
        fixed=gather_on_every_rank,
        right=norm_alone,
        says=r"full_tensor\(\), called from hangs.py",
    ),
    Failure(
        name="hang-local-decision",
        title="Each rank decides for itself when to stop or save",
        why=(
            "With early stopping, *save if it's the best so far*, a time limit or a signal handler, each rank decides "
            "based on its own numbers, such as the loss on its validation images. `dist.reduce` gives the sum only to "
            "rank 0. One rank leaves the loop or starts to save, while the others wait for it."
        ),
        tell=(
            "The run hangs only now and then, after good epochs, and never if you save after every epoch. Print the "
            "decision on each rank."
        ),
        fix=(
            "Call `dist.all_reduce(loss)` (not `reduce`) before the decision, or let rank 0 decide and send its "
            "decision with `dist.broadcast`."
        ),
        behavior=(
            (
                "early stopping hangs: the stop condition is met on one rank and not on the others; those that go on "
                "wait forever"
            ),
            (
                "saves only if the validation loss is a new low or the best so far, and then hangs; no hang if every "
                "epoch saves"
            ),
            "one rank leaves the loop because of a time limit, a signal, a preemption or a maximum number of steps",
            "ranks disagree: a different validation loss, metric, patience or random decision on each rank",
            (
                "hangs at the end of some epoch after several good epochs, with ModelCheckpoint, EarlyStopping or a "
                "conditional save"
            ),
            (
                "hangs only if one rank has no samples or boxes, or only empty images: metric.compute(), update or a "
                "log call behind an if; a collective behind a local condition"
            ),
            "validation hangs in an all-gather on a rank whose part of the data is empty",
        ),
        broken=stop_on_own_loss,
        fixed=stop_on_mean_loss,
        right=stop_by_hand,
        says=r"in stop_on_own_loss",
    ),
    Failure(
        name="hang-order",
        title="Two ranks wait in different collectives",
        why=(
            "Collectives are matched by order, not by name. A loop over a set, or over a dictionary that each rank "
            "filled on its own, may run in a different order on each rank."
        ),
        tell=(
            "All ranks wait, each in a different collective. `compare_collectives` shows the first place where the "
            "ranks' traces diverge."
        ),
        fix="Sort the names, so that every rank uses the same order.",
        messages=(
            "Timed out waiting 1800000ms for recv operation to complete",
            "Timed out waiting 1800000ms for send operation to complete",
        ),
        behavior=(
            "each rank waits in a different collective",
            "collectives in a different order on each rank; a dictionary, a set or os.listdir in a different order",
            (
                "two threads or two process groups: overlapping collectives deadlock; a save in a background thread "
                "and training at the same time"
            ),
            "an all-reduce on one rank is matched with a broadcast or all-gather on a different one",
        ),
        quotes={
            "torch/distributed/fsdp/_exec_order_utils.py": (
                "is all-gathering parameters for",
                "Forward order differs from that of the first iteration",
            ),
            "torch's ProcessGroupNCCL.cpp": ("the order of collectives is not same for all ranks",),
        },
        broken=log_in_own_order,
        fixed=log_in_sorted_order,
        right=logged_by_hand,
        says=r"(all_reduce|all_gather)\(\), called from hangs.py",
    ),
    Failure(
        name="hang-new-group",
        title="Creating a smaller process group hangs",
        why=(
            "`new_group` is a collective that all ranks have to call, including ranks that won't be in the group. "
            "Here, rank 1 never calls it."
        ),
        tell="A rank waits inside `new_group`, before any tensor has been sent.",
        fix="Call `new_group` on every rank, in the same order, or let `init_device_mesh` do that for you.",
        behavior=(
            "hangs at the start, in new_group or in a smaller process group",
            "new_group, split_group or a sub-group hangs; only the members of the group call it",
            "a process group is created on some ranks only",
        ),
        broken=make_group_on_rank_0,
        fixed=make_group_on_every_rank,
        right=two_ranks,
        says=r"in make_group_on_rank_0",
    ),
    Failure(
        name="hang-default-timeout",
        title="A timeout after half an hour doesn't name the missing rank",
        why=(
            "By default, a collective times out after 30 minutes. The error message gives the time in milliseconds, "
            "but it doesn't name the missing rank. In this run, the limit is two seconds."
        ),
        tell=(
            "`dist.monitored_barrier` on a gloo group names the first missing rank. `launch` and the `--timeout` flag "
            "call the roll and name all missing ranks."
        ),
        fix=(
            "Pass `init_process_group` a `timeout=` that's longer than your longest step and your longest checkpoint "
            "save. To find the culprit, put a monitored barrier before the collective. Each group has its own timeout. "
            "`new_group` also accepts `timeout=`, and `dist.set_timeout(limit, mesh.get_group())` changes the timeout "
            "of a mesh's group."
        ),
        messages=("Timed out waiting 1800000ms for recv operation to complete",),
        behavior=(
            "hangs for half an hour (1800000ms), then reports a timeout that names no rank",
            (
                "always fails after 30 minutes, while rank 0 tokenizes, downloads or prepares a large data set and "
                "the others wait in a barrier"
            ),
            "a timeout while rank 0 preprocesses, tokenizes, downloads, compiles or saves for a long time",
            "ddp_timeout, or InitProcessGroupKwargs(timeout=...), has no effect or is too short",
            "the other processes wait for rank 0 until timeout",
            (
                "the timeout that I passed is ignored: a group created by FSDP, HYBRID_SHARD, DeepSpeed or new_group "
                "has its own default timeout"
            ),
            (
                "the NCCL timeout can't be changed; it still times out after 10 or 30 minutes; how to increase the "
                "timeout"
            ),
            (
                "timeout while a large data set is tokenized, mapped, cached or loaded on the main process; "
                "main_process_first"
            ),
            "a timeout during a long evaluation, generation, checkpoint upload or merge on one rank",
            "barrier timeout; wait_for_everyone times out",
            "crashes exactly 10 minutes, 30 minutes or 1800 seconds after the start of evaluation or preprocessing",
        ),
        quotes={
            "a run on the CPU": (
                "wait timeout after 1800000ms",
                "wait timeout after 600000ms, keys",
                "timed out after 300000ms",
                "failed to pass monitoredBarrier in",
            ),
            "torch's TCPStore.cpp": ("Socket Timeout",),
            "torch's ProcessGroupNCCL.cpp": (
                "store->get('0') got error",
                "is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store",
                "Timeout(ms)=1800000",
            ),
            "torch/distributed/elastic/utils/distributed.py": ("timed out waiting for all",),
            "torch's ProcessGroupGloo.cpp": ("timed out in monitoredBarrier after",),
            "an older PyTorch": ("Timed out waiting for key",),
        },
        broken=wait_without_a_name,
        fixed=wait_with_a_name,
        right=rank_1_is_missing,
        says=r"Timed out waiting 2000ms",
        stall_s=30.0,  # far above the two seconds in which nothing moves here
    ),
)
