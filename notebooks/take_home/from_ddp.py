"""Move from DDP to FSDP2 mid-training, with the weights, Adam's state and the schedule from a DDP checkpoint.

`torchrun --nproc-per-node 2 from_ddp.py FILE` takes the remaining steps under FSDP2. The DDP job saves FILE:

    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        state["step"] = step + 1  # steps taken; add a schedule's state_dict() as state["schedule"]
        torch.save(state, "FILE")
"""

import os
import sys
from argparse import ArgumentParser

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim import Adam
from torch.optim.lr_scheduler import LambdaLR

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
    if is_first and ("WORLD_SIZE" not in os.environ or len(sys.argv) != 2):
        ArgumentParser().exit(2, f"run it with torchrun --nproc-per-node 2 {__file__} FILE\n")
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


def make_optimizer(model: nn.Module) -> Adam:
    """Return the optimizer, with the DDP script's parameter groups in the same order. Put your own here."""
    return Adam(model.parameters(), lr=3e-3, fused=True)


def make_schedule(adam: Adam) -> LambdaLR:
    """Return the learning-rate schedule: constant, as in ddp.py. Put your own here."""
    return LambdaLR(adam, lambda step: 1.0)


def read_ddp_checkpoint(path: str) -> tuple[dict, dict, dict]:
    """Return the weights and Adam's state, by name, and the step and schedule. Only rank 0 calls this."""
    checkpoint = torch.load(path, mmap=True, map_location="cpu", weights_only=True)
    plain = build_model()
    weights = {}
    for name, value in checkpoint["model"].items():
        name = name.replace("_orig_mod.", "")  # added by torch.compile
        weights[name.removeprefix("module.")] = value  # added by DDP
    for name, parameter in plain.named_parameters():
        if parameter.shape == (1,) and name in weights:
            weights[name] = weights[name].reshape(1)  # it was a scalar, which `fully_shard` doesn't accept
    plain.load_state_dict(weights)
    # The file has Adam's state by number. A plain model and a plain Adam know each number's name.
    plain_adam = make_optimizer(plain)
    plain_adam.load_state_dict(checkpoint["optimizer"])
    for parameter, moments in plain_adam.state.items():
        for key in moments.keys() - {"step"}:
            moments[key] = moments[key].view_as(parameter)
    rest = {"step": checkpoint["step"], "schedule": checkpoint.get("schedule"), "without_moments": []}
    for name, parameter in plain.named_parameters():
        if parameter not in plain_adam.state:
            rest["without_moments"].append(name)
    weights, moments = state_dict.get_state_dict(plain, plain_adam)
    return weights, moments, rest


def load_ddp_checkpoint(path: str, model: nn.Module, adam: Adam, schedule: LambdaLR) -> int:
    """Read the file on rank 0 and send each rank its shards. Return the number of steps already taken.

    Create `schedule` first: it adds `initial_lr` to each rank's parameter groups, and loading sets its value.
    """
    weights = {}
    moments = {}
    rest = [None]
    if dist.get_rank() == 0:
        weights, moments, rest[0] = read_ddp_checkpoint(path)
    dist.broadcast_object_list(rest)
    # Two calls: `set_state_dict` would skip the model on the ranks that have nothing to send, and hang.
    options = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state_dict.set_model_state_dict(model, weights, options=options)
    options.strict = False  # parameters that have had no gradient yet have no moments
    state_dict.set_optimizer_state_dict(model, adam, moments, options=options)
    parameters = dict(model.named_parameters())
    for name in rest[0]["without_moments"]:
        adam.state.pop(parameters[name], None)  # torch gave it zeros that already count as one step
    if rest[0]["schedule"] is not None:
        schedule.load_state_dict(rest[0]["schedule"])
    return rest[0]["step"]


def main(device: torch.device, path: str | None = None) -> None:
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    torch.manual_seed(0)  # every rank starts with the same weights
    mesh = dist.init_device_mesh(device.type, (world_size,))  # all ranks, on the device chosen above
    model = build_model()  # on the host: `fully_shard` moves one unit at a time to the mesh's device
    for layer in model[:-1]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    adam = make_optimizer(model)  # after sharding, so that it holds the shards
    schedule = make_schedule(adam)  # after the optimizer, before the load
    first_step = load_ddp_checkpoint(path, model, adam, schedule)  # from here on, save as checkpoint.py does

    for step in range(first_step, STEPS):
        inputs, labels = load_batch(step)
        inputs = inputs.chunk(world_size)[rank].to(device)  # this rank's sequences
        labels = labels.chunk(world_size)[rank].to(device)
        outputs = model(inputs)
        loss = nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
        schedule.step()

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
