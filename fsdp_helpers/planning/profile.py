"""Describe a step in one process, event by event; the planner calculates every peak from this profile.

No torch import. A profile is either measured once, in one process with one rank's images (`measuring.step_profile`), or
calculated from a block's bytes (`planning.transformer`). Profiles don't depend on the strategy.
"""

from dataclasses import dataclass, field
from math import prod

ROOT = ""  # the full model's name among its modules


@dataclass(frozen=True, kw_only=True)
class Moment:
    """An event in a step, and the activation bytes from then until the next event.

    Activations here are everything except parameters, finished gradients and optimizer state: the tensors that forward
    keeps for backward, and the temporaries that operations allocate.
    """

    # enter_forward, leave_forward, enter_backward, leave_backward, or gradient (a gradient is finished). A recomputed
    # module enters and leaves forward again during backward.
    event: str
    name: str  # the module's name or, for "gradient", the parameter's
    activation_bytes: int  # at the event
    highest_bytes: int  # the peak until the next event


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """A model's parameters by name, and the events in one forward and backward pass in one process."""

    shapes: dict[str, tuple[int, ...]]
    moments: tuple[Moment, ...]
    frozen: frozenset[str] = frozenset()  # parameters that aren't trained
    tied: dict[str, str] = field(default_factory=dict)  # a parameter's other names -> its name in `shapes`
    buffer_bytes: int = 0  # buffers, which no strategy shards

    @property
    def num_params(self) -> int:
        return sum(prod(shape) for shape in self.shapes.values())

    @property
    def trained(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the trained parameters."""
        return {name: shape for name, shape in self.shapes.items() if name not in self.frozen}

    @property
    def num_trained(self) -> int:
        return sum(prod(shape) for shape in self.trained.values())
