"""Runs that save but don't resume correctly: the resumed run differs from an uninterrupted one."""

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
    """Yield a temporary folder shared by all ranks; the last rank to leave removes it, even after a failed load."""
    found = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    has_left = [Path(found[0], f".left-{rank}") for rank in range(dist.get_world_size())]
    try:
        yield Path(found[0])
        dist.barrier()
    finally:
        has_left[dist.get_rank()].touch()
        if all(path.exists() for path in has_left):
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
        title="After resuming, the loss jumps up",
        why=(
            "`dcp.load` fills the tensors that you pass. A new Adam optimizer doesn't have any moments yet, so "
            "`optimizer.state_dict()` has nothing to fill, and the saved moments stay in the file. No error is raised."
        ),
        tell="After loading, `optimizer.state` is empty until the first step.",
        fix="Use `get_state_dict` and `set_state_dict`, which create the moments and key them by parameter name.",
        numbers=("the loss jumps up after a resume, and needs many steps to come back",),
        behavior=(
            "each resume seems to restart from scratch; the optimizer's state is not restored",
            "loss spikes after resuming from a checkpoint under FSDP; optimizer.state_dict() of an FSDP model",
            "the optimizer's state doesn't match the parameters' shapes or names after resuming",
            "the loss is higher after resuming training than before",
            "resuming the optimizer under FSDP: parameter ids, rekey, mismatch in the parameter's shape",
            "optimizer states saved per rank don't load with a different number of GPUs or nodes",
            "changing the world size when resuming: optimizer shards have different sizes",
            "loading the optimizer under FSDP fails or is ignored; exp_avg has the wrong shape; optim_state_dict",
            "the loss spikes, jumps or gets worse right after resuming",
        ),
        quotes={
            "a run on the CPU": (
                "that doesn't match the size of optimizer's group",
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group",
                "loaded state dict has a different number of parameter groups",
                "must match the size of tensor b",
                "must match the existing size",
                "at non-singleton dimension 0",
            ),
            "torch/distributed/fsdp/_optim_utils.py": (
                "is not in the optimizer state",
                "Differing optimizer state names for the unflattened parameters",
                "Tensor optimizer state does not have same shape as its parameter",
                "must have positive-dimension tensor state",
                "must have scalar state with the same value and dtype",
                "All unflattened parameters comprising a single flat parameter",
            ),
        },
        broken=resume_from_plain_state,
        fixed=resume_from_named_state,
        right=undisturbed,
        tolerance=1e-4,
    ),
    Failure(
        name="save-missing-key",
        title="Missing key in checkpoint state_dict",
        why=(
            "`dcp.load` needs every entry of the dictionary that it fills. The checkpoint either has the entry under a "
            "different name (by number, with a prefix, nested differently) or doesn't have the entry at all. For "
            "example, Adam has no moments for a parameter that hasn't had a gradient yet, such as a head that's used "
            "later, but a new optimizer asks for those moments."
        ),
        tell=(
            "`sorted(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)` lists the names in the "
            "checkpoint."
        ),
        fix=(
            "Save and load with the same `get_state_dict(model, optimizer)`, and remove from the dictionary any "
            "entries that aren't in the checkpoint."
        ),
        messages=("Missing key in checkpoint state_dict",),
        behavior=(
            "saving the optimizer succeeds, but loading it fails: step or exp_avg of a parameter is missing",
            "KeyError in optimizer.state_dict(), set_optimizer_state_dict or optim_state_dict_to_load under FSDP",
            (
                "strict loading of a distributed checkpoint: a new layer, a buffer or a frozen parameter isn't in it; "
                "allow_partial_load"
            ),
            "optimizer state is missing for parameters that were frozen or unused",
            "the names of the parameters changed between saving and loading; FQN",
        ),
        quotes={
            "a run on the CPU": (
                "Missing key in checkpoint state_dict: optimizer.state",
                "KeyError: 'exp_avg'",
                "KeyError: 'step'",
                "KeyError: 'param_groups'",
            ),
            "torch/distributed/checkpoint/utils.py": (
                "Could not find FQN",
                "Key(s) present in other ranks but not this one",
            ),
            "torch/distributed/checkpoint/state_dict.py": ("Missing optimizer state for parameter",),
            "torch/distributed/checkpoint/protocol.py": ("Could not find checkpointable tensor shard",),
            "torch/distributed/checkpoint/default_planner.py": ("Failed to validate global plan",),
            "an older PyTorch": ("KeyError: 'state'",),
        },
        broken=ask_for_all_moments,
        fixed=ask_for_saved_moments,
        right=three_layers,
        says="Missing key in checkpoint state_dict",
    ),
    Failure(
        name="save-schedule-lost",
        title="After resuming, the learning rate starts over",
        why=(
            "The schedule has its own step counter. If that counter isn't saved, the next job starts the warmup or the "
            "decay over."
        ),
        tell="Log the learning rate in every step: it jumps where the job was resumed.",
        fix="Save `schedule.state_dict()` together with the optimizer state.",
        numbers=("the learning rate starts over after a resume",),
        behavior=(
            "the learning rate is wrong after resuming; warmup starts again",
            (
                "the scheduler restarts, or the learning rate jumps, after resuming; last_epoch; lr_scheduler state "
                "isn't saved"
            ),
        ),
        broken=forget_the_schedule,
        fixed=save_the_schedule,
        right=three_halvings,
    ),
    Failure(
        name="save-half-written",
        title="PytorchStreamReader failed reading zip archive",
        why="The job was killed while it was overwriting its only checkpoint.",
        tell=(
            "The file is smaller than the previous checkpoint. If the checkpoint is a `torch.distributed.checkpoint` "
            "folder, it has no `.metadata` file."
        ),
        fix="Write to a temporary file, and rename it when it's complete. Keep the last two checkpoints.",
        messages=("PytorchStreamReader failed reading zip archive",),
        behavior=(
            "a checkpoint can't be read after a killed job",
            "the disk was full while the checkpoint was written",
            "the checkpoint is corrupted, truncated or incomplete after a crash, a preemption or a full disk",
            "the latest checkpoint can't be loaded, but an older one can",
            "the file is a Git LFS pointer or an incomplete download instead of the weights",
        ),
        quotes={
            "a run on the CPU": (
                "failed finding central directory",
                "unexpected pos",
                "[enforce fail at inline_container.cc",
                "invalid header or archive is corrupted",
                "unexpected EOF",
                "file in archive is not in a subdirectory",
                "Invalid magic number; corrupt file",
                "incomplete metadata, file not fully covered",
                "SafetensorError",
                "OSError: [Errno 28] No space left on device",
                "Disk quota exceeded",
                "invalid load key",
                "Error while deserializing: header too small",
                "Error while deserializing: header too large",
                "Error while deserializing: invalid JSON in header",
            ),
            "an older PyTorch": ("PytorchStreamWriter failed writing file",),
            "an older safetensors": (
                "Error while deserializing header: HeaderTooLarge",
                "Error while deserializing header: MetadataIncompleteBuffer",
                "Error while deserializing header: InvalidHeaderDeserialization",
                "Error while deserializing header: HeaderTooSmall",
            ),
            "transformers": ("Unable to load weights from pytorch checkpoint file",),
        },
        broken=save_over_the_last,
        fixed=save_beside_and_rename,
        right=the_last_whole_one,
        says="PytorchStreamReader",
    ),
    Failure(
        name="save-module-prefix",
        title="Missing key(s) in state_dict",
        why=(
            "DDP wraps your model in a module, so parameter names begin with `module.`. `torch.compile` and activation "
            "checkpointing add their own prefixes."
        ),
        tell="The message lists each name twice: once as missing and once, with a prefix, as unexpected.",
        fix="Save `model.module.state_dict()`, or `get_model_state_dict(model)`, which removes all these prefixes.",
        messages=(
            "Missing key(s) in state_dict",
            "Unexpected key(s) in state_dict",
        ),
        behavior=(
            "a checkpoint's names begin with module., _orig_mod. or _fsdp_wrapped_module.",
            "loading a DDP, FSDP or compiled checkpoint into a plain model fails: the keys don't match",
            "loading fails; all keys have a module. prefix",
            (
                "all keys are missing and all are unexpected, with module., _orig_mod., model., _forward_module. or "
                "base_model. in front"
            ),
            "a model trained with DataParallel or DDP is loaded on a single GPU; strip the prefix",
            "a checkpoint of a model compiled with torch.compile can't be loaded",
        ),
        quotes={
            "a run on the CPU": (
                "Error(s) in loading state_dict for",
                'Missing key(s) in state_dict: "module.',
                'Unexpected key(s) in state_dict: "_orig_mod.',
                "_fsdp_wrapped_module.",
                "_checkpoint_wrapped_module.",
            ),
        },
        broken=save_the_wrapper,
        fixed=save_the_module,
        right=the_model_that_was_saved,
        says=r"Missing key\(s\) in state_dict",
    ),
    Failure(
        name="save-batch-size-changed",
        title="After resuming with a different batch size, some images are seen twice",
        why=(
            "The checkpoint stores the number of steps. Once the batch size has changed, that number no longer tells "
            "you how many images have been seen."
        ),
        tell="Check whether the number of steps times the batch size equals the number of images seen.",
        fix="Save the number of images seen, not the number of steps, or refuse to resume with a different batch size.",
        numbers=("images seen twice, or not at all, after a resume with a different batch size",),
        behavior=(
            (
                "resuming with a different number of GPUs or batch size: the wrong number of samples is skipped; data "
                "seen twice"
            ),
        ),
        broken=resume_at_the_step,
        fixed=resume_at_the_image,
        right=none_twice,
    ),
    Failure(
        name="save-average-lost",
        title="The averaged weights score well, but the saved file contains different weights",
        why=(
            "The root unit stays unsharded after a forward pass, since a backward pass usually follows. In an "
            "evaluation, no backward pass follows, so swapping in the averaged weights (EMA) changes the unsharded "
            "copy. The next forward pass uses that copy, but saving reshards the unit and drops the copy."
        ),
        tell="Before the swap, `next(model.parameters())` is a plain parameter, not a DTensor.",
        fix="Call `model.reshard()` after every evaluation, and then swap the weights with `set_model_state_dict`.",
        numbers=("averaged weights (EMA) score well, but the saved file scores differently",),
        behavior=("EMA weights under FSDP are wrong, equal to the model's, or lost in the checkpoint",),
        broken=swap_after_an_evaluation,
        fixed=reshard_before_the_swap,
        right=average_alone,
    ),
)
