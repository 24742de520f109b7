"""The highest point of a step on one rank, from arithmetic: a walk through forward and backward. No torch.

A `StepProfile` says what one process does with one rank's images; the strategy says what is gathered, reduced and freed
at each event. fp32 parameters and Adam; padding counts. Of a rank on the CPU: host and device are one there, so that
offloading moves nothing.
"""

from collections.abc import Sequence

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.planning.fsdp1 import FlatParameters
from fsdp_helpers.planning.fsdp2 import FullyShard
from fsdp_helpers.planning.ledger import Ledger, Peak
from fsdp_helpers.planning.profile import StepProfile
from fsdp_helpers.planning.state import num_shards
from fsdp_helpers.planning.whole import WholeModel

WHEN = {
    "enter_forward": "forward, in {}",
    "leave_forward": "forward, after {}",
    "enter_backward": "backward, in {}",
    "gradient": "backward, with the gradient of {}",
    "leave_backward": "backward, after {}",
}


def peak_of_step(
    profile: StepProfile, config: TrainConfig, world_size: int, units: Sequence[str] = (), *, backend: str = "gloo"
) -> Peak:
    """The highest point of a steady step of `config`, on the rank with the largest slices.

    `profile` is of the images of one micro-batch; `units` names the FSDP units below the root, none is one unit.
    With `backend` "gloo" a collective needs a copy of its full tensor while it lasts, with any other none.
    Raises ValueError for a unit that is no module of the model.
    """
    ledger = Ledger()
    rank = _rank(profile, config, world_size, units, backend, ledger)
    for part in range(config.micro_batches):
        is_last = part == config.micro_batches - 1
        rank.begin_part(reduces=is_last or config.sync_micro_batches, is_last=is_last)
        _walk(profile, rank, ledger)
    return ledger.peak


def _rank(
    profile: StepProfile, config: TrainConfig, world_size: int, units: Sequence[str], backend: str, ledger: Ledger
) -> WholeModel | FlatParameters | FullyShard:
    if config.strategy in ("local", "ddp"):
        return WholeModel(profile, config, ledger)
    shard = FlatParameters if config.api == "fsdp1" else FullyShard
    return shard(profile, config, num_shards(config.sharding, world_size), units, backend, ledger)


def _walk(profile: StepProfile, rank: WholeModel | FlatParameters | FullyShard, ledger: Ledger) -> None:
    """One forward and one backward."""
    for moment in profile.moments:
        ledger.when = WHEN[moment.event].format(moment.name or "the root")
        ledger.set_activations(moment.activation_bytes)
        if moment.event == "gradient" or moment.name in rank.units:
            getattr(rank, moment.event)(moment.name)
        ledger.set_activations(moment.highest_bytes)
    ledger.when = "the end of backward"
    ledger.set_activations(profile.moments[-1].activation_bytes if profile.moments else 0)
    rank.end_backward()
