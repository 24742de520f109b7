"""FSDP2 with bf16, activation checkpointing, micro-batches and clipping.

Run it with `torchrun --nproc-per-node 2 levers.py`. It uses GPUs, or the CPU if there are none.
"""

import os
from argparse import ArgumentParser

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

LAYERS = 4
WIDTH = 64
CLASSES = 10
STEPS = 6
BATCH = 24  # sequences per step, across all ranks, whose number has to divide it
LENGTH = 16  # tokens per sequence
PARTS = 2  # micro-batches per step; a rank's share of BATCH is a multiple of it
MAX_NORM = 1.0  # a longer gradient is scaled down to this norm


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
    fits = [number for number in range(1, BATCH + 1) if BATCH % (number * PARTS) == 0]
    if is_first and int(os.environ["WORLD_SIZE"]) not in fits:
        ArgumentParser().exit(2, f"{os.environ['WORLD_SIZE']} ranks x PARTS don't divide BATCH; {fits} do\n")
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
    mesh = dist.init_device_mesh(device.type, (world_size,))  # all ranks, on the device chosen above
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)  # shards stay fp32
    model = build_model()  # on the host: `fully_shard` moves one unit at a time to the mesh's device
    for index, layer in enumerate(model[:-1]):
        recomputed = checkpoint_wrapper(layer)  # before sharding, by convention; the wrapper becomes the unit
        model[index] = fully_shard(recomputed, mesh=mesh, mp_policy=bf16)
    fully_shard(model, mesh=mesh, mp_policy=bf16)
    # After sharding, so that it holds the shards. fused=True is faster; on CUDA, 4 bytes/parameter leaner.
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)

    for step in range(STEPS):
        inputs, labels = load_batch(step)
        inputs = inputs.chunk(world_size)[rank].to(device).chunk(PARTS)  # this rank's micro-batches
        labels = labels.chunk(world_size)[rank].to(device).chunk(PARTS)
        mean_loss = torch.zeros((), device=device)
        optimizer.zero_grad()
        for index in range(PARTS):
            is_last = index == PARTS - 1
            model.set_requires_gradient_sync(is_last)  # the last backward reduces the sum
            outputs = model(inputs[index]).float()  # compute the loss in fp32
            loss = nn.functional.cross_entropy(outputs.flatten(0, 1), labels[index].flatten()) / PARTS
            loss.backward()
            mean_loss += loss.detach() / world_size
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        norm = norm.full_tensor()  # from a DTensor to the norm over all shards, the same on every rank
        optimizer.step()

        dist.all_reduce(mean_loss)
        if rank == 0:
            print(f"step {step + 1}  loss {mean_loss.item():.7f}  norm {norm.item():.5f}", flush=True)
    if device.type == "cuda" and rank == 0:
        print(f"peak of the tensors: {torch.cuda.max_memory_allocated() / 1e6:.1f} MB", flush=True)
        print(f"peak reserved by the allocator: {torch.cuda.max_memory_reserved() / 1e6:.1f} MB", flush=True)
        print(f"allocations retried: {torch.cuda.memory_stats()['num_alloc_retries']}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    chosen = choose_device()
    main(chosen)
    if chosen.type == "cpu":
        os._exit(0)  # a leftover gloo thread can abort Python's cleanup; this skips it, `atexit` included
