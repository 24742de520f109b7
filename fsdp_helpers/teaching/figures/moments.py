"""What every rank has at each moment of a step, for the drawings of DDP and FSDP."""

from dataclasses import dataclass

WHOLE, SLICE, NOTHING, OWN = "whole", "slice", "nothing", "own"


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One moment of a step: how much of the parameters, gradients and optimiser state every rank has then.

    "own" are whole gradients of the rank's own images, not yet averaged with those of the other ranks.
    """

    title: str
    parameters: str
    gradients: str
    optimiser: str
    leads_to: str = ""  # what happens between this moment and the next


FSDP_STEP = (
    Moment(title="between steps", parameters=SLICE, gradients=SLICE, optimiser=SLICE, leads_to="all-gather"),
    Moment(title="forward", parameters=WHOLE, gradients=NOTHING, optimiser=SLICE, leads_to="backward"),
    Moment(title="end of backward", parameters=WHOLE, gradients=OWN, optimiser=SLICE, leads_to="reduce-\nscatter"),
    Moment(title="optimiser's step", parameters=SLICE, gradients=SLICE, optimiser=SLICE),
)
DDP_STEP = (
    Moment(title="between steps", parameters=WHOLE, gradients=WHOLE, optimiser=WHOLE, leads_to="zero_grad"),
    Moment(title="forward", parameters=WHOLE, gradients=NOTHING, optimiser=WHOLE, leads_to="backward"),
    Moment(title="end of backward", parameters=WHOLE, gradients=OWN, optimiser=WHOLE, leads_to="all-reduce"),
    Moment(title="optimiser's step", parameters=WHOLE, gradients=WHOLE, optimiser=WHOLE),
)
