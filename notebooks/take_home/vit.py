"""A vision transformer with one unit per block. Before training, only rank 0 has the full weights.

Run it with `torchrun --nproc-per-node 2 vit.py`. It uses GPUs, or the CPU if there are none.
`vit.py FILE` starts from the weights in a file that `torch.save(model.state_dict(), FILE)` wrote.
"""

import os
import sys
from argparse import ArgumentParser

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

SIZE = 28  # side of an image, in pixels
PATCH = 4
WIDTH = 64
DEPTH = 4
CLASSES = 10
STEPS = 6
BATCH = 24  # images per step, across all ranks, whose number has to divide it


class ViT(nn.Module):
    """A small vision transformer that maps (B, 1, SIZE, SIZE) to (B, CLASSES). Put your own model here."""

    def __init__(self) -> None:
        super().__init__()
        num_patches = (SIZE // PATCH) ** 2
        self.patches = nn.Conv2d(1, WIDTH, kernel_size=PATCH, stride=PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn(1, num_patches, WIDTH))
        self.blocks = nn.Sequential()
        for _ in range(DEPTH):
            block = nn.TransformerEncoderLayer(
                WIDTH, 4, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            self.blocks.append(block)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images)  # (B, WIDTH, rows, columns)
        tokens = patches.flatten(2).transpose(1, 2)  # (B, num_patches, WIDTH)
        tokens = self.blocks(tokens + self.positions)
        return self.head(tokens.mean(dim=1))


def load_batch(step: int) -> tuple[Tensor, Tensor]:
    """Return images (BATCH, 1, SIZE, SIZE) and labels, which the ranks split. Put your own data here."""
    random = torch.Generator().manual_seed(step)
    labels = torch.arange(BATCH) % CLASSES
    images = torch.randn(BATCH, 1, SIZE, SIZE, generator=random)
    return images + labels.view(-1, 1, 1, 1) / CLASSES, labels


def first_values(file: str | None) -> dict[str, Tensor]:
    """Return the tensors in full shape, in host memory: those in `file`, or newly initialized ones."""
    if file:
        return torch.load(file, mmap=True, map_location="cpu", weights_only=True)
    return ViT().state_dict()


def choose_device() -> torch.device:
    """Return this rank's own GPU, or the CPU if none is visible. Exit (status 2) if the ranks don't fit."""
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"  # on its machine; the others wait for it in `main`
    if is_first and ("WORLD_SIZE" not in os.environ or len(sys.argv) > 2):
        ArgumentParser().exit(2, f"run it with torchrun --nproc-per-node 2 {__file__} [FILE]\n")
    fits = [number for number in range(1, BATCH + 1) if BATCH % number == 0]
    if is_first and int(os.environ["WORLD_SIZE"]) not in fits:
        ArgumentParser().exit(2, f"{os.environ['WORLD_SIZE']} ranks don't divide {BATCH=}; {fits} do\n")
    num_gpus = torch.cuda.device_count()
    if is_first and 0 < num_gpus < int(os.environ["LOCAL_WORLD_SIZE"]):
        ArgumentParser().exit(2, f"GPUs on {os.uname().nodename}: only {num_gpus}; start one rank per GPU\n")
    if is_first and num_gpus == 0:
        print("no GPU visible: running on the CPU", flush=True)
    if num_gpus == 0:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % num_gpus)
    torch.cuda.set_device(device)
    return device


def main(device: torch.device, file: str | None = None) -> None:
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    torch.manual_seed(0)  # for the weights that rank 0 draws
    mesh = dist.init_device_mesh(device.type, (world_size,))  # all ranks, on the device chosen above
    with torch.device("meta"):
        model = ViT()  # shapes without bytes
    for block in model.blocks:
        fully_shard(block, mesh=mesh)  # shards, still without bytes
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)  # allocates this rank's shards; if your model has buffers, fill them here
    values = first_values(file) if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)  # sent tensor by tensor
    set_model_state_dict(model, values, options=options)
    # After sharding, so that it holds the shards. fused=True is faster; on CUDA, 4 bytes/parameter leaner.
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)

    for step in range(STEPS):
        images, labels = load_batch(step)
        images = images.chunk(world_size)[rank].to(device)  # this rank's images
        labels = labels.chunk(world_size)[rank].to(device)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        mean_loss = loss.detach() / world_size
        dist.all_reduce(mean_loss)
        if rank == 0:
            print(f"step {step + 1}  loss {mean_loss.item():.7f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    chosen = choose_device()
    main(chosen, *sys.argv[1:2])
    if chosen.type == "cpu":
        os._exit(0)  # a leftover gloo thread can abort Python's cleanup; this skips it, `atexit` included
