"""DDP: every rank has the full model and its own share of the batch, and gradients are averaged.

Run it with `torchrun --nproc-per-node 2 ddp.py`. It uses GPUs, or the CPU if there are none.
"""

import os
from argparse import ArgumentParser

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

LAYERS = 4
WIDTH = 64
CLASSES = 10
STEPS = 6
BATCH = 24  # sequences per step, across all ranks, whose number has to divide it
LENGTH = 16  # tokens per sequence


def build_model() -> nn.Sequential:
    """Return a model that maps (B, LENGTH, WIDTH) to (B, LENGTH, CLASSES). Put your own here."""
    model = nn.Sequential()
    for _ in range(LAYERS):
        model.append(nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True))
    model.append(nn.Linear(WIDTH, CLASSES))
    return model


def load_batch(step: int) -> tuple[Tensor, Tensor]:
    """Return inputs (BATCH, LENGTH, WIDTH) and labels, which the ranks split. Put your own data here."""
    random = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, LENGTH, WIDTH, generator=random)
    labels = inputs[..., :CLASSES].argmax(dim=-1)  # (BATCH, LENGTH)
    return inputs, labels


def choose_device() -> torch.device:
    """Return this rank's own GPU, or the CPU if none is visible. Exit (status 2) if the ranks don't fit."""
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"  # on its machine; the others wait for it in `main`
    if "WORLD_SIZE" not in os.environ:
        ArgumentParser().exit(2, f"run it with torchrun --nproc-per-node 2 {__file__}\n")
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


def main(device: torch.device) -> None:
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    torch.manual_seed(0)  # every rank starts with the same weights
    model = DistributedDataParallel(build_model().to(device))
    # Every rank takes the same step. fused=True is faster; on CUDA, 4 bytes/parameter leaner.
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)

    for step in range(STEPS):
        inputs, labels = load_batch(step)
        inputs = inputs.chunk(world_size)[rank].to(device)  # this rank's sequences
        labels = labels.chunk(world_size)[rank].to(device)
        outputs = model(inputs)
        loss = nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())
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
    main(chosen)
    if chosen.type == "cpu":
        os._exit(0)  # a leftover gloo thread can abort Python's cleanup; this skips it, `atexit` included
