"""Calculate one rank's step: walk through forward and backward to find its peak and its collectives.

A `StepProfile` describes a step in one process on one rank's batch. The strategy decides which units are unsharded,
reduced and resharded at each event. The bytes include padding. No torch import.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.planning.optimizers import named_optimizer
from fsdp_helpers.planning.precisions import PRECISIONS
from fsdp_helpers.planning.profile import ROOT, Moment, StepProfile
from fsdp_helpers.planning.streams import Task
from fsdp_helpers.planning.walk.fsdp1 import FlatParameters
from fsdp_helpers.planning.walk.fsdp2 import FullyShard
from fsdp_helpers.planning.walk.ledger import Ledger, Peak
from fsdp_helpers.planning.walk.units import Shards, frozen_beside_trained, num_shards
from fsdp_helpers.planning.walk.unsharded import WholeModel
from fsdp_helpers.records import CollectiveCount

WALKED_PARTS = 3  # the micro-batches that we walk through: the first, one in the middle, the last
WHEN = {
    "enter_forward": "forward, in {}",
    "leave_forward": "forward, after {}",
    "enter_backward": "backward, in {}",
    "gradient": "backward, with the gradient of {}",
    "leave_backward": "backward, after {}",
}


@dataclass(frozen=True, kw_only=True)
class Step:
    """One rank's step: its peak (with the terms that add up to it), its collectives and its tasks."""

    peak: Peak
    collectives: tuple[CollectiveCount, ...]
    tasks: tuple[Task, ...] = ()  # arithmetic and collectives, in the order in which they're issued

    @property
    def sent_bytes(self) -> int:
        return sum(collective.sent_bytes for collective in self.collectives)


def peak_of_step(
    profile: StepProfile, config: TrainConfig, world_size: int, units: Sequence[str] = (), *, backend: str = "gloo"
) -> Peak:
    """Return the peak that `walk_step` finds with the same arguments."""
    return walk_step(profile, config, world_size, units, backend=backend).peak


def walk_step(
    profile: StepProfile,
    config: TrainConfig,
    world_size: int,
    units: Sequence[str] = (),
    *,
    backend: str = "gloo",
    replicas: int | None = None,
    has_host: bool = False,
    optimizer: str = "adam",
    precision: str | None = None,
) -> Step:
    """Walk through a steady step under `config`, on the rank with the largest shards, and return the step.

    `profile` describes a step on one micro-batch. `units` names the FSDP units below the root; if it's empty, the model
    is one unit. With `backend` "gloo", a running collective needs a copy of its full tensor; with "fake" or "nccl", it
    doesn't. gloo and the fake group run on a CPU, which also makes copies that a GPU doesn't need. `replicas` is the
    number of groups under "hybrid", each with a full copy of the state; the default is two. With `has_host`, offloaded
    state is in the host's memory instead of the device's; a rank on the CPU has no separate host. `optimizer` is one
    of `planning.optimizers.OPTIMIZERS`. `precision`, one of `planning.precisions.PRECISIONS`, defaults to the one in
    `config`. Raises ValueError for a unit that isn't a module of the model.
    """
    ledger, sizes, chosen = Ledger(), PRECISIONS[precision or config.precision], named_optimizer(optimizer)
    ranks = num_shards(config.sharding, world_size) if replicas is None else world_size // replicas
    if not config.is_sharded:
        rank: WholeModel | FlatParameters | FullyShard = WholeModel(profile, config, ledger, world_size, sizes, chosen)
    else:
        offloads = has_host and config.strategy == "fsdp-offload"
        copies = world_size // ranks
        shards = Shards(profile, config, ranks, copies, units, backend, ledger, sizes, chosen, offloads=offloads)
        if config.api == "fsdp1":
            _check_thawed(profile, units)
            rank = FlatParameters(shards, config, profile)
        else:
            rank = FullyShard(shards, config)
    parts = min(config.micro_batches, WALKED_PARTS)
    for part in range(parts):
        is_last, before = part == parts - 1, len(ledger.tasks)
        rank.begin_part(reduces=is_last or config.reduces_every_part, is_last=is_last)
        _walk(profile.flat_moments if config.is_sharded and config.api == "fsdp1" else profile.moments, rank, ledger)
        if part == parts - 2:  # all micro-batches between the first and the last are the same
            ledger.repeat(ledger.tasks[before:], config.micro_batches - parts)
    ledger.when = "the optimizer's step"
    rank.update()
    return Step(peak=ledger.peak, collectives=ledger.collectives, tasks=tuple(ledger.tasks))


def _when(moment: Moment) -> str:
    """Describe an event in words; the root's forward pass is followed by the loss."""
    if moment.event == "leave_forward" and moment.name == ROOT:
        return "the loss"
    return WHEN[moment.event].format(moment.name or "the root")


def _check_thawed(profile: StepProfile, units: Sequence[str]) -> None:
    """Raise ValueError if frozen and trained parameters share an FSDP1 unit, unless the profile allows for it."""
    mixed = frozen_beside_trained(profile, units)
    if mixed != profile.thawed:
        raise ValueError(
            "FSDP1 computes gradients for all parameters in a unit if any is trained; here, that includes "
            f"frozen ones (number: {len(mixed)}), but the step was measured with gradients for {len(profile.thawed)}. "
            "Measure it with this plan's units as flat_units, or use FSDP2"
        )


def _walk(moments: Sequence[Moment], rank: WholeModel | FlatParameters | FullyShard, ledger: Ledger) -> None:
    """Walk through one forward and one backward pass."""
    for moment in moments:
        ledger.when = _when(moment)
        ledger.set_activations(moment.activation_bytes)
        if moment.event == "gradient" or moment.name in rank.units:
            getattr(rank, moment.event)(moment.name)
        ledger.set_activations(moment.highest_bytes)
    ledger.when = "the end of backward"
    ledger.set_activations(moments[-1].activation_bytes if moments else 0)
    rank.end_backward()
