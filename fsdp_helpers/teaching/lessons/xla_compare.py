"""References for PyTorch/XLA's FSDP: plain training, FSDP2, and calculated counts. None of this needs torch_xla."""

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_helpers.data.images import load_data, rank_batches
from fsdp_helpers.measuring.collectives import count_collectives, trace_collectives
from fsdp_helpers.models.series import build_model
from fsdp_helpers.ranks.group import rank_device, sum_over_ranks
from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.records import largest_difference as largest_difference  # for notebook 12
from fsdp_helpers.teaching.lessons.xla_inputs import read_batches, start_model, start_optimizer

TOLERANCE = 1e-5  # for losses over about twenty steps, with sums in a different order
SHARD_MULTIPLE = 128  # XLA pads every tensor, so that each replica's shard has a multiple of this number of values

# ---------------------------------------------------------------- the same training, here


def write_inputs(folder: Path, *, steps: int, batch: int, models: Sequence[str]) -> None:
    """Write the batches of bundled digits for all steps, and each network's initial parameters."""
    digits = load_data(folder).train  # a folder without MNIST
    drawn = rank_batches(digits, rank=0, world_size=1, global_batch_size=batch, seed=0, epoch=0)
    images, labels = (torch.stack(part) for part in zip(*islice(drawn, steps), strict=True))
    np.savez(folder / "batches.npz", images=images.numpy(), labels=labels.numpy())
    for name in models:
        torch.manual_seed(0)
        state = build_model(name).state_dict()
        np.savez(folder / f"start-{name}.npz", **{key: value.numpy() for key, value in state.items()})


def train_plain(folder: Path, name: str) -> tuple[list[float], nn.Module]:
    """Train in one process, without sharding; return the loss of each step and the network."""
    model = start_model(folder, name)
    optimizer = start_optimizer(model)
    losses = [_step(model, optimizer, images, labels).item() for images, labels in read_batches(folder)]
    return losses, model


def train_sharded(rank: int, world_size: int, folder: Path, name: str, units: Sequence[str]) -> dict:
    """Train the same network with FSDP2; return mean losses, this rank's parameter count, and a step's collectives."""
    model = shard_units(start_model(folder, name), units, world_size)
    optimizer = start_optimizer(model)
    losses = []
    for batch in read_batches(folder):
        images, labels = (part.chunk(world_size)[rank].to(rank_device()) for part in batch)
        with trace_collectives() as seen:
            losses.append(_step(model, optimizer, images, labels))
    return {
        "losses": (sum_over_ranks(torch.stack(losses)) / world_size).tolist(),
        "parameters": sum(parameter.to_local().numel() for parameter in model.parameters()),
        "ops": {count.op: count.count for count in count_collectives(seen)},
    }


def answers_of_fsdp2(
    rank: int, world_size: int, folder: Path, name: str, units: Sequence[str], weights: Path
) -> Tensor:
    """Return a sharded network's outputs for the first batch, with shards loaded from a file of full tensors."""
    model = shard_units(start_model(folder, name), units, world_size)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, load_file(weights), options=options)  # every rank takes its shards
    with torch.no_grad():
        return model(read_batches(folder)[0][0].to(rank_device())).cpu()


def answer_differences(weights: Path, folder: Path, name: str, units: Sequence[str]) -> dict[str, float]:
    """Load a consolidated file into a plain and an FSDP2 network, and compare their outputs with the trained network's.

    Differences are relative to the largest output.
    """
    images = read_batches(folder)[0][0]
    _, trained = train_plain(folder, name)
    plain = build_model(name, dropout=False)
    plain.load_state_dict(load_file(weights))
    sharded = launch(answers_of_fsdp2, folder, name, units, weights, world_size=2, device="cpu")[0]
    with torch.no_grad():
        wanted = trained(images)
        answers = {"plain": plain(images), "FSDP2 on 2 ranks": sharded}
    return {name: ((answer - wanted).abs().max() / wanted.abs().max()).item() for name, answer in answers.items()}


def shard_units(model: nn.Module, units: Sequence[str], world_size: int) -> nn.Module:
    """Shard with FSDP2: the modules named in `units` become units, and the rest belongs to the root."""
    mesh = init_device_mesh(rank_device().type, (world_size,))
    for name in units:
        fully_shard(model.get_submodule(name), mesh=mesh)
    return fully_shard(model.to(rank_device()), mesh=mesh)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> Tensor:
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


# ---------------------------------------------------------------- the expected numbers


def tensors_by_unit(model: nn.Module, units: Sequence[str]) -> list[list[int]]:
    """Return the number of values in each parameter tensor, unit by unit, starting with the root."""
    found = {name: [] for name in ("", *units)}
    for name, parameter in model.named_parameters():
        owner = next((unit for unit in units if name.startswith(f"{unit}.")), "")
        found[owner].append(parameter.numel())
    return list(found.values())


def kept_values(tensors: Sequence[Sequence[int]], replicas: int, *, flatten: bool = False) -> int:
    """Return how many values an XLA replica keeps: a shard of each tensor or, if `flatten`, a shard of each whole unit.

    Padding makes the size of every shard a multiple of 128 values (`_shard_size_multiple` in the library).
    """
    if flatten:
        tensors = [[sum(unit)] for unit in tensors if unit]
    return sum(SHARD_MULTIPLE * -(-values // (SHARD_MULTIPLE * replicas)) for unit in tensors for values in unit)


def expected_ops(tensors: Sequence[Sequence[int]], *, flatten: bool = False, reshard: bool = True) -> dict[str, int]:
    """Return the counts of all-gathers and reduce-scatters in an XLA step; with `flatten`, each unit is one tensor.

    The root is all-gathered only once, since it stays unsharded from forward to backward. Without `reshard`, that holds
    for every unit.
    """
    root, *others = [min(1, len(unit)) if flatten else len(unit) for unit in tensors]
    return {"all-gather": root + (2 if reshard else 1) * sum(others), "reduce-scatter": root + sum(others)}


def mean_over_replicas(replicas: Sequence[Mapping[str, Mapping]], name: str) -> list[float]:
    """Return a run's losses over the global batch: the mean of its replicas' losses (batch sizes are equal)."""
    return np.mean([replica[name]["losses"] for replica in replicas], axis=0).tolist()
