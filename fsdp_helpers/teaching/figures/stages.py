"""The stages of a step and what every rank has at each, for the drawings of DDP and FSDP."""

from dataclasses import dataclass

WHOLE, SHARD, NOTHING, OWN = "whole", "shard", "nothing", "own"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a step: how much of the parameters, gradients and optimizer state every rank has then.

    "own" are whole gradients of the rank's own images, not yet averaged with those of the other ranks.
    """

    title: str
    parameters: str
    gradients: str
    optimizer: str
    leads_to: str = ""  # what happens between this stage and the next


FSDP_STEP = (
    Stage(title="between steps", parameters=SHARD, gradients=SHARD, optimizer=SHARD, leads_to="all-gather"),
    Stage(title="forward", parameters=WHOLE, gradients=NOTHING, optimizer=SHARD, leads_to="backward"),
    Stage(title="end of backward", parameters=WHOLE, gradients=OWN, optimizer=SHARD, leads_to="reduce-\nscatter"),
    Stage(title="optimizer's step", parameters=SHARD, gradients=SHARD, optimizer=SHARD),
)
DDP_STEP = (
    Stage(title="between steps", parameters=WHOLE, gradients=WHOLE, optimizer=WHOLE, leads_to="zero_grad"),
    Stage(title="forward", parameters=WHOLE, gradients=NOTHING, optimizer=WHOLE, leads_to="backward"),
    Stage(title="end of backward", parameters=WHOLE, gradients=OWN, optimizer=WHOLE, leads_to="all-reduce"),
    Stage(title="optimizer's step", parameters=WHOLE, gradients=WHOLE, optimizer=WHOLE),
)
