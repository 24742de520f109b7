"""One step of FSDP2, traced unit by unit: the source of the animation in notebook 03 and the README.

python -m fsdp_helpers.teaching.lessons.traced_step notebooks      # traces again, and writes both files
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import record_function

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.measuring.memory import trace_memory
from fsdp_helpers.measuring.unit_trace import RankUnits, UnitHooks, UnitTrace, read_unit_trace, unit_trace
from fsdp_helpers.models.series import build_model
from fsdp_helpers.models.shapes import ViTShape
from fsdp_helpers.models.vit import ViT
from fsdp_helpers.ranks.group import rank_device
from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.training.worker import first_batches, versions

KEPT_TRACE, KEPT_PICTURE = Path("reference", "step-trace.json"), Path("images", "step.svg")
TRIES = 3
KEPT_RUN = TrainConfig(
    strategy="fsdp-auto-wrap", global_batch_size=32, max_steps=4, train_images=1_200, test_images=300
)
KEPT_SHAPE = ViTShape(
    image_size=28, channels=1, patch_size=7, width=256, depth=4, num_heads=4, mlp_width=1024, num_classes=10
)


def train_noting_units(rank: int, world_size: int, config: TrainConfig, shape: ViTShape | None) -> RankUnits:
    """Train for `config.max_steps` steps with FSDP2, and record every unit's events in the last step.

    If `shape` is given, the model is a vision transformer with a unit per block; otherwise, it's the model that
    `config` names, as a single unit.
    """
    device = rank_device()
    with trace_memory(device) as trace:
        batches = first_batches(rank, world_size, config)
        torch.manual_seed(config.seed)
        model = (ViT(shape) if shape else build_model(config.model, dropout=config.dropout)).to(device)
        mesh = init_device_mesh(device.type, (world_size,))
        for block in model.blocks if shape else ():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate, fused=True)
        hooks = UnitHooks(model)
        for images, labels in batches:
            optimizer.zero_grad()
            hooks.begin_step()
            with record_function("forward"):
                loss = F.cross_entropy(model(images), labels)
            with record_function("backward"):
                loss.backward()
            with record_function("step"):
                optimizer.step()
    return hooks.seen_with(trace.last_step())


def trace_step(
    config: TrainConfig, shape: ViTShape | None = None, *, world_size: int = 2, device: str = "auto"
) -> UnitTrace:
    """Launch the ranks, and return the trace of their last step."""
    ranks = launch(train_noting_units, config, shape, world_size=world_size, device=device)
    name = f"a transformer of {shape.depth} blocks" if shape else config.model
    return unit_trace(name, versions(), ranks)


def main() -> None:
    from fsdp_helpers.teaching.figures import animation  # imported here, so that no rank loads the drawing code

    parser = argparse.ArgumentParser(description="Trace one step on two CPU ranks, and draw it.")
    parser.add_argument("folder", type=Path, help="the notebooks folder")
    folder = parser.parse_args().folder
    tries = [trace_step(KEPT_RUN, KEPT_SHAPE, device="cpu") for _ in range(TRIES)]
    step = min(tries, key=lambda one: one.length_s)  # other work on the machine makes a step longer, never shorter
    step.save(folder / KEPT_TRACE)
    animation.animated(read_unit_trace(folder / KEPT_TRACE)).save(folder / KEPT_PICTURE)


if __name__ == "__main__":
    main()
