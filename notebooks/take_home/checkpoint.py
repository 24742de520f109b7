"""`torchrun --nproc-per-node 3 checkpoint.py FOLDER 3` saves after 3 steps; with 2 and 6 it goes on to 6."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import load, save, state_dict
from torch.distributed.fsdp import fully_shard

LAYERS, WIDTH, CLASSES, BATCH, LENGTH = 4, 64, 10, 24, 16  # BATCH sequences per step, over all ranks


def build_model() -> nn.Sequential:
    torch.manual_seed(0)  # every rank begins with the same weights
    layers = [nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True) for _ in range(LAYERS)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))  # (B, LENGTH, WIDTH) -> (B, LENGTH, CLASSES)


def load_batch(step: int) -> tuple[Tensor, Tensor]:  # of all ranks together; put your own data here
    inputs = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step))
    return inputs, inputs[..., :CLASSES].argmax(dim=-1)  # labels (BATCH, LENGTH)


def state_to_keep(model, adam, schedule, step: int) -> dict:
    model_state, adam_state = state_dict.get_state_dict(model, adam)  # slices, by their plain names
    return {"model": model_state, "adam": adam_state, "schedule": schedule.state_dict(), "step": step}


def main(folder: Path, last_step: int) -> None:
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # one per rank; else the CPU
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    torch.cuda.set_device(device if on_gpus else -1)  # -1 leaves all as it is
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build_model().to(device)
    mesh = dist.init_device_mesh(device.type, (world_size,))  # all ranks, on the device chosen above
    for unit in (*model[:-1], model):
        fully_shard(unit, mesh=mesh)
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=20)
    step, sums, asked, whole = 0, [0, 0], [], sorted(folder.glob("*/.metadata"))  # DCP writes this file last
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))  # Slurm's, before the time limit: noted
    if whole:
        kept = state_to_keep(model, adam, schedule, step)  # this rank's slices, to be loaded into
        load(kept, checkpoint_id=whole[-1].parent)
        state_dict.set_state_dict(model, adam, model_state_dict=kept["model"], optim_state_dict=kept["adam"])
        schedule.load_state_dict(kept["schedule"])
        step = kept["step"]
    while step < last_step and not sums[1]:  # once a rank was asked to end, all leave after the same step
        inputs, labels = (part.chunk(world_size)[rank].to(device) for part in load_batch(step))
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
        schedule.step()
        dist.all_reduce(sums := torch.tensor([loss.item() / world_size, len(asked)]))
        if rank == 0:
            print(f"step {step}  loss {sums[0]:.7f}", flush=True)
        step += 1
    save(state_to_keep(model, adam, schedule, step), checkpoint_id=folder / f"{step:06}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    os._exit(0)  # without Python's clean-up and flush, in which a late thread of gloo can abort the process
