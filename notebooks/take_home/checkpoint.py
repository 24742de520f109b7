"""Model, Adam, schedule and place in the data, saved and then resumed on another number of ranks:
`torchrun --nproc-per-node 3 checkpoint.py FOLDER 3` saves after 3 steps; with 2 and 6 it goes on to 6."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

LAYERS, WIDTH, CLASSES, BATCH, LENGTH = 4, 64, 10, 24, 16  # BATCH sequences per step, over all ranks


def build_model() -> nn.Sequential:
    torch.manual_seed(0)  # every rank begins with the same weights
    layers = [nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True) for _ in range(LAYERS)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))  # (B, LENGTH, WIDTH) -> (B, LENGTH, CLASSES)


def load_batch(step: int) -> tuple[Tensor, Tensor]:  # of all ranks together; put your own data here
    inputs = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step))
    return inputs, inputs[..., :CLASSES].argmax(dim=-1)  # labels (BATCH, LENGTH)


def state_to_keep(model, optimizer, schedule, step: int) -> dict:
    model_state, adam_state = get_state_dict(model, optimizer)  # slices, with the names of the plain model
    return {"model": model_state, "adam": adam_state, "schedule": schedule.state_dict(), "step": step}


def main(folder: Path, last_step: int) -> None:
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # one per rank; else the CPU
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build_model().to(device)
    mesh = dist.init_device_mesh(device.type, (world_size,))  # all ranks, on the device chosen above
    for unit in (*model[:-1], model):
        fully_shard(unit, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    first_step, whole = 0, sorted(folder.glob("*/.metadata"))  # DCP writes this file last
    if whole:
        state = state_to_keep(model, optimizer, schedule, first_step)  # this rank's slices, to be loaded into
        dcp.load(state, checkpoint_id=whole[-1].parent)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["adam"])
        schedule.load_state_dict(state["schedule"])
        first_step = state["step"]
    for step in range(first_step, last_step):
        inputs, labels = (part.chunk(world_size)[rank].to(device) for part in load_batch(step))
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        dist.all_reduce(mean_loss := loss.detach() / world_size)
        if rank == 0:
            print(f"step {step}  loss {mean_loss.item():.7f}", flush=True)
    dcp.save(state_to_keep(model, optimizer, schedule, last_step), checkpoint_id=folder / f"{last_step:06}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    os._exit(0)  # without Python's clean-up and flush, in which a late thread of gloo can abort the process
