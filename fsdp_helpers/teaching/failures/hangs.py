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
    if rank == 0:  # it alone writes the log
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


# ---------------------------------------------------------------- a group that not everyone makes


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


# ---------------------------------------------------------------- a timeout that names nobody

PATIENCE = timedelta(seconds=2)


def wait_without_a_name(rank: int, world_size: int) -> Numbers:
    elsewhere, impatient = dist.new_group(), dist.new_group()
    set_timeout(PATIENCE, impatient)
    if rank == 1:
        dist.barrier(elsewhere)  # busy until rank 0 has given up: it writes a checkpoint, or reads a slow disk
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
        dist.barrier(elsewhere)  # busy until rank 0 has given up: it writes a checkpoint, or reads a slow disk
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
        why="There are five images on two ranks, so rank 0 has one more batch. Each forward all-gathers every unit, so rank 0 waits in an all-gather while rank 1 is already in the all-reduce of the results. Under DDP, or with one unit that stays unsharded, the same loop works, because its forward has no collective.",
        tell="One rank waits inside the model, the other after the loop. Count the batches of each rank.",
        fix="Give every rank the same number of batches, even if some are empty. An empty batch runs the all-gathers, too.",
        broken=evaluate_own_images,
        fixed=evaluate_even_batches,
        right=evaluate_alone,
        says="in evaluate_own_images",
    ),
    Failure(
        name="hang-gather-on-rank-0",
        title="Training stops as soon as rank 0 logs or saves",
        why="`full_tensor()`, `get_model_state_dict` and `summon_full_params` are collectives: every rank has to contribute "
        "its shard. Inside `if rank == 0`, only one does.",
        tell="Rank 0 waits in `full_tensor()`, the others in whatever comes next. Search for collectives below `if rank`.",
        fix="All-gather on every rank; print or write on one.",
        broken=gather_on_rank_0,
        fixed=gather_on_every_rank,
        right=norm_alone,
        says=r"full_tensor\(\), called from hangs.py",
    ),
    Failure(
        name="hang-order",
        title="Two ranks wait in two different collectives",
        why="Collectives are matched by their order, not by their names. A loop over a set or over a dictionary that each "
        "rank filled itself may run in a different order on each rank.",
        tell="All ranks wait, each in a different collective. `compare_collectives` names the first place where their traces diverge.",
        fix="Use the same order on every rank: sort the names.",
        broken=log_in_own_order,
        fixed=log_in_sorted_order,
        right=logged_by_hand,
        says=r"(all_reduce|all_gather)\(\), called from hangs.py",
    ),
    Failure(
        name="hang-new-group",
        title="Making a smaller process group hangs",
        why="`new_group` is itself a collective of all ranks, including those that won't belong to it. Here rank 1 "
        "never calls it.",
        tell="A rank waits inside `new_group`, before any tensor has moved.",
        fix="Call `new_group` on every rank, in the same order; `init_device_mesh` does that for you.",
        broken=make_group_on_rank_0,
        fixed=make_group_on_every_rank,
        right=two_ranks,
        says=r"in make_group_on_rank_0",
    ),
    Failure(
        name="hang-default-timeout",
        title="After half an hour, a timeout that doesn't say who is missing",
        why="A collective gives up after 30 minutes unless you say otherwise, and its message has milliseconds, but no rank number. "
        "Here the limit is two seconds.",
        tell="`dist.monitored_barrier` on a gloo group names the first rank that is missing. `launch` and `--timeout` call "
        "the roll and name all of them.",
        fix="Pass `timeout=` to `init_process_group`, more than your longest step and longest checkpoint take. To find the culprit, "
        "put a monitored barrier before the collective.",
        broken=wait_without_a_name,
        fixed=wait_with_a_name,
        right=rank_1_is_missing,
        says=r"Timed out waiting 2000ms",
        stall_s=30.0,  # far above the two seconds in which nothing moves here
    ),
)
