"""For notebook 14: the same training run with FSDP1 and FSDP2, and FSDP1 checkpoints loaded with FSDP2."""

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import AdamW

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.models.vit import Block
from fsdp_helpers.ranks.group import rank_device
from fsdp_helpers.teaching.lessons.moved_job import build_model, load_steps, make_optimizer, mean_over_ranks, shard
from fsdp_helpers.training.worker import first_batches

Parts = list[tuple[Tensor, Tensor]]
loss_of = nn.CrossEntropyLoss()
CONFIG = TrainConfig(model="vit-mnist", global_batch_size=24, max_steps=4, train_images=480, test_images=60)


# Trailing commas keep these lines short: the notebook shows the two functions side by side.
def train_with_fsdp1(
    model: nn.Module,
    mesh: DeviceMesh,
    steps: list[Parts],
) -> list[Tensor]:
    bf16 = MixedPrecision(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
    )
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_mesh=mesh,
        device_id=rank_device(),
        mixed_precision=bf16,
        use_orig_params=True,
    )
    optimizer = torch.optim.Adam(model.parameters())
    norms = []
    for first, last in steps:
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model(first[0]), first[1]).backward()
        loss_of(model(last[0]), last[1]).backward()
        norm = model.clip_grad_norm_(1.0)
        norms.append(norm)
        optimizer.step()
    return norms


def train_with_fsdp2(
    model: nn.Module,
    mesh: DeviceMesh,
    steps: list[Parts],
) -> list[Tensor]:
    bf16 = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=bf16)
    fully_shard(model, mesh=mesh, mp_policy=bf16)
    optimizer = torch.optim.Adam(model.parameters())
    norms = []
    for first, last in steps:
        optimizer.zero_grad()
        model.set_requires_gradient_sync(False)
        loss_of(model(first[0]), first[1]).backward()
        model.set_requires_gradient_sync(True)
        loss_of(model(last[0]), last[1]).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norms.append(norm.full_tensor())
        optimizer.step()
    return norms


def norms_by_both(rank: int, world_size: int, config: TrainConfig = CONFIG) -> dict[str, list[float]]:
    """Train the same model on the same images with both APIs, two micro-batches per step; return the gradient norms."""
    mesh = init_device_mesh(rank_device().type, (world_size,))
    batches = first_batches(rank, world_size, config)
    steps = [list(zip(images.chunk(2), labels.chunk(2), strict=True)) for images, labels in batches]
    norms = {}
    for name, train in {"FSDP1": train_with_fsdp1, "FSDP2": train_with_fsdp2}.items():
        norms[name] = [float(norm) for norm in train(build_model(config.seed).to(rank_device()), mesh, steps)]
    return norms


# ---------------------------------------------------------------- old checkpoints


MOVED_AT, LAST_STEP = 10, 16  # steps


def train_fsdp1(rank: int, world_size: int, folder: str) -> list[float]:
    """Train under FSDP1 and save after step MOVED_AT, in shards and in one file; return the losses of all steps."""
    warnings.simplefilter("ignore")  # each of these calls is deprecated, which is why the job moves
    model = FullyShardedDataParallel(
        build_model(seed=0),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=rank_device(),
        use_orig_params=True,
    )
    optimizer = make_optimizer(model)
    losses = take_steps(model, optimizer, rank, world_size, 0, MOVED_AT)
    save_in_shards(f"{folder}/shards", model, optimizer)
    save_in_one_file(f"{folder}/one_file.pt", model, optimizer)
    return losses + take_steps(model, optimizer, rank, world_size, MOVED_AT, LAST_STEP)


def save_in_shards(folder: str, model: FullyShardedDataParallel, optimizer: AdamW) -> None:
    """Let every rank write its own shards: a "sharded" checkpoint."""
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict(), "optimizer": FullyShardedDataParallel.optim_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=folder)


def save_in_one_file(path: str, model: FullyShardedDataParallel, optimizer: AdamW) -> None:
    """Collect the full state on rank 0, which writes it: a "full" checkpoint."""
    # Most old jobs offload here. If the state is on the CPU already, PyTorch 2.11 frees it first and crashes with
    # SIGSEGV; 2.15 doesn't.
    offload = rank_device().type != "cpu" or torch.__version__ >= "2.15"
    configs = [
        config(offload_to_cpu=offload, rank0_only=True) for config in (FullStateDictConfig, FullOptimStateDictConfig)
    ]
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
        state = {"model": model.state_dict(), "optimizer": FullyShardedDataParallel.optim_state_dict(model, optimizer)}
    if dist.get_rank() == 0:
        torch.save(state, path)


def count_twins(path: str) -> tuple[int, int]:
    """Return how many parameters in a full checkpoint have two equal Adam moments, and how many have moments at all."""
    states = torch.load(path, weights_only=True)["optimizer"]["state"].values()
    return sum(torch.equal(state["exp_avg"], state["exp_avg_sq"]) for state in states), len(states)


def write_one_file(folder: str) -> str:
    """In a single process, merge the shards into one file with FSDP1's own layout; return the file's path."""
    path = str(Path(folder) / "from_shards.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it loads without a process group
        dcp_to_torch_save(f"{folder}/shards", path)
    return path


def go_on_with_fsdp2(rank: int, world_size: int, checkpoint: str) -> list[float]:
    """Continue under FSDP2 from a folder of FSDP1's shards, or from its one file; return the losses after MOVED_AT."""
    warnings.simplefilter("ignore")  # FSDP1's shards are ShardedTensors, which are deprecated
    mesh = init_device_mesh(rank_device().type, (world_size,))
    model = shard(build_model(seed=1), mesh)
    optimizer = make_optimizer(model)
    read = read_shards if Path(checkpoint).is_dir() else read_one_file
    read(checkpoint, model, optimizer)
    return take_steps(model, optimizer, rank, world_size, MOVED_AT, LAST_STEP)


def read_shards(folder: str, model: nn.Module, optimizer: AdamW) -> None:
    """Read this rank's rows of every tensor, whichever ranks wrote them."""
    weights, adam = get_state_dict(model, optimizer)  # this rank's shards, to be read into
    dcp.load({"model": weights, "optimizer": adam}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=adam)


def read_one_file(path: str, model: nn.Module, optimizer: AdamW) -> None:
    """Read the file on rank 0; send each rank its shards. FSDP1 saves Adam's state by name, so there's no renaming."""
    state = {"model": {}, "optimizer": {}}
    if dist.get_rank() == 0:
        state = torch.load(path, mmap=True, weights_only=True)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


def compare_moments(rank: int, world_size: int, folder: str, one_file: str) -> dict[str, tuple[int, float]]:
    """Compare Adam's state from the shards with the one file's; return counts and largest differences by moment."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh(rank_device().type, (world_size,))
    model = shard(build_model(seed=1), mesh)
    optimizer = make_optimizer(model)
    read_shards(f"{folder}/shards", model, optimizer)
    options = StateDictOptions(full_state_dict=True)
    mine = get_state_dict(model, optimizer, options=options)[1]["state"]
    theirs = torch.load(one_file, weights_only=True)["optimizer"]["state"]
    compared = {}
    for moment in ("exp_avg", "exp_avg_sq", "step"):
        differences = [(mine[name][moment].cpu() - state[moment]).abs().max().item() for name, state in theirs.items()]
        compared[moment] = len(differences), max(differences)
    return compared


def take_steps(
    model: nn.Module, optimizer: AdamW, rank: int, world_size: int, first_step: int, last_step: int
) -> list[float]:
    """Train from `first_step` until just before `last_step`; return each step's mean loss over the global batch."""
    losses = []
    for parts in load_steps(rank, world_size, first_step, last_step):
        images, labels = (torch.cat(column).to(rank_device()) for column in zip(*parts, strict=True))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(mean_over_ranks(loss))
    return losses
