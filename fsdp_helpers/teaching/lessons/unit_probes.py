"""Small rank functions that look at units: who makes them, when they are whole, what they hold and copy."""

import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.measuring.collectives import trace_collectives
from fsdp_helpers.measuring.copies import OffloadCopy, trace_copies
from fsdp_helpers.measuring.memory import trace_memory
from fsdp_helpers.models.series import build_model
from fsdp_helpers.ranks.group import rank_device
from fsdp_helpers.records import StepTrace
from fsdp_helpers.sharding.strategies import apply_fsdp_offload
from fsdp_helpers.training.loop import train_step
from fsdp_helpers.training.worker import first_batches


def transformer_in_units(root: bool | None = None, blocks: bool | int = True) -> nn.Module:
    """Build a small transformer, each block a unit; `root` and `blocks` say what is resharded after forward."""
    model = build_model("vit").to(rank_device())
    mesh = init_device_mesh(rank_device().type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=blocks)
    return fully_shard(model, mesh=mesh, reshard_after_forward=root)


def local_part(tensor: Tensor) -> Tensor:
    """Return a rank's shard of a sharded tensor, or all of a plain one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_bytes(model: nn.Module) -> dict[str, int]:
    """Return the bytes that this rank now has of the root's parameters, and of all blocks' together."""
    found = {"root": 0, "blocks": 0}
    for name, parameter in model.named_parameters():
        found["blocks" if name.startswith("blocks.") else "root"] += local_part(parameter).nbytes
    return found


def between_forward_and_backward(rank: int, world_size: int, choices: Sequence[bool | int]) -> list[dict[str, int]]:
    """Return, by choice of `reshard_after_forward`, the bytes left of the blocks, and what backward gathers and sends."""
    found = []
    for blocks in choices:
        model = transformer_in_units(blocks=blocks)
        loss = model(torch.ones(4, 1, 28, 28, device=rank_device())).square().mean()
        kept = own_bytes(model)["blocks"]
        with trace_collectives() as collectives:
            loss.backward()
        gathers = [seen for seen in collectives if seen.op == "all_gather"]
        sent = sum(seen.sent_bytes for seen in gathers)
        found.append({"kept bytes": kept, "gathers in backward": len(gathers), "sent bytes": sent})
    return found


def doubled_after_evaluation(rank: int, world_size: int, reshard_first: bool) -> dict[str, float]:
    """Return the output of one layer, a root, before and after its parameters change, following an evaluation."""
    torch.manual_seed(0)
    mesh = init_device_mesh(rank_device().type, (world_size,))
    model = fully_shard(nn.Linear(8, 1).to(rank_device()), mesh=mesh)
    inputs = torch.ones(1, 8, device=rank_device())
    found = {}
    with torch.no_grad():
        found["evaluated"] = model(inputs).item()  # the root stays unsharded now: its parameters are a gathered copy
        if reshard_first:
            model.reshard()
        for parameter in model.parameters():
            parameter.mul_(2)  # as an EMA does when it swaps its averages in
        found["parameters doubled"] = model(inputs).item()
        model.reshard()
        found["after the next reshard"] = model(inputs).item()
    return found


def copies_apart(rank: int, world_size: int, seed_per_rank: bool) -> dict[str, float]:
    """Start two hybrid copies from meta; return the largest difference between them, before and after 5 steps."""
    warnings.filterwarnings("ignore", message="DTensor random operators")  # on CPUs each rank draws its own values
    mesh = init_device_mesh(rank_device().type, (2, world_size // 2), mesh_dim_names=("copies", "shards"))
    with torch.device("meta"):
        layer = nn.Linear(8, 8)
    model = fully_shard(layer, mesh=mesh).to_empty(device=rank_device())
    torch.manual_seed(rank if seed_per_rank else 0)
    model.reset_parameters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = {"at the start": gap_between_copies(model.weight.to_local(), mesh["copies"].get_group())}
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(4, 8, device=rank_device())).square().mean().backward()
        optimizer.step()
    return found | {"after 5 steps": gap_between_copies(model.weight.to_local(), mesh["copies"].get_group())}


def gap_between_copies(tensor: Tensor, group: dist.ProcessGroup) -> float:
    """Return the largest difference between what two ranks of `group` have."""
    both = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(both, tensor.detach().clone(), group=group)
    return (both[0] - both[1]).abs().max().item()


def offloaded_step(rank: int, world_size: int, config: TrainConfig) -> tuple[StepTrace, list[OffloadCopy]]:
    """Take a few steps with FSDP2's offload policy; return the last one's collectives, and the policy's copies."""
    batches = first_batches(rank, world_size, config)
    torch.manual_seed(config.seed)
    with trace_memory(rank_device()) as trace:
        model = apply_fsdp_offload(build_model(config.model), rank_device(), config)
        optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate)  # steps on the host
        for images, labels in batches:
            with trace_copies(model) as copies:
                train_step(model, images, labels, optimizer)
    return trace.last("train step"), copies
