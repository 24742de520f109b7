"""The stages of a step and what every rank has at each, for the drawings of DDP and FSDP."""

from dataclasses import dataclass

WHOLE, SLICE, NOTHING, OWN = "whole", "slice", "nothing", "own"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a step: how much of the parameters, gradients and optimiser state every rank has then.

    "own" are whole gradients of the rank's own images, not yet averaged with those of the other ranks.
    """

    title: str
    parameters: str
    gradients: str
    optimiser: str
    leads_to: str = ""  # what happens between this stage and the next


FSDP_STEP = (
    Stage(title="between steps", parameters=SLICE, gradients=SLICE, optimiser=SLICE, leads_to="all-gather"),
    Stage(title="forward", parameters=WHOLE, gradients=NOTHING, optimiser=SLICE, leads_to="backward"),
    Stage(title="end of backward", parameters=WHOLE, gradients=OWN, optimiser=SLICE, leads_to="reduce-\nscatter"),
    Stage(title="optimiser's step", parameters=SLICE, gradients=SLICE, optimiser=SLICE),
)
DDP_STEP = (
    Stage(title="between steps", parameters=WHOLE, gradients=WHOLE, optimiser=WHOLE, leads_to="zero_grad"),
    Stage(title="forward", parameters=WHOLE, gradients=NOTHING, optimiser=WHOLE, leads_to="backward"),
    Stage(title="end of backward", parameters=WHOLE, gradients=OWN, optimiser=WHOLE, leads_to="all-reduce"),
    Stage(title="optimiser's step", parameters=WHOLE, gradients=WHOLE, optimiser=WHOLE),
)
