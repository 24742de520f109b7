"""XlaFullyShardedDataParallel on a CPU, with one replica per device, all of them threads of one process.

PYTHONPATH=../.. PYTHON train.py FOLDER    (replicas.py describes the folder)
"""

import json
import re
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import replicas
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import Tensor, nn
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP
from torch_xla.distributed.fsdp import checkpoint_module
from torch_xla.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from fsdp_helpers.teaching.lessons import xla_inputs

COUNTED = re.compile(r" (all-gather|all-reduce|reduce-scatter|dot)(?:-start)?\(")  # dot: a matrix product
POLICIES = {
    "size": partial(size_based_auto_wrap_policy, min_num_params=10_000),
    "transformer": partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer}),
}


def wrap(model: nn.Module, run: dict, settings: dict) -> FSDP:
    """Wrap units by hand ("nested"), by a policy, or only the root. Checkpointing goes inside the unit's wrapper."""
    sharded = partial(
        FSDP,
        flatten_parameters=run["flatten"],
        reshard_after_forward=run["reshard"],
        # If pinned, each replica has a different graph.
        pin_layout_in_collective_ops=settings.get("without") == "layout",
    )
    inside = checkpoint_module if run["checkpoint"] else (lambda module: module)
    if run["cut"] in POLICIES:
        return sharded(
            model,
            auto_wrap_policy=POLICIES[run["cut"]],
            auto_wrapper_callable=lambda module, **options: FSDP(inside(module), **options),
        )
    for name, layer in model.layers.named_children():
        if list(layer.parameters()):
            layer = inside(layer)
            setattr(model.layers, name, sharded(layer) if run["cut"] == "nested" else layer)
    return sharded(model)


def my_part(batch: tuple[Tensor, Tensor], rank: int, world_size: int) -> list[Tensor]:
    """Return this replica's images and labels of a global batch, on its device."""
    return [part.chunk(world_size)[rank].to(torch_xla.device()) for part in batch]


def train(model: FSDP, batches: list, optimizer: torch.optim.Optimizer, run: dict, lock) -> list[float]:
    """Return each step's loss on this replica's share of the batch."""
    losses = []
    for batch in batches:
        images, labels = my_part(batch, xr.global_ordinal(), xr.world_size())
        with lock:  # trace the step, then compile it or find the compiled program
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            if run.get("xm_step"):
                xm.optimizer_step(optimizer, pin_layout=False)  # wrong here: it would average gradients again
            else:
                optimizer.step()  # the gradients are this replica's shards, which have already been reduced
            torch_xla.sync()
        losses.append(loss.item())  # outside the lock, because this waits for the other replicas
    return losses


def save(path: str, model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    """Write one file per replica, with its shards, its optimizer state, and the metadata of the full tensors."""
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "shard_metadata": model.get_shard_metadata(),
    }
    xm.save(state, path, master_only=False)


def resume(path: str, model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def one_run(folder: Path, settings: dict, run: dict) -> dict:
    """Wrap and train a model. Return its losses, this replica's parameter count, and the compiled step's operations."""
    rank, world_size, lock = xr.global_ordinal(), xr.world_size(), replicas.one_at_a_time(settings)
    with lock:
        model = wrap(replicas.start_model(folder, run["model"]), run, settings)
        optimizer = xla_inputs.start_optimizer(model)  # after wrapping
        if run.get("resume"):
            resume(f"{folder}/{run['resume']}_rank-{rank}-of-{world_size}.pth", model, optimizer)
    batches = xla_inputs.read_batches(folder)[slice(*run["steps"])]
    losses = train(model, batches, optimizer, run, lock)
    with lock:
        if run.get("save"):
            save(f"{folder}/{run['save']}_rank-{rank}-of-{world_size}.pth", model, optimizer)
        return {
            "losses": losses,
            "world_size": world_size,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "tensors": len(list(model.parameters())),
            "ops": Counter(COUNTED.findall(replicas.newest_graph(folder))) if rank == 0 else {},
            "printed": str(model) if rank == 0 and run.get("print") else "",
        }


def replica(rank: int, folder: Path, settings: dict) -> None:
    """Run a replica: do all runs, one after the other, and write their results."""
    results = {}
    for run in settings["runs"]:
        results[run["name"]] = one_run(folder, settings, run)
        replicas.MEETING.wait(replicas.MEETING_S)  # rank 0 has to read this run's graph before the next one is compiled
    (folder / f"replica-{rank}.json").write_text(json.dumps(results))


def main(folder: Path, settings: dict) -> None:
    replicas.prepare_cpu(folder, settings)
    # This forks a process, which inherits the imports and the barrier, and starts one thread per replica in it.
    torch_xla.launch(replica, args=(folder, settings), start_method="fork")
    files = [folder / f"replica-{rank}.json" for rank in range(settings["replicas"])]
    replicas.write_result(folder, [json.loads(file.read_text()) for file in files])


if __name__ == "__main__":
    replicas.main(main, sys.argv)
