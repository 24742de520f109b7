"""It hangs: ranks wait for a collective that the others don't take part in."""

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
        broken=evaluate_own_images,
        fixed=evaluate_even_batches,
        right=evaluate_alone,
        says="in evaluate_own_images",
    ),
    Failure(
        name="hang-gather-on-rank-0",
        broken=gather_on_rank_0,
        fixed=gather_on_every_rank,
        right=norm_alone,
        says=r"full_tensor\(\), called from hangs.py",
    ),
    Failure(
        name="hang-local-decision",
        broken=stop_on_own_loss,
        fixed=stop_on_mean_loss,
        right=stop_by_hand,
        says=r"in stop_on_own_loss",
    ),
    Failure(
        name="hang-order",
        broken=log_in_own_order,
        fixed=log_in_sorted_order,
        right=logged_by_hand,
        says=r"(all_reduce|all_gather)\(\), called from hangs.py",
    ),
    Failure(
        name="hang-new-group",
        broken=make_group_on_rank_0,
        fixed=make_group_on_every_rank,
        right=two_ranks,
        says=r"in make_group_on_rank_0",
    ),
    Failure(
        name="hang-default-timeout",
        broken=wait_without_a_name,
        fixed=wait_with_a_name,
        right=rank_1_is_missing,
        says=r"Timed out waiting 2000ms",
        stall_s=30.0,  # far above the two seconds in which nothing moves here
    ),
)
