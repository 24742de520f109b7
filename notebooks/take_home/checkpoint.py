"""Save every few steps, so that a run killed at any moment can continue from its newest checkpoint.

`torchrun --nproc-per-node 3 checkpoint.py FOLDER 3` takes 3 steps on three ranks. Run it again
with 2 ranks and 6 steps, and two ranks continue from there up to step 6. To let torchrun restart the ranks
(`--max-restarts 3`), set the environment variable TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
"""

import ctypes
import os
import shutil
import signal
import sys
from argparse import ArgumentParser
from pathlib import Path

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, load, save, state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim import Adam
from torch.optim.lr_scheduler import CosineAnnealingLR

LAYERS = 4
WIDTH = 64
CLASSES = 10
BATCH = 24  # sequences per step, across all ranks, whose number has to divide it
LENGTH = 16  # tokens per sequence
SAVE_EVERY = 5  # steps between two saves; a kill loses at most this many


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
    if "WORLD_SIZE" not in os.environ or len(sys.argv) != 3 or not sys.argv[2].isdigit():
        if not is_first:
            signal.pause()  # torchrun ends this rank once the first one has exited
        ArgumentParser().exit(2, f"run it with torchrun --nproc-per-node 2 {__file__} FOLDER STEPS\n")
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


def end_with_torchrun() -> None:
    """Have Linux kill this rank if torchrun is killed; otherwise it could overlap with the next run."""
    if sys.platform == "linux":
        torchrun = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
        if os.getppid() != torchrun:
            sys.exit("torchrun was killed")  # it died before the call above


def take(lock: FileLock, folder: Path) -> None:
    """Keep other runs from writing to `folder` until this process ends. Exit if another run has the lock."""
    try:
        lock.acquire(timeout=2)
    except Timeout:
        sys.exit(f"another run is writing to {folder}; wait until it ends, or choose another folder")


def state_to_keep(model: nn.Module, adam: Adam, schedule: CosineAnnealingLR, step: int) -> dict:
    model_state, adam_state = state_dict.get_state_dict(model, adam)  # shards, by their plain names
    return {"model": model_state, "adam": adam_state, "schedule": schedule.state_dict(), "step": step}


def save_checkpoint(folder: Path, state: dict) -> None:
    """Replace the checkpoint in `folder`. Only a complete checkpoint has a number for its name."""
    rank = dist.get_rank()
    unfinished = folder / f"unfinished-{state['step']:06}"  # or a cached entry might lead into an older save
    if rank == 0:
        for leftover in folder.glob("unfinished*"):
            shutil.rmtree(leftover)  # from a killed run; its files could become part of this save
    dist.barrier()  # rank 0 has to remove the old folder before any rank creates a new one
    save(state, checkpoint_id=unfinished)  # returns once all ranks have written their shards
    if rank == 0:
        older = list(folder.glob("[0-9]*"))
        unfinished.rename(folder / f"{state['step']:06}")  # atomic, so a kill can't leave half of it
        for checkpoint in older:
            shutil.rmtree(checkpoint)


def load_newest(folder: Path, model: nn.Module, adam: Adam, schedule: CosineAnnealingLR) -> int:
    """Load the newest checkpoint, if there is one. Return the number of steps already taken."""
    newest = [max(folder.glob("[0-9]*"), key=lambda checkpoint: int(checkpoint.name), default=None)]
    dist.broadcast_object_list(newest)  # rank 0's answer; NFS may show another node an older listing
    if newest[0] is None:
        return 0
    state = state_to_keep(model, adam, schedule, step=0)  # this rank's shards, which `load` then fills
    saved = FileSystemReader(newest[0]).read_metadata().state_dict_metadata
    for name in list(state["adam"]["state"]):
        if f"adam.state.{name}.step" not in saved:
            del state["adam"]["state"][name]  # no gradient yet; Adam's state starts with the first one
    load(state, checkpoint_id=newest[0])  # fails if anything else is missing
    options = state_dict.StateDictOptions(strict=False)  # not every parameter has moments
    state_dict.set_state_dict(
        model, adam, model_state_dict=state["model"], optim_state_dict=state["adam"], options=options
    )
    schedule.load_state_dict(state["schedule"])
    return state["step"]


def main(device: torch.device, folder: Path, last_step: int) -> None:
    lock = FileLock(folder / ".lock")
    if os.environ["RANK"] == "0":
        folder.mkdir(parents=True, exist_ok=True)
        take(lock, folder)  # before the next line, where the other ranks wait for rank 0
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    torch.manual_seed(0)  # every rank starts with the same weights
    mesh = dist.init_device_mesh(device.type, (world_size,))  # all ranks, on the device chosen above
    model = build_model()  # on the host: `fully_shard` moves one unit at a time to the mesh's device
    for layer in model[:-1]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # After sharding, so that it holds the shards. fused=True is faster; on CUDA, 4 bytes/parameter leaner.
    adam = Adam(model.parameters(), lr=3e-3, fused=True)
    schedule = CosineAnnealingLR(adam, T_max=20)

    first_step = load_newest(folder, model, adam, schedule)
    signals = []  # SIGTERM comes before the time limit; we note it here and complete the step first
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    for step in range(first_step, last_step):
        inputs, labels = load_batch(step)
        inputs = inputs.chunk(world_size)[rank].to(device)  # this rank's sequences
        labels = labels.chunk(world_size)[rank].to(device)
        outputs = model(inputs)
        loss = nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
        schedule.step()

        sums = torch.tensor([loss.item() / world_size, len(signals)])
        dist.all_reduce(sums)  # if any rank got the signal, all of them stop after the same step
        if rank == 0:
            print(f"step {step + 1}  loss {sums[0]:.7f}", flush=True)
        is_last = step + 1 == last_step or sums[1] > 0
        if is_last or (step + 1) % SAVE_EVERY == 0:
            save_checkpoint(folder, state_to_keep(model, adam, schedule, step + 1))
        if is_last:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    end_with_torchrun()
    chosen = choose_device()
    main(chosen, Path(sys.argv[1]), int(sys.argv[2]))
    if chosen.type == "cpu":
        os._exit(0)  # a leftover gloo thread can abort Python's cleanup; this skips it, `atexit` included
