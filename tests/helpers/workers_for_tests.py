"""Tiny workers. Every rank process imports this module, so it imports only what a rank has loaded anyway."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torchvision.datasets import MNIST

from fsdp_helpers.checkpointing import checkpoint, resume
from fsdp_helpers.config import TrainConfig
from fsdp_helpers.data import source
from fsdp_helpers.data.source import prepare_data
from fsdp_helpers.measuring.collectives import count_collectives, trace_collectives
from fsdp_helpers.measuring.memory import trace_memory
from fsdp_helpers.measuring.offload_copies import trace_copies
from fsdp_helpers.models.series import build_model
from fsdp_helpers.ranks.group import gather_over_ranks, rank_device, sum_over_ranks
from fsdp_helpers.sharding.gradients import without_gradient_sync
from fsdp_helpers.sharding.strategies import APPLY_STRATEGY, shard_with_api, unit_names
from fsdp_helpers.training import worker
from fsdp_helpers.training.loop import train_step
from fsdp_helpers.training.worker import first_batches, train_worker

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


def trace_functional(rank, world_size):
    """What is counted of DTensors that are redistributed, of uneven all-to-alls, and of a send, each by itself."""
    mesh = init_device_mesh("cpu", (world_size,))
    rows = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
    terms = DTensor.from_local(torch.ones(2 * world_size, 3), mesh, [Partial()])
    uneven = torch.ones(world_size * (rank + 1), 5, requires_grad=True)  # rank + 1 rows for each rank
    arriving = [other + 1 for other in range(world_size)]

    def there_and_back():
        leaving = [rank + 1] * world_size
        all_to_all_single_autograd(uneven, arriving, leaving, dist.group.WORLD).sum().backward()

    def send_around():
        received = torch.empty(4)
        send = dist.P2POp(dist.isend, torch.ones(4), (rank + 1) % world_size)
        receive = dist.P2POp(dist.irecv, received, (rank - 1) % world_size)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    steps = {
        "gather": lambda: rows.redistribute(placements=[Replicate()]),
        "sum": lambda: terms.redistribute(placements=[Replicate()]),
        "scatter": lambda: terms.redistribute(placements=[Shard(0)]),
        "implied": terms.relu,  # of a sum, not of its terms
        "there and back": there_and_back,
        "even": lambda: dist.all_to_all_single(torch.empty(world_size, 5), torch.ones(world_size, 5)),
        "around": send_around,
    }
    found = {}
    for name, step in steps.items():
        with trace_collectives() as events:
            step()
        found[name] = [(event.op, event.bytes, event.sent_bytes) for event in events]
    return found


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


# ---------------------------------------------------------------- memory levers


def gradients_held_back(rank, world_size):
    """DDP, one weight whose gradient is rank + 1: after a backward that reduces nothing, and one more that does."""
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    inputs = torch.full((1, 1), rank + 1.0)
    with without_gradient_sync(model):
        model(inputs).sum().backward()
    own = model.module.weight.grad.item()
    model(inputs).sum().backward()
    return own, model.module.weight.grad.item()


# ---------------------------------------------------------------- data


def prepare_together(rank, world_size, folder, url, resources, files):
    """Every rank asks for the data at the same moment; the mirror, and what it should have, are a test's."""
    MNIST.mirrors, MNIST.resources, source.MNIST_FILES = [url], resources, files
    dist.barrier()
    return prepare_data(folder)


def bytes_reduced(rank, world_size, api):
    """Bytes in which a layer of 20 parameters is reduced, with `param_dtype` bf16 and nothing said of `reduce_dtype`."""
    layer = nn.Linear(4, 4)
    if api == "FSDP1":
        precision = fsdp.MixedPrecision(param_dtype=torch.bfloat16)
        layer = fsdp.FullyShardedDataParallel(layer, device_id=torch.device("cpu"), mixed_precision=precision)
    else:
        precision = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        fsdp.fully_shard(layer, mesh=init_device_mesh("cpu", (world_size,)), mp_policy=precision)
    with trace_collectives() as seen:
        layer(torch.ones(2, 4)).float().sum().backward()
    (reduced,) = (counted for counted in count_collectives(seen) if counted.op == "reduce_scatter")
    return reduced.bytes


def answer_to_each_disagreement(rank, world_size, config, folder):
    """What a rank is told where ranks differ: in their data, in what is in their folder, in whether they could save."""
    said, loaded = {}, worker.load_data(config.data_dir, train_images=8, test_images=4)
    source = ("mnist", "digits")[rank]
    with patch.object(worker, "load_data", lambda *_, **__: replace(loaded, source=source)):
        said["data"] = message_of(lambda: worker.load_rank_data(config, rank_device()))
    of_rank = (Path(folder, "step-00000002"), SimpleNamespace(settings={}, step=2)) if rank else None
    with patch.object(resume, "find_start", lambda *_: of_rank):
        said["folder"] = message_of(lambda: resume.RunCheckpoints(config, rank, "digits"))

    def refuse(path, *mode):
        raise OSError("no space is left for it")

    with patch.object(checkpoint, "atomic_file", refuse):  # on rank 0, which writes that file alone
        said["save"] = message_of(lambda: checkpoint.save(Path(folder, "saved"), nn.Linear(2, 2)))
    return said


def message_of(call):
    """The message of the error in which a call ends, or None."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def train_with_a_clock_of_its_own(rank, world_size, config):
    """The seconds of the epoch, which took 1 s on rank 0 and 3 s on rank 1; and what a rank draws first after set-up."""
    worker.set_up(rank, config)
    drawn = torch.rand(1).item()
    with patch.object(worker.StepWatch, "epoch_seconds", (1.0, 3.0)[rank]):
        return train_worker(rank, world_size, config).epochs[0].seconds, drawn


def offloaded_step(rank, world_size, config):
    """Take a few steps with FSDP2's offload policy: the last one's collectives, the policy's copies, and shards."""
    batches = first_batches(rank, world_size, config)
    torch.manual_seed(config.seed)
    with trace_memory(rank_device()) as trace:
        model = APPLY_STRATEGY["fsdp-offload"](build_model(config.model), rank_device(), config)
        optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate)  # steps on the host
        for images, labels in batches:
            with trace_copies(model) as copies:
                train_step(model, images, labels, optimizer)
    return trace.last("train step"), copies
