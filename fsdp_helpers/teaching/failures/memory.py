"""It runs out of memory: sharding is on, but it saves less memory than it should."""

from functools import partial

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor

from fsdp_helpers.measuring.collectives import trace_collectives
from fsdp_helpers.measuring.memory import trace_memory
from fsdp_helpers.teaching.failures.entry import Failure, Numbers
from fsdp_helpers.teaching.failures.small_job import WIDTH, cpu_mesh, images, in_units, small_model

CPU = torch.device("cpu")
FP32_BYTES = 4
LAYER_BYTES = FP32_BYTES * (WIDTH * WIDTH + WIDTH)  # weight and bias of the largest layer
WHOLE_BYTES = 2 * LAYER_BYTES + FP32_BYTES * (2 * WIDTH + 2)


def largest_gather(model: nn.Module) -> Numbers:
    """Return the size of a step's largest all-gather, which is the most that a rank unshards at once."""
    with trace_collectives() as events:
        model(images()).sum().backward()
    return {"largest gather, bytes": max(event.bytes for event in events if event.op == "all_gather")}


# ---------------------------------------------------------------- the root alone


def shard_the_root_alone(rank: int, world_size: int) -> Numbers:
    model = small_model()
    fully_shard(model, mesh=cpu_mesh())
    return largest_gather(model)


def shard_each_layer(rank: int, world_size: int) -> Numbers:
    model = small_model()
    for layer in (module for module in model if isinstance(module, nn.Linear)):
        fully_shard(layer, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    return largest_gather(model)


def one_layer() -> Numbers:
    return {"largest gather, bytes": LAYER_BYTES}


# ---------------------------------------------------------------- FSDP1's default threshold


def count_units(model: nn.Module) -> Numbers:
    return {"units": sum(isinstance(module, FullyShardedDataParallel) for module in model.modules())}


def wrap_by_default_size(rank: int, world_size: int) -> Numbers:
    policy = size_based_auto_wrap_policy  # 100 million parameters
    return count_units(FullyShardedDataParallel(small_model(), auto_wrap_policy=policy, device_id=CPU))


def wrap_by_own_size(rank: int, world_size: int) -> Numbers:
    policy = partial(size_based_auto_wrap_policy, min_num_params=WIDTH * WIDTH)
    return count_units(FullyShardedDataParallel(small_model(), auto_wrap_policy=policy, device_id=CPU))


def two_layers_and_root() -> Numbers:
    return {"units": 3}


# ---------------------------------------------------------------- full gradients that wait to be reduced


def hold_back_reduction(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model())
    model.set_requires_gradient_sync(False)  # until the last micro-batch
    micro_batches = images().split(2)[:3]
    with trace_memory() as trace:
        for batch in micro_batches:
            model(batch).sum().backward()
    return {"bytes that wait": trace.whole().curve.held_bytes}


def reduce_each_micro_batch(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model())
    micro_batches = images().split(2)[:3]
    with trace_memory() as trace:
        for batch in micro_batches:
            model(batch).sum().backward()
    return {"bytes that wait": trace.whole().curve.held_bytes}


def half_of_the_gradients() -> Numbers:
    return {"bytes that wait": WHOLE_BYTES / 2}


# ---------------------------------------------------------------- a full state dict on every rank


def local_bytes(state: dict) -> int:
    parts = [value.to_local() if isinstance(value, DTensor) else value for value in state.values()]
    return sum(part.nbytes for part in parts)


def full_state_everywhere(rank: int, world_size: int) -> Numbers:
    state = get_model_state_dict(in_units(small_model()), options=StateDictOptions(full_state_dict=True))
    return {"bytes of the state dict, per rank": local_bytes(state)}


def sharded_state(rank: int, world_size: int) -> Numbers:
    state = get_model_state_dict(in_units(small_model()))
    return {"bytes of the state dict, per rank": local_bytes(state)}


def half_of_the_state() -> Numbers:
    return {"bytes of the state dict, per rank": WHOLE_BYTES / 2}


MEMORY = (
    Failure(
        name="memory-root-only",
        broken=shard_the_root_alone,
        fixed=shard_each_layer,
        right=one_layer,
    ),
    Failure(
        name="memory-default-threshold",
        broken=wrap_by_default_size,
        fixed=wrap_by_own_size,
        right=two_layers_and_root,
    ),
    Failure(
        name="memory-accumulation",
        broken=hold_back_reduction,
        fixed=reduce_each_micro_batch,
        right=half_of_the_gradients,
    ),
    Failure(
        name="memory-full-state-dict",
        broken=full_state_everywhere,
        fixed=sharded_state,
        right=half_of_the_state,
    ),
)
