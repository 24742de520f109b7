"""Workers that save, load, and die on purpose. As in workers_for_tests.py, only what a rank has loaded anyway."""

import os
import resource
import signal
import sys
import tempfile
import threading
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_helpers.checkpointing import checkpoint
from fsdp_helpers.checkpointing.checkpoint import load, save
from fsdp_helpers.checkpointing.folder import CheckpointError
from fsdp_helpers.checkpointing.resume import Stopped, catching_sigterm, run_checkpoints
from fsdp_helpers.checkpointing.shard_index import read_index
from fsdp_helpers.checkpointing.training_state import save_full
from fsdp_helpers.models.series import build_model
from fsdp_helpers.ranks.group import gather_over_ranks, rank_device
from fsdp_helpers.sharding.strategies import APPLY_STRATEGY
from fsdp_helpers.teaching.lessons import saving_and_resuming
from fsdp_helpers.training import loop as training
from fsdp_helpers.training.worker import load_rank_data, train_worker

# ---------------------------------------------------------------- saving and loading


def build(config, seed):
    """A model under the strategy of `config`, and its optimizer."""
    torch.manual_seed(seed)
    model = APPLY_STRATEGY[config.strategy](build_model(config.model), rank_device(), config)
    return model, torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)


def train_steps(model, optimizer, count):
    """Steps on noise: enough for moments that are not zero."""
    for _ in range(count):
        training.train_step(model, torch.randn(4, 1, 28, 28), torch.randint(10, (4,)), optimizer)


def save_beside_leftovers(rank, world_size, folder):
    """Whether a rank finds what a killed process left when it begins to write; rank 0 removes it slowly."""
    found, remove, write = [], checkpoint.shutil.rmtree, checkpoint.dcp.save

    def remove_slowly(path, **settings):
        time.sleep(0.3)
        remove(path, **settings)

    def look_and_write(tensors, storage_writer):
        found.append((storage_writer.path / "left").exists())
        return write(tensors, storage_writer=storage_writer)

    checkpoint.shutil.rmtree, checkpoint.dcp.save = remove_slowly, look_and_write
    save(folder, nn.Linear(2, 2))
    return found


def whole_state(model, optimizer):
    """Every tensor of the state, gathered on rank 0 under a flat name; nothing on the other ranks."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {f"model.{name}": tensor for name, tensor in model_state.items()}
    for name, values in optimizer_state["state"].items():
        state |= {f"optimizer.{name}.{kind}": tensor for kind, tensor in values.items()}
    whole = {name: gather(tensor) for name, tensor in state.items()}
    return whole if not dist.is_initialized() or dist.get_rank() == 0 else {}


def gather(tensor):
    if isinstance(tensor, ShardedTensor):  # of FSDP1 without a mesh
        whole = torch.empty(tensor.size(), dtype=tensor.dtype) if dist.get_rank() == 0 else None
        tensor.gather(out=whole)
        return whole
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()


def differences(found, expected):
    """The names of what is not the same to the last bit, on either side."""
    names = found.keys() | expected.keys()
    return sorted(n for n in names if n not in found or n not in expected or not same(found[n], expected[n]))


def same(found, expected):
    return found.dtype == expected.dtype and torch.equal(found, expected)


def groups_of_a_background_save(rank, world_size, folder):
    """For the save and for each exchange in its thread: whether it is in the group that was given for it."""
    group, seen = dist.new_group(backend="gloo"), []
    gather, write = dist.all_gather_object, checkpoint.dcp.async_save

    def note_and_gather(*args, group=None):
        if threading.current_thread() is not threading.main_thread():
            seen.append(group)
        return gather(*args, group=group)

    def note_and_write(*args, process_group=None, **settings):
        seen.append(process_group)
        return write(*args, process_group=process_group, **settings)

    dist.all_gather_object, checkpoint.dcp.async_save = note_and_gather, note_and_write
    save(folder, nn.Linear(2, 2), wait=False, group=group).result()
    return [used is group for used in seen]


# ---------------------------------------------------------------- loops of other people


def small_model(hidden=6):
    """Linear layers, a normalization with buffers, and dropout."""
    layers = [nn.Linear(4, hidden), nn.BatchNorm1d(hidden), nn.Dropout(), nn.ReLU(), nn.Linear(hidden, 3)]
    return nn.Sequential(*layers)


def noise_step(model, optimizer):
    """A step on noise, drawn from the generator that dropout draws from."""
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


class CountingSGD(torch.optim.Optimizer):
    """Its state holds a number of Python and a tensor; each step is smaller than the one before."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    state["last"] = parameter.grad.clone()
                    parameter -= group["lr"] / state["count"] * parameter.grad


def wrapped(name, seed):
    """The small model as other people wrap it, its optimizer and a schedule that halves the learning rate."""
    torch.manual_seed(seed)
    model = small_model()
    shape = (2, dist.get_world_size() // 2) if "hybrid" in name else (dist.get_world_size(),)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = None if "mesh" in name else init_device_mesh("cpu", shape, mesh_dim_names=names)
    if name == "ddp":
        model = DistributedDataParallel(model)
    elif name.startswith("fsdp2"):
        policy = CPUOffloadPolicy(pin_memory=False) if "offload" in name else OffloadPolicy()
        fully_shard(model[0], mesh=mesh, offload_policy=policy)
        fully_shard(model, mesh=mesh, offload_policy=policy)
    else:
        strategy = ShardingStrategy.HYBRID_SHARD if "hybrid" in name else ShardingStrategy.FULL_SHARD
        settings = {"device_id": torch.device("cpu"), "device_mesh": mesh, "sharding_strategy": strategy}
        with warnings.catch_warnings(action="ignore"):  # on one rank it shards nothing, and says so
            model = FullyShardedDataParallel(model, use_orig_params=name != "fsdp1 flat", **settings)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def scheduled_steps(model, optimizer, schedule, count):
    """For each step the loss of this rank and the learning rate after it."""
    found = []
    for _ in range(count):
        loss = noise_step(model, optimizer).item()
        schedule.step()
        found.append((loss, *schedule.get_last_lr()))
    return found


def save_and_go_on(rank, world_size, folder, names):
    """For each strategy: two steps, a save, two steps more; and the last two again, from the save."""
    found = {}
    for name in names:
        model, optimizer, schedule = wrapped(name, seed=1)
        torch.manual_seed(10 + rank)
        scheduled_steps(model, optimizer, schedule, 2)
        extra = {"schedule": schedule.state_dict(), "step": 2, "mine": torch.tensor(rank)}
        save(folder / name, model, optimizer, extra=extra)
        save_full(folder / f"{name}.pt", model, optimizer)
        expected = whole_state(model, optimizer)
        if rank == 0:
            torch.save(expected, folder / f"{name}.expected")
        undisturbed = scheduled_steps(model, optimizer, schedule, 2)

        model, optimizer, schedule = wrapped(name, seed=2)
        extra = load(folder / name, model, optimizer)
        assert (extra["mine"].item(), extra["step"]) == (0, 2)
        schedule.load_state_dict(extra["schedule"])
        found[name] = undisturbed, scheduled_steps(model, optimizer, schedule, 2)
    try:
        save(folder / "none", model, optimizer, wait=False)
    except ValueError as error:
        found["without a group"] = str(error)
    try:
        save(folder / "none", model, optimizer, extra={"shard": next(model.parameters())})  # of FSDP2, the last one
    except ValueError as error:
        found["a shard as extra"] = str(error)
    return found


def save_while_training(rank, world_size, folder, names):
    """For each strategy: whether training has changed all of the state, and how what was saved differs from the call's.

    Nothing is written before the steps that follow the call are done. (Of rank 0; the others have no whole state.)
    """
    write_data, trained = dcp.FileSystemWriter.write_data, threading.Event()

    def write_later(*args):
        if not trained.wait(30):
            raise TimeoutError("training waits for the file")
        return write_data(*args)

    dcp.FileSystemWriter.write_data = write_later
    group, found = dist.new_group(backend="gloo"), {}
    for name in names:
        model, optimizer, schedule = wrapped(name, seed=1)
        scheduled_steps(model, optimizer, schedule, 2)
        at_the_call = whole_state(model, optimizer)
        trained.clear()
        future = save(folder / name, model, optimizer, extra={"steps": [2]}, wait=False, group=group)
        scheduled_steps(model, optimizer, schedule, 3)
        trained.set()
        future.result()
        trained_on = differences(whole_state(model, optimizer), at_the_call)
        model, optimizer, _ = wrapped(name, seed=2)
        assert load(folder / name, model, optimizer) == {"steps": [2]}
        found[name] = len(trained_on) == len(at_the_call), differences(whole_state(model, optimizer), at_the_call)
    return found


def run_a_loop(rank, world_size, folder, code, last_steps):
    """Start `code` once for each last step, each time with another model; the steps taken, and the state at each end."""
    os.chdir(folder)
    found = []
    for number, last_step in enumerate(last_steps):
        steps = []
        names = dict(zip(("model", "optimizer", "schedule"), wrapped("fsdp2", seed=number), strict=True))
        names |= {"last_step": last_step, "train_step": lambda *run, done=steps: done.extend(scheduled_steps(*run, 1))}
        exec(code, names)
        found.append((len(steps), names["schedule"].last_epoch, whole_state(names["model"], names["optimizer"])))
    return found


def load_with_a_late_folder(rank, world_size, folder):
    """What is loaded, and named as the newest, where rank 1 does not see the newest checkpoint yet; and none."""
    find = checkpoint.find_newest
    checkpoint.find_newest = lambda path: path / "step-00000001" if rank == 1 and find(path) else find(path)
    return (
        load(folder, small_model()),
        checkpoint.newest_checkpoint(folder),
        checkpoint.newest_checkpoint(folder / "none"),
    )


def load_crosswise(rank, world_size, folder, savers, loaders):
    """For each saved name and each strategy: what differs after the load, the learning rate, and the counter."""
    found = {}
    for saver in savers:
        expected = torch.load(folder / f"{saver}.expected", weights_only=True)
        for loader in loaders:
            model, optimizer, _ = wrapped(loader, seed=3)
            extra = load(folder / saver, model, optimizer)
            differing = differences(whole_state(model, optimizer), expected) if rank == 0 else None
            if rank > 0:
                whole_state(model, optimizer)  # gathering takes all
            found[saver, loader] = differing, optimizer.param_groups[0]["lr"], extra["step"]
    return found


# ---------------------------------------------------------------- wrappers in any order, and tied parameters

RECOMPUTED_AND_COMPILED = {
    "recompute a compiled block": lambda block: checkpoint_wrapper(torch.compile(block, backend="eager")),
    "compile a recomputed block": lambda block: torch.compile(checkpoint_wrapper(block), backend="eager"),
}


def blocks(wrap, api, seed):
    """Two blocks with a buffer each, wrapped, under `api`; and their optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    for number, block in enumerate(model):
        block.register_buffer("kept", torch.randn(3))
        model[number] = wrap(block)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if api == "fsdp2":
        fully_shard([*model, model], mesh=mesh)
    elif api == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), device_mesh=mesh, use_orig_params=True)
    elif api == "compiled ddp":
        model = torch.compile(DistributedDataParallel(model), backend="eager")
    return model, torch.optim.Adam(model.parameters())


def save_and_load_wrapped(rank, world_size, folder):
    """For each order of wrappers and API: the names on disk, and what differs after a load with and without them."""
    found = {}
    plain = blocks(lambda block: block, None, seed=0)[0]
    for order, wrap in RECOMPUTED_AND_COMPILED.items():
        for api in (None, "fsdp1", "fsdp2", "compiled ddp"):
            path = folder / f"{order} {api}"
            model, optimizer = blocks(wrap, api, seed=1)
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            for buffer in model.buffers():
                buffer.add_(rank)  # only rank 0's are saved
            save(path, model, optimizer)
            save_full(f"{path}.pt", model, optimizer)
            whole = {entry.name for entry in read_index(path)}, torch.load(f"{path}.pt") if rank == 0 else None
            again = blocks(wrap, api, seed=2)
            load(path, *again)
            again[0](torch.ones(2, 4)).square().mean().backward()
            again[1].step()  # the second one
            load(path, *again)
            expected, loaded = whole_state(model, optimizer), whole_state(*again)
            load(path, plain)
            found[order, api] = *whole, differences(loaded, expected), plain.state_dict()
    return found


class TwoEnds(nn.Module):
    """An embedding and a head, which may be one tensor."""

    def __init__(self, tied):
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def load_ties(rank, world_size, folder):
    """By strategy, and whether the saved and the loading model are tied: the error, or the two ends after the load."""
    found, mesh = {}, init_device_mesh("cpu", (world_size,))
    cpu = torch.device("cpu")
    ways = {
        "plain": lambda model: model,
        "ddp": DistributedDataParallel,
        "fsdp1": lambda model: FullyShardedDataParallel(model, device_id=cpu, use_orig_params=True),
        "fsdp2": lambda model: fully_shard(model, mesh=mesh),
    }
    for name, way in ways.items():
        for saved in (False, True):
            torch.manual_seed(1)
            save(folder / f"{name} {saved}", way(TwoEnds(saved)))
            for loading in (False, True):
                torch.manual_seed(2)
                model = way(TwoEnds(loading))
                try:
                    load(folder / f"{name} {saved}", model)
                    ends = [gather(tensor) for tensor in get_model_state_dict(model).values()]
                    found[name, saved, loading] = None if ends[0] is None else torch.equal(*ends)
                except CheckpointError as error:
                    found[name, saved, loading] = str(error)
    return found


# ---------------------------------------------------------------- resuming, and shards by hand


def random_state_after_resuming(rank, world_size, config):
    """The state of the random number generator once the newest checkpoint is loaded."""
    model, optimizer = build(config, seed=2)
    with run_checkpoints(config, rank, "digits") as checkpoints:
        checkpoints.load(model, optimizer)
    return torch.get_rng_state().numpy().tobytes()


def save_cut_along_each_dimension(rank, world_size, folder):
    """A checkpoint of tensors that the ranks cut along different dimensions; the whole tensors."""
    torch.manual_seed(0)
    shapes = {"columns": (4, 9), "planes": (6, 2, 5), "middle": (2, 7, 5), "last": (3, 2, 8)}
    dims = {"columns": 1, "planes": 0, "middle": 1, "last": 2}
    whole = {name: torch.randn(shape) for name, shape in shapes.items()}
    mesh = init_device_mesh("cpu", (world_size,))
    cut = {name: distribute_tensor(tensor, mesh, [Shard(dims[name])]) for name, tensor in whole.items()}
    dcp.save({"model": cut}, storage_writer=dcp.FileSystemWriter(folder))
    return whole


# ---------------------------------------------------------------- dying


NO_FOLDER = -1  # what an audit event says of a path that is not relative to an open folder


def train_and_die(rank, world_size, config, victim, moment, everyone, diary):
    """`train_worker`, with a kill -9 of rank `victim`, or of all ranks, at its `moment`-th moment; None only counts.

    Rank 0 has two moments more in a saving for which the other rank was first to make the folder, since it clears that
    away. So there may be fewer than were counted; then the kill comes at the end.

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
        if moments == moment:
            die()

    def die():
        if rank == victim:
            for pid in [*others, os.getpid()]:
                os.kill(pid, signal.SIGKILL)

    def hook(event, args):
        # rmtree names what it removes relative to an open folder, so such a removal counts whatever its name is.
        by_rmtree = event in ("os.remove", "os.rmdir") and args[-1] != NO_FOLDER
        if by_rmtree or (event.startswith(("open", "os.", "shutil.")) and concerns(args)):
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
    if moment is not None:
        die()
    return moments


def train_and_be_asked(rank, world_size, config, asked, step):
    """`train_worker` as under torchrun, with a SIGTERM for rank `asked` alone during that step; how each rank ends."""
    steps = 0

    def train_step(*args, take=training.train_step, **settings):
        nonlocal steps
        steps += 1
        if (rank, steps) == (asked, step):
            os.kill(os.getpid(), signal.SIGTERM)
        return take(*args, **settings)

    training.train_step = train_step
    with catching_sigterm():
        try:
            train_worker(rank, world_size, config)
        except Stopped as stopped:
            return str(stopped)


def train_on_a_full_disk(rank, world_size, config, full_on, save_number, part):
    """`train_worker`; from that saving on, rank `full_on` cannot write its "shards", or the "description"."""
    saves = 0

    def dcp_save(*args, save=dcp.save, **kwargs):
        nonlocal saves
        saves += 1
        is_full = saves == save_number and rank == full_on
        if is_full and part == "shards":
            let_files_grow_to(20_000)  # a shard of SimpleCNN's state is larger: 12 x 50,186 / 2 = 301,116 bytes
        save(*args, **kwargs)
        if is_full and part == "description":
            let_files_grow_to(100)

    checkpoint.dcp.save = dcp_save
    return train_worker(rank, world_size, config)


def let_files_grow_to(size):
    """Writing beyond fails as on a full disk, with an OSError: Python ignores the signal that comes with it."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def train_with_schedule(rank, world_size, config):
    """The losses of the run of notebook 06's accidents, if nobody stops it."""
    dataset, built = load_rank_data(config, rank_device()), saving_and_resuming.build_sharded(config, seed=config.seed)
    return [
        loss
        for step in range(config.max_steps)
        for loss in saving_and_resuming.train_steps(rank, world_size, config, dataset, built, first_step=step, count=1)
    ]
