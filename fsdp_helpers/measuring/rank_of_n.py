"""Run one rank of N alone: the strategy's real code on real tensors, with the other ranks faked.

torch's fake process group completes every collective immediately, with a tensor of the right size but wrong values. So
losses are meaningless here, but this rank allocates as many bytes as a real rank of N, and would send as many.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.profiler import record_function

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.measuring.collectives import count_collectives
from fsdp_helpers.measuring.memory import one_thread, state_bytes, trace_memory
from fsdp_helpers.models.series import build_model
from fsdp_helpers.progress import report, reports_drawn
from fsdp_helpers.records import CollectiveCount, StateBytes
from fsdp_helpers.sharding.recompute import checkpoint_activations, with_wrapper
from fsdp_helpers.sharding.strategies import APPLY_STRATEGY, count_units, shard_with_api

STEPS = 3  # the first step isn't steady
STEP = "train step"
ON_CPU = torch.device("cpu")
# An option of the fake group that gives the other ranks the same values as this one.
LIKE_THIS_ONE = "simulate_uniform_ranks"


@dataclass(frozen=True, kw_only=True)
class RankOfN:
    """One rank's bytes in a steady step: its state bytes, held bytes, peak bytes and sent bytes."""

    rank: int
    world_size: int
    state: StateBytes
    held_bytes: int
    peak_bytes: int
    num_units: int
    collectives: tuple[CollectiveCount, ...]

    @property
    def sent_bytes(self) -> int:
        return sum(collective.sent_bytes for collective in self.collectives)


@contextmanager
def fake_group(world_size: int, rank: int = 0) -> Iterator[None]:
    """Within the block, make this process rank `rank` of `world_size`, although the other ranks don't exist.

    Raises RuntimeError if this process is already in a process group, or if torch has moved its fake process group.
    """
    if dist.is_initialized():
        raise RuntimeError("this process is already in a process group; run one rank of N in a fresh process")
    store, options = fake_parts()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=store, pg_options=options)
    try:
        yield
    finally:
        dist.destroy_process_group()


def fake_parts() -> tuple[dist.Store, object]:
    """Return a store and options for torch's fake process group; only this function imports its private module."""
    try:
        from torch.testing._internal.distributed.fake_pg import FakeProcessGroup, FakeStore
    except ImportError as error:
        raise RuntimeError(
            f"torch {torch.__version__} has moved the fake process group, which running one rank of N needs: {error}. "
            f"Everything else works without it"
        ) from error
    options = FakeProcessGroup.Options()
    if hasattr(options, LIKE_THIS_ONE):
        setattr(options, LIKE_THIS_ONE, True)
    return FakeStore(), options


def can_fake_ranks(strategy: str) -> bool:
    """Return True if this version of torch can fake the other ranks under `strategy`; for DDP, torch 2.11 can't."""
    # torch 2.11's fake group never completes a collective that DDP waits for
    return strategy != "ddp" or hasattr(fake_parts()[1], LIKE_THIS_ONE)


def check_can_fake_ranks(strategy: str) -> None:
    """Raise RuntimeError if this version of torch can't fake the other ranks under `strategy`."""
    if not can_fake_ranks(strategy):
        raise RuntimeError(
            f"torch {torch.__version__} can't fake DDP's other ranks, only FSDP's; torch 2.15 can do both"
        )


def measure_rank_of_n(config: TrainConfig, world_size: int, rank: int = 0) -> RankOfN:
    """Measure one of `world_size` ranks in a run with `config`, on the CPU, with the other ranks faked."""
    check_can_fake_ranks(config.strategy)
    with fake_group(world_size, rank):
        return measure_this_rank(rank, world_size, config)


def measure_this_rank(rank: int, world_size: int, config: TrainConfig) -> RankOfN:
    """Measure this rank in a run with `config` on the CPU, in a real group or a fake one.

    The images are random; there are as many as the rank would get. Raises ValueError if the run can't work on
    `world_size` ranks, or has several micro-batches, since a step here has only one.
    """
    config.check_world_size(world_size)
    if config.micro_batches > 1:
        raise ValueError(f"micro_batches is {config.micro_batches}, but steps are measured with only one; set it to 1")
    num_images = config.global_batch_size // world_size
    images, labels = torch.randn(num_images, 1, 28, 28), torch.zeros(num_images, dtype=torch.long)
    with one_thread():  # as if there were as many ranks as cores
        return trace_steps(
            lambda: APPLY_STRATEGY[config.strategy](build_model(config.model, dropout=config.dropout), ON_CPU, config),
            lambda model: F.cross_entropy(model(images).float(), labels),
        )


def measure_own_rank_of_n(
    build: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module], Tensor],
    config: TrainConfig,
    world_size: int,
    units: Sequence[str] = (),
    rank: int = 0,
) -> RankOfN:
    """Measure one rank of N for any model: `build()` creates the model, and `loss_of(model)` returns one rank's loss.

    Only the strategy, the API and the memory levers in `config` matter. `units` names the FSDP units below the root,
    which are recomputed if activation checkpointing is on.
    """
    check_can_fake_ranks(config.strategy)
    with fake_group(world_size, rank):
        return trace_steps(lambda: distribute_model(build(), config, units), loss_of)


def distribute_model(model: nn.Module, config: TrainConfig, units: Sequence[str]) -> nn.Module:
    """Apply the strategy in `config` to `model`; the named modules are units, recomputed if `config` enables that."""
    chosen = {model.get_submodule(name) for name in units}
    if config.activation_checkpointing != "none":
        model = checkpoint_activations(model, units, config.activation_checkpointing)
        chosen = with_wrapper(model, list(chosen))
        config = replace(config, activation_checkpointing="none")  # already done
    if not config.is_sharded:
        return APPLY_STRATEGY[config.strategy](model, ON_CPU, config)
    policy = partial(lambda_auto_wrap_policy, lambda_fn=chosen.__contains__) if chosen else None
    return shard_with_api(model, ON_CPU, config, policy=policy)


def trace_steps(build: Callable[[], nn.Module], loss_of: Callable[[nn.Module], Tensor]) -> RankOfN:
    """Build a model, train it for a few steps under a trace, and return the bytes of the last step."""
    gc.collect()  # sharded models have reference cycles; freeing one within the trace would take the curve below 0
    title = f"rank {dist.get_rank()} of {dist.get_world_size():,}"
    with reports_drawn(), trace_memory(ON_CPU) as trace:
        report(0, STEPS, title)
        model = build().train()
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        for step in range(STEPS):
            with record_function(STEP):
                optimizer.zero_grad()
                loss_of(model).backward()
                optimizer.step()
            report(step + 1, STEPS, title)
    last = trace.last(STEP)
    return RankOfN(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        state=state_bytes(model, optimizer),
        held_bytes=last.curve.held_bytes,
        peak_bytes=last.curve.peak_bytes,
        num_units=count_units(model),
        collectives=count_collectives(last.collectives),
    )
