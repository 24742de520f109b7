"""Tiny workers. Every rank process imports this module, so it imports only what a rank has loaded anyway."""

import gc
import importlib
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torchvision.datasets import MNIST

from fsdp_helpers import mnist
from fsdp_helpers.checkpointing.hugging_face import load_hugging_face
from fsdp_helpers.config import TrainConfig
from fsdp_helpers.data import prepare_data
from fsdp_helpers.llama import Llama
from fsdp_helpers.measuring.collectives import count_collectives, trace_collectives
from fsdp_helpers.models import build_model
from fsdp_helpers.ranks import progress
from fsdp_helpers.ranks.exchange import gather_over_ranks, sum_over_ranks
from fsdp_helpers.ranks.group import rank_device
from fsdp_helpers.ranks.launching.process import describe_error
from fsdp_helpers.shapes import BYTE_LLAMA
from fsdp_helpers.sharding.gradients import hold_back_reduction
from fsdp_helpers.sharding.strategies import APPLY_STRATEGY, make_mesh, shard_with_api, unit_names
from fsdp_helpers.training.loop import train_step
from fsdp_helpers.training.worker import config_batches, load_rank_data, train_worker


def return_rank(rank, world_size):
    return rank, world_size


def describe_itself(rank, world_size):
    """Everything that a rank can say of where it finds itself."""
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    return {
        "rank": (rank, world_size),
        "pid": os.getpid(),
        "tensor": torch.full((2,), float(rank)),
        "sum": total.item(),
        "variables": [int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")],
        "backend": dist.get_backend(),
        "num_threads": torch.get_num_threads(),
    }


def stop_rank_1(rank, world_size, sharding):
    """A rank that is there and does nothing any more, in the group of all ranks, of a mesh, or of half a hybrid one."""
    if sharding is None:
        group = None
    else:
        mesh = make_mesh(rank_device(), TrainConfig(strategy="fsdp", sharding=sharding))
        group = mesh.get_group(mesh.ndim - 1)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1), group=group)
    dist.barrier(group=group)
    dist.barrier()


def abort_while_rank_1_is_stopped(rank, world_size):
    """As with NCCL: a rank is stopped, and a library ends a healthy one that waits for it."""
    pids = gather_over_ranks(os.getpid())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 0:
        import psutil  # of no use to the other workers

        while psutil.Process(pids[1]).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        os.abort()
    dist.all_reduce(torch.ones(1))


def abort_itself(rank, world_size, bad_rank):
    dist.barrier()
    if rank == bad_rank:
        os.abort()
    sleep_for_ever()


def all_reduce_late(rank, world_size, late_s):
    time.sleep(rank * late_s)
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def return_environment(rank, world_size):
    return dict(os.environ)


def all_reduce_rank(rank, world_size):
    value = torch.tensor([float(rank + 1)])
    dist.all_reduce(value)
    return value.item()


def all_reduce_on_device(rank, world_size):
    value = torch.ones(1, device=rank_device())
    dist.all_reduce(value)
    return value.item(), str(rank_device()), torch.cuda.current_device()


def count_page_faults(rank, world_size):
    """Page faults of each of ten rounds that allocate and free the same large buffers, with small tensors kept."""
    kept, faults = [], []
    for _ in range(10):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        first, second = torch.ones(2**23), torch.ones(2**23)  # 33.6 MB each
        kept.append(torch.ones(1))
        del first
        third = torch.ones(2**23)
        kept.append(torch.ones(4))
        del second, third
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return faults


def print_lines(rank, world_size, count):
    for number in range(count):
        print(f"rank {rank}", end=" ")
        print(f"line {number}")
    print("to stderr", rank, file=sys.stderr)
    sys.stdout.buffer.write("bytes: ü\n".encode())
    subprocess.run(["sh", "-c", "echo by a process; printf 'and its rest'"], stdout=sys.stdout, check=True)
    print("no newline at the end", end="")


def report_progress(rank, world_size, steps):
    for step in range(1, steps + 1):
        progress.report(step, steps, "counting", f"step {step}")
        time.sleep(0.01)


def raise_on(rank, world_size, bad_rank):
    if rank == bad_rank:
        raise ZeroDivisionError(f"on purpose, on rank {rank}")
    dist.barrier()  # the others wait for a rank that never comes


def raise_while_another_prints(rank, world_size):
    if rank == 0:
        raise ZeroDivisionError("on purpose")
    print_for_ever(rank, world_size)


def print_for_ever(rank, world_size):
    while True:
        print("again")


def hang_on(rank, world_size, bad_rank):
    if rank == bad_rank:
        sleep_for_ever()
    dist.all_reduce(torch.ones(1))


def keep_others_waiting(rank, world_size, way, seconds):
    """Rank 0 lets the others wait in a collective, and computes, reports or prints meanwhile."""
    end_s = time.monotonic() + seconds
    while rank == 0 and time.monotonic() < end_s:
        if way == "compute":
            torch.ones(100, 100) @ torch.ones(100, 100)
            continue
        time.sleep(0.3)
        if way == "print":
            print("still here")
        else:
            progress.report(0, 1, "waiting")
    found = torch.ones(1)
    dist.all_reduce(found)
    return found.item()


def sleep_for_ever():
    while True:
        time.sleep(60)


def ignore_sigterm(rank, world_size):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep_for_ever()


def kill_itself(rank, world_size, bad_rank):
    if rank == bad_rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def leave_with(rank, world_size, status):
    sys.exit(status)


def leave_at_once(rank, world_size, status):
    os._exit(status)


def return_unpicklable(rank, world_size):
    return threading.Lock()


def return_what_cannot_be_read(rank, world_size):
    return ReadsOnlyInRanks()


class ReadsOnlyInRanks:
    def __reduce__(self):
        return int, ("no number",)


# ---------------------------------------------------------------- processes that a worker starts

SLEEPER = ["sleep", "600"]


def start_processes():
    """One process of each kind that could outlive its rank; their ids."""
    read_end, write_end = os.pipe()
    if os.fork() == 0:  # a daemon: neither a child of the rank, nor of its session, nor started with its environment
        os.setsid()
        if (daemon := os.fork()) == 0:
            sleep_for_ever()
        os.write(write_end, str(daemon).encode())
        os._exit(0)
    in_background = subprocess.run(["sh", "-c", "sleep 600 >&2 & echo $!"], stdout=subprocess.PIPE, check=True)
    shell = ["sh", "-c", "sleep 600 & echo $!; wait"]  # its child is nobody else's until the shell has ended
    family = subprocess.Popen(shell, stdout=subprocess.PIPE, start_new_session=True)
    return [
        int(os.read(read_end, 20)),
        int(in_background.stdout),
        family.pid,
        int(family.stdout.readline()),
        subprocess.Popen(SLEEPER).pid,
        subprocess.Popen(SLEEPER, start_new_session=True, env={}).pid,
        start_forked_child().pid,
    ]


def start_forked_child():
    child = multiprocessing.get_context("fork").Process(target=sleep_for_ever)
    child.start()
    return child


def describe_and_leave_processes(rank, world_size):
    return describe_itself(rank, world_size), start_processes()


def leave_processes(rank, world_size, folder, end):
    """Start processes, write their ids and this rank's, and end as `end` says."""
    pids = [os.getpid(), *start_processes()]
    path = os.path.join(folder, f"pids-{rank}")
    with open(f"{path}.part", "w") as file:
        file.write(" ".join(map(str, pids)))
    os.rename(f"{path}.part", path)
    if end == "failure":
        raise ZeroDivisionError("on purpose")
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if end != "success":
        sleep_for_ever()


# ---------------------------------------------------------------- memory and collectives


def trace_one_of_each(rank, world_size):
    """Every kind of collective, with one value a rank; what the trace counted, that of a pair of ranks apart."""
    part, whole = torch.ones(1), torch.ones(world_size)
    pair = dist.new_group([0, 1])
    with trace_collectives() as events:
        dist.all_reduce(torch.ones(3))
        dist.all_gather_into_tensor(whole, part)
        dist.reduce_scatter_tensor(part, whole.clone())
        dist.broadcast(torch.ones(5), src=0)
        dist.all_gather([torch.ones(2) for _ in range(world_size)], torch.ones(2))
        dist.all_reduce(torch.ones(7))
        dist.broadcast(torch.ones(6), src=1)
        parts = [torch.ones(1) for _ in range(world_size)] if rank == 1 else None
        dist.gather(part, parts, dst=1)
        dist.scatter(part, parts, src=1)
    torch.ones(1).add_(1)
    dist.all_reduce(torch.ones(9))  # after the block: not counted
    with trace_collectives() as in_the_pair:
        if rank < 2:
            dist.all_reduce(torch.ones(2), group=pair)
    return count_collectives(events) + tuple(replace(count, op="pair") for count in count_collectives(in_the_pair))


def sum_and_gather(rank, world_size):
    values = torch.tensor([float(rank)])
    return sum_over_ranks(values).item(), values.item(), gather_over_ranks(f"from {rank}")


# ---------------------------------------------------------------- sharding


def units_of_both_apis(rank, world_size, model_name, policies):
    """For each policy the units below the root, sorted: those that FSDP1 finds by itself, and those of FSDP2."""
    return [tuple(_units(model_name, policy, api) for api in ("fsdp1", "fsdp2")) for policy in policies]


def _units(model_name, policy, api):
    with torch.device("meta"):  # no time for initial values, which do not matter here
        model = build_model(model_name)
    model = shard_with_api(
        model.to_empty(device="cpu"), rank_device(), TrainConfig(strategy="fsdp", api=api), policy=policy
    )
    return sorted(set(unit_names(model)) - {"root"})


def train_and_return_parameters(rank, world_size, configs):
    """For each config whole parameters after `max_steps` steps, by their names in the plain model; {} on other ranks."""
    return [_parameters_after_training(rank, world_size, config) for config in configs]


def _parameters_after_training(rank, world_size, config):
    dataset = load_rank_data(config, rank_device())
    torch.manual_seed(config.seed)
    model = APPLY_STRATEGY[config.strategy](build_model(config.model, dropout=config.dropout), rank_device(), config)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate, fused=True)
    torch.manual_seed(config.seed + 1 + rank)
    for images, labels in islice(config_batches(dataset, config, rank, world_size, epoch=0), config.max_steps):
        train_step(model, images, labels, optimizer)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return whole if rank == 0 else {}


# ---------------------------------------------------------------- memory levers


def units_and_parameters(rank, world_size, configs):
    """For each config the names of the units, and whole parameters by their names in a state dict (on rank 0)."""
    whole = StateDictOptions(full_state_dict=True)
    models = [APPLY_STRATEGY[config.strategy](build_model(config.model), rank_device(), config) for config in configs]
    return [(unit_names(model), get_model_state_dict(model, options=whole)) for model in models]


def gradients_held_back(rank, world_size):
    """DDP, one weight whose gradient is rank + 1: after a backward that reduces nothing, and one more that does."""
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    inputs = torch.full((1, 1), rank + 1.0)
    with hold_back_reduction(model):
        model(inputs).sum().backward()
    own = model.module.weight.grad.item()
    model(inputs).sum().backward()
    return own, model.module.weight.grad.item()


# ---------------------------------------------------------------- data


def prepare_together(rank, world_size, folder, url, resources, files):
    """Every rank asks for the data at the same moment; the mirror, and what it should have, are a test's."""
    MNIST.mirrors, MNIST.resources, mnist.MNIST_FILES = [url], resources, files
    dist.barrier()
    return prepare_data(folder)


# ---------------------------------------------------------------- many runs, one launch


def train_each(rank, world_size, configs):
    """Train each of `configs`, one after the other; the record of each."""
    gc.freeze()  # what was loaded before the first run is not looked through again
    records = []
    for config in configs:
        if records:
            gc.collect()  # sharded models are full of cycles; freed in the next trace, they would take it below zero
        records.append(train_worker(rank, world_size, config))
    return records


def call_each(rank, world_size, calls):
    """Run several workers, (worker, *arguments), one after the other; the result of each."""
    gc.freeze()  # what was loaded before the first run is not looked through again
    results = []
    for worker, *arguments in calls:
        results.append(worker(rank, world_size, *arguments))
        gc.collect()  # sharded models are full of cycles; freed in the next trace, they would take it below zero
    return results


def rehearse(rank, world_size, worker, module, builds):
    """Run a checker's worker with each build, (folder of the module, arguments): (its result, how it failed)."""
    gc.freeze()  # what was loaded before the first run is not looked through again
    found = []
    for folder, arguments in builds:
        sys.path.insert(0, folder)
        sys.modules.pop(module, None)
        importlib.invalidate_caches()
        try:
            found.append((worker(rank, world_size, module, *arguments), None))
        except Exception as error:
            found.append((None, describe_error(error)))
        sys.path.remove(folder)
        gc.collect()  # sharded models are full of cycles; freed in the next trace, they would take it below zero
    return found


def report_until_ended(rank, world_size, folder):
    """Write this rank's process id; report a step now and then, until there is a file that says stop."""
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    for step in range(10_000):
        progress.report(step, 10_000, "counting")
        if Path(folder, "stop").exists():
            return "stopped"
        time.sleep(0.1)


def return_args(rank, world_size, *args):
    return args


def gradient_norm_in_units(rank, world_size, cut):
    """The norm of the whole gradient after one backward, of a model that `cut` has sharded."""
    torch.manual_seed(0)
    model = build_model("vit", dropout=False)
    slices = cut(model, rank, world_size)
    model(torch.full((2, 1, 28, 28), rank + 1.0)).square().mean().backward()
    own = [piece.grad.to_local() if isinstance(piece.grad, DTensor) else piece.grad for piece in slices]
    return sum_over_ranks(sum(gradient.double().square().sum() for gradient in own)).sqrt().item()


def load_llama(rank, world_size, folder):
    """Start a sharded Llama on meta and read it from `folder`: tensors that differ from a plain one, and own values."""
    with torch.device("meta"):
        model = Llama(BYTE_LLAMA)
    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh).to_empty(device="cpu")
    load_hugging_face(model, folder)
    plain = Llama(BYTE_LLAMA)
    load_hugging_face(plain, folder)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    differing = [name for name, value in plain.state_dict().items() if not torch.equal(whole[name], value)]
    return differing, sum(parameter.to_local().numel() for parameter in model.parameters())


def run_each(rank, world_size, names, way):
    """Run several failures of the gallery, one after the other: the numbers of each, or its error."""
    from fsdp_helpers.teaching.lessons.failures import gallery  # of no use to the other workers

    gc.freeze()  # what was loaded before the first run is not looked through again
    found = {}
    for name in names:
        try:
            found[name] = getattr(gallery.find(name), way)(rank, world_size)
        except Exception as error:  # what a broken run raises is what is asked for
            found[name] = f"{type(error).__name__}: {error}"
        gc.collect()  # sharded models are full of cycles; freed in the next trace, they would take it below zero
    return found
