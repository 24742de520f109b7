"""FSDP2: every rank keeps a slice of each parameter, of its gradient and of Adam's moments.

Run it with `torchrun --nproc-per-node 2 fsdp2.py`, on GPUs or, where there are too few, on the CPU.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

LAYERS, WIDTH, CLASSES = 4, 64, 10
STEPS, BATCH, LENGTH = 6, 24, 16  # BATCH sequences per step over all ranks: it divides by 2, 3 and 6


def build_model() -> nn.Sequential:
    torch.manual_seed(0)  # every rank begins with the same weights
    layers = [nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True) for _ in range(LAYERS)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))  # (B, LENGTH, WIDTH) -> (B, LENGTH, CLASSES)


def load_batch(step: int) -> tuple[Tensor, Tensor]:  # of all ranks together; put your own data here
    inputs = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step))
    return inputs, inputs[..., :CLASSES].argmax(dim=-1)  # labels (BATCH, LENGTH)


def main() -> None:
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # one per rank; else the CPU
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh(device.type, (world_size,))  # all ranks, on the device chosen above
    model = build_model().to(device)
    for layer in model[:-1]:
        fully_shard(layer, mesh=mesh)  # a unit: gathered for its forward and its backward, freed in between
    fully_shard(model, mesh=mesh)  # the root: all that no unit has taken
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)  # after sharding: it needs the slices
    for step in range(STEPS):
        inputs, labels = (part.chunk(world_size)[rank].to(device) for part in load_batch(step))
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(mean_loss := loss.detach() / world_size)
        if rank == 0:
            print(f"step {step}  loss {mean_loss.item():.7f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # without Python's clean-up and flush, in which a late thread of gloo can abort the process
