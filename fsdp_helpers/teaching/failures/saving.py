"""It saves, but doesn't resume correctly: the resumed run differs."""

import io
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fsdp_helpers.teaching.failures.entry import Failure, Numbers
from fsdp_helpers.teaching.failures.small_job import cpu_mesh, images, in_units, small_model


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Create a temporary folder that all ranks share, and remove it once every rank is done with it."""
    found = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    try:
        yield Path(found[0])
        dist.barrier()
    finally:  # even if a load fails
        shutil.rmtree(found[0], ignore_errors=True)


# ---------------------------------------------------------------- the optimizer's state


def new_run(sharded: bool = True) -> tuple[nn.Module, torch.optim.Adam]:
    model = in_units(small_model()) if sharded else small_model()
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> float:
    for _ in range(num_steps):
        loss = model(images()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def resume_from_plain_state(rank: int, world_size: int) -> Numbers:
    with shared_folder() as folder:
        model, optimizer = new_run()
        train(model, optimizer, 40)
        dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)

        model, optimizer = new_run()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}  # Adam has none yet
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return {"loss at step 43, in millionths": 1e6 * train(model, optimizer, 3)}


def resume_from_named_state(rank: int, world_size: int) -> Numbers:
    with shared_folder() as folder:
        model, optimizer = new_run()
        train(model, optimizer, 40)
        dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder)

        model, optimizer = new_run()
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))  # makes Adam's tensors
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return {"loss at step 43, in millionths": 1e6 * train(model, optimizer, 3)}


def undisturbed() -> Numbers:
    return {"loss at step 43, in millionths": 1e6 * train(*new_run(sharded=False), 43)}


# ---------------------------------------------------------------- a parameter without moments


def new_run_with_a_late_head() -> tuple[nn.Module, torch.optim.Adam]:
    model = small_model()
    model.late = nn.Linear(2, 2)  # no loss reaches it yet
    model.forward = nn.Sequential(*model[:5]).forward
    fully_shard(model, mesh=cpu_mesh())
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def state_to_fill(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def ask_for_all_moments(rank: int, world_size: int) -> Numbers:
    with shared_folder() as folder:
        model, optimizer = new_run_with_a_late_head()
        train(model, optimizer, 2)
        dcp.save(state_to_fill(model, optimizer), checkpoint_id=folder)

        model, optimizer = new_run_with_a_late_head()
        state = state_to_fill(model, optimizer)
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return {"parameters with moments": float(len(optimizer.state))}


def ask_for_saved_moments(rank: int, world_size: int) -> Numbers:
    with shared_folder() as folder:
        model, optimizer = new_run_with_a_late_head()
        train(model, optimizer, 2)
        dcp.save(state_to_fill(model, optimizer), checkpoint_id=folder)

        model, optimizer = new_run_with_a_late_head()
        state = state_to_fill(model, optimizer)
        index = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        for name in list(state["optimizer"]["state"]):
            if f"optimizer.state.{name}.step" not in index:
                del state["optimizer"]["state"][name]
        dcp.load(state, checkpoint_id=folder)
        states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(model, optimizer, **states, options=StateDictOptions(strict=False))
        return {"parameters with moments": float(len(optimizer.state))}


def three_layers() -> Numbers:
    return {"parameters with moments": 6.0}


# ---------------------------------------------------------------- the schedule


def with_schedule() -> tuple[torch.optim.SGD, torch.optim.lr_scheduler.StepLR]:
    optimizer = torch.optim.SGD(small_model().parameters(), lr=0.4)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def run_steps(optimizer: torch.optim.SGD, schedule: torch.optim.lr_scheduler.StepLR, num_steps: int) -> Numbers:
    for _ in range(num_steps):
        optimizer.step()
        schedule.step()
    return {"learning rate": optimizer.param_groups[0]["lr"]}


def forget_the_schedule(rank: int, world_size: int) -> Numbers:
    run_steps(*with_schedule(), 2)
    return run_steps(*with_schedule(), 1)  # the next job, after loading the model


def save_the_schedule(rank: int, world_size: int) -> Numbers:
    optimizer, schedule = with_schedule()
    run_steps(optimizer, schedule, 2)
    saved = {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    optimizer, schedule = with_schedule()
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    return run_steps(optimizer, schedule, 1)


def three_halvings() -> Numbers:
    return {"learning rate": 0.4 / 2**3}


# ---------------------------------------------------------------- half a file


def save_over_the_last(rank: int, world_size: int) -> Numbers:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint.pt")
        torch.save({"step": 1}, path)
        path.write_bytes(as_bytes({"step": 2})[:500])  # killed in the middle of writing
        return {"step after loading": torch.load(path, weights_only=True)["step"]}


def save_beside_and_rename(rank: int, world_size: int) -> Numbers:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint.pt")
        torch.save({"step": 1}, path)
        beside = path.with_suffix(".part")
        beside.write_bytes(as_bytes({"step": 2})[:500])  # killed before beside.rename(path)
        return {"step after loading": torch.load(path, weights_only=True)["step"]}


def as_bytes(state: dict) -> bytes:
    written = io.BytesIO()
    torch.save(state, written)
    return written.getvalue()


def the_last_whole_one() -> Numbers:
    return {"step after loading": 1}


# ---------------------------------------------------------------- names


def save_the_wrapper(rank: int, world_size: int) -> Numbers:
    state = DistributedDataParallel(small_model(seed=3)).state_dict()
    model = small_model()
    model.load_state_dict(state)
    return {"sum of outputs": model(images()).sum().item()}


def save_the_module(rank: int, world_size: int) -> Numbers:
    state = DistributedDataParallel(small_model(seed=3)).module.state_dict()
    model = small_model()
    model.load_state_dict(state)
    return {"sum of outputs": model(images()).sum().item()}


def the_model_that_was_saved() -> Numbers:
    return {"sum of outputs": small_model(seed=3)(images()).sum().item()}


# ---------------------------------------------------------------- averaged weights

WHOLE = StateDictOptions(full_state_dict=True)


def score_and_save(model: nn.Module) -> Numbers:
    score = model(images()).sum().item()
    saved = get_model_state_dict(model, options=WHOLE)
    return {"score": score, "sum of saved weights": sum(weight.sum().item() for weight in saved.values())}


@torch.no_grad()
def swap_after_an_evaluation(rank: int, world_size: int) -> Numbers:
    model, average = fully_shard(small_model(), mesh=cpu_mesh()), small_model(seed=1)
    model(images())  # an evaluation
    for weight, mean in zip(model.parameters(), average.parameters(), strict=True):
        weight.copy_(mean)
    return score_and_save(model)


@torch.no_grad()
def reshard_before_the_swap(rank: int, world_size: int) -> Numbers:
    model, average = fully_shard(small_model(), mesh=cpu_mesh()), small_model(seed=1)
    model(images())  # an evaluation
    model.reshard()
    set_model_state_dict(model, average.state_dict(), options=WHOLE)
    return score_and_save(model)


@torch.no_grad()
def average_alone() -> Numbers:
    return score_and_save(small_model(seed=1))


# ---------------------------------------------------------------- a different batch size

NUM_IMAGES, OLD_BATCH, NEW_BATCH, STEPS_DONE = 24, 4, 2, 3


def resume_at_the_step(rank: int, world_size: int) -> Numbers:
    seen = list(range(STEPS_DONE * OLD_BATCH))
    seen += range(STEPS_DONE * NEW_BATCH, NUM_IMAGES)  # the checkpoint says that three steps are done
    return {"images seen twice": len(seen) - len(set(seen))}


def resume_at_the_image(rank: int, world_size: int) -> Numbers:
    seen = list(range(STEPS_DONE * OLD_BATCH))
    seen += range(STEPS_DONE * OLD_BATCH, NUM_IMAGES)  # the checkpoint has the number of images
    return {"images seen twice": len(seen) - len(set(seen))}


def none_twice() -> Numbers:
    return {"images seen twice": 0}


SAVING = (
    Failure(
        name="save-plain-optimizer-state",
        broken=resume_from_plain_state,
        fixed=resume_from_named_state,
        right=undisturbed,
        tolerance=1e-4,
    ),
    Failure(
        name="save-missing-key",
        broken=ask_for_all_moments,
        fixed=ask_for_saved_moments,
        right=three_layers,
        says="Missing key in checkpoint state_dict",
    ),
    Failure(
        name="save-schedule-lost",
        broken=forget_the_schedule,
        fixed=save_the_schedule,
        right=three_halvings,
    ),
    Failure(
        name="save-half-written",
        broken=save_over_the_last,
        fixed=save_beside_and_rename,
        right=the_last_whole_one,
        says="PytorchStreamReader",
    ),
    Failure(
        name="save-module-prefix",
        broken=save_the_wrapper,
        fixed=save_the_module,
        right=the_model_that_was_saved,
        says=r"Missing key\(s\) in state_dict",
    ),
    Failure(
        name="save-batch-size-changed",
        broken=resume_at_the_step,
        fixed=resume_at_the_image,
        right=none_twice,
    ),
    Failure(
        name="save-average-lost",
        broken=swap_after_an_evaluation,
        fixed=reshard_before_the_swap,
        right=average_alone,
    ),
)
