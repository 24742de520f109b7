"""Workers that save, load, and die on purpose. As in workers_for_tests.py, only what a rank has loaded anyway."""

import os
import resource
import signal
import sys
import tempfile
import threading

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fsdp_helpers.checkpointing import resume as saving
from fsdp_helpers.checkpointing import state as checkpoint
from fsdp_helpers.models import build_model
from fsdp_helpers.ranks.exchange import gather_over_ranks
from fsdp_helpers.ranks.group import rank_device
from fsdp_helpers.sharding.strategies import STRATEGIES
from fsdp_helpers.training import loop as training
from fsdp_helpers.training.worker import train_worker

# ---------------------------------------------------------------- saving and loading


def build(config, seed):
    """A model under the strategy of `config`, and its optimiser."""
    torch.manual_seed(seed)
    model = STRATEGIES[config.strategy](build_model(config.model), rank_device(), config)
    return model, torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)


def train_steps(model, optimizer, count):
    """Steps on noise: enough for moments that are not zero."""
    for _ in range(count):
        training.train_step(model, torch.randn(4, 1, 28, 28), torch.randint(10, (4,)), optimizer)


def whole_state(model, optimizer):
    """Every tensor of the state, gathered on rank 0 under a flat name; nothing on the other ranks."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {f"model.{name}": tensor for name, tensor in model_state.items()}
    for name, values in optimizer_state["state"].items():
        state |= {f"optimizer.{name}.{kind}": tensor for kind, tensor in values.items()}
    whole = {name: gather(tensor) for name, tensor in state.items()}
    return whole if not dist.is_initialized() or dist.get_rank() == 0 else {}


def whole_parameters(model):
    """Those of the state's tensors that a fresh model has."""
    whole = {f"model.{name}": gather(tensor) for name, tensor in get_model_state_dict(model).items()}
    return whole if not dist.is_initialized() or dist.get_rank() == 0 else {}


def gather(tensor):
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()


def differences(found, expected):
    """The names of what is not the same to the last bit, on either side."""
    names = found.keys() | expected.keys()
    return sorted(n for n in names if n not in found or n not in expected or not same(found[n], expected[n]))


def same(found, expected):
    return found.dtype == expected.dtype and torch.equal(found, expected)


def save_under_each(rank, world_size, folder, configs):
    """For each name and its config: train a little, save in both ways, and note the whole state in NAME.expected."""
    for name, config in configs.items():
        model, optimizer = build(config, seed=1)
        torch.manual_seed(10 + rank)
        train_steps(model, optimizer, 3)
        checkpoint.save_sharded(folder / name, model, optimizer, extra={f"of-rank-{rank}": torch.tensor([rank, 7])})
        checkpoint.save_full(folder / f"{name}.pt", model, optimizer)
        expected = whole_state(model, optimizer)
        if rank == 0:
            torch.save(expected, folder / f"{name}.expected")


def load_each(rank, world_size, folder, names, config, full=False):
    """For each saved name: parameters that differ from the saved ones before the load, what differs after (rank 0)."""
    found = {}
    for name in names:
        expected = torch.load(folder / f"{name}.expected", weights_only=True)
        model, optimizer = build(config, seed=2)
        parameters = {name: kept for name, kept in expected.items() if name.startswith("model.")}
        before = differences(whole_parameters(model), parameters)
        if full:
            checkpoint.load_full(folder / f"{name}.pt", model, optimizer)
        else:
            checkpoint.load_sharded(folder / name, model, optimizer)
        found[name] = before, differences(whole_state(model, optimizer), expected)
    return found


def load_extra(rank, world_size, folder, config):
    values = torch.zeros(2, dtype=torch.int64)
    checkpoint.load_sharded(folder, *build(config, seed=2), extra={f"of-rank-{rank}": values})
    return values.tolist()


def load_then_train(rank, world_size, folder, config, learning_rate):
    """The learning rate after a load into an optimiser that has another one than the optimiser which was saved."""
    model, optimizer = build(config, seed=2)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    checkpoint.load_sharded(folder, model, optimizer)
    train_steps(model, optimizer, 1)
    return [group["lr"] for group in optimizer.param_groups]


def save_while_training(rank, world_size, folder, configs):
    """For each name: how the file differs from the state at the call, and how the state after training does (rank 0).

    Nothing is written before the steps that follow the call are done.
    """
    write_data, trained = dcp.FileSystemWriter.write_data, threading.Event()

    def write_later(*args):
        if not trained.wait(30):
            raise TimeoutError("training waits for the file")
        return write_data(*args)

    dcp.FileSystemWriter.write_data = write_later
    group, found = dist.new_group(backend="gloo"), {}
    for name, config in configs.items():
        model, optimizer = build(config, seed=1)
        torch.manual_seed(10 + rank)
        train_steps(model, optimizer, 2)
        at_the_call = whole_state(model, optimizer)
        trained.clear()
        future = checkpoint.save_sharded_async(folder / name, model, optimizer, group)
        train_steps(model, optimizer, 3)
        trained.set()
        future.result()
        trained_on = differences(whole_state(model, optimizer), at_the_call)
        model, optimizer = build(config, seed=2)
        checkpoint.load_sharded(folder / name, model, optimizer)
        found[name] = trained_on, differences(whole_state(model, optimizer), at_the_call)
    return found


def random_state_after_resuming(rank, world_size, config):
    """The state of the random number generator once the newest checkpoint is loaded."""
    model, optimizer = build(config, seed=2)
    with saving.run_checkpoints(config, rank, world_size, "digits") as checkpoints:
        checkpoints.load(model, optimizer)
    return torch.get_rng_state().numpy().tobytes()


def save_slices(rank, world_size, folder, num_tensors, num_rows, num_columns):
    """A checkpoint of parameters called layer0, layer1 and so on, filled with their number, cut along their rows."""
    mesh = init_device_mesh("cpu", (world_size,))
    tensors = {
        f"layer{number}": DTensor.from_local(
            torch.full((num_rows // world_size, num_columns), float(number)), mesh, [Shard(0)]
        )
        for number in range(num_tensors)
    }
    dcp.save({"model": tensors}, storage_writer=dcp.FileSystemWriter(folder))


# ---------------------------------------------------------------- dying


def train_and_die(rank, world_size, config, victim, moment, everyone, diary):
    """`train_worker`, with a kill -9 of rank `victim`, or of all ranks, at its `moment`-th moment; None only counts.

    A moment is just before or after a step or an fsync, or just before whatever is done with a file or a folder of the
    checkpoints. `diary` gets a byte for every step done. Returns how many moments this rank had.
    """
    tempfile.tempdir = str(diary.parent)  # whoever is killed leaves its temporary files behind
    pids = gather_over_ranks(os.getpid())
    others = [pid for pid in pids if pid != os.getpid()] if everyone else []
    moments = 0

    def pass_a_moment():
        nonlocal moments
        moments += 1
        if rank == victim and moments == moment:
            for pid in [*others, os.getpid()]:
                os.kill(pid, signal.SIGKILL)

    def hook(event, args):
        # rmtree names what it removes relative to an open folder, so a removal counts whatever its name is.
        if event in ("os.remove", "os.rmdir") or (event.startswith(("open", "os.", "shutil.")) and concerns(args)):
            pass_a_moment()

    def concerns(args):
        return any(isinstance(arg, str | os.PathLike) and str(arg).startswith(config.checkpoint_dir) for arg in args)

    def train_step(*args, step=training.train_step, **settings):
        pass_a_moment()
        loss = step(*args, **settings)
        if rank == 0:
            with open(diary, "ab") as file:
                file.write(b".")
        pass_a_moment()
        return loss

    def fsync(descriptor, sync=os.fsync):
        pass_a_moment()
        sync(descriptor)
        pass_a_moment()

    training.train_step, os.fsync = train_step, fsync
    sys.addaudithook(hook)
    train_worker(rank, world_size, config)
    return moments


def train_on_a_full_disk(rank, world_size, config, full_on, save, part):
    """`train_worker`; from the `save`-th saving on, rank `full_on` cannot write its "slices", or the "description"."""
    saves = 0

    def save_sharded(*args, save_sharded=saving.save_sharded, **kwargs):
        nonlocal saves
        saves += 1
        is_full = saves == save and rank == full_on
        if is_full and part == "slices":
            let_files_grow_to(20_000)  # a slice of SimpleCNN's state is larger: 12 x 50,186 / 2 = 301,116 bytes
        save_sharded(*args, **kwargs)
        if is_full and part == "description":
            let_files_grow_to(100)

    saving.save_sharded = save_sharded
    return train_worker(rank, world_size, config)


def let_files_grow_to(size):
    """Writing beyond fails as on a full disk, with an OSError: Python ignores the signal that comes with it."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
