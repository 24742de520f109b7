"""A step of one process, event by event: the record every peak is computed from. No torch.

It's measured once, in one process with one rank's images (`measuring.step_profile`), or built from the bytes of a block
(`planning.transformer`). It doesn't depend on the strategy.
"""

from dataclasses import dataclass, field
from math import prod

ROOT = ""  # the name of the whole model among its modules


@dataclass(frozen=True, kw_only=True)
class Moment:
    """An event of a step, and the bytes of activations until the next event.

    Activations here are everything except parameters, finished gradients and optimizer state: tensors that forward
    keeps for backward, and temporaries of an operation.
    """

    event: str  # enter_forward, leave_forward, enter_backward, leave_backward, or gradient: one is finished. Recomputed
    # modules enter and leave forward again, within backward
    name: str  # of the module or, for "gradient", of the parameter
    activation_bytes: int  # at the event
    highest_bytes: int  # the most until the next event


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """The parameters of a model, by name, and one forward and backward of it in one process."""

    shapes: dict[str, tuple[int, ...]]
    moments: tuple[Moment, ...]
    frozen: frozenset[str] = frozenset()  # parameters that are not trained
    tied: dict[str, str] = field(default_factory=dict)  # a parameter's further names -> its name in `shapes`
    buffer_bytes: int = 0  # buffers, which no strategy shards
    thawed: frozenset[str] = frozenset()  # frozen parameters that share a unit with a trained one ...
    thawed_moments: tuple[Moment, ...] = ()  # ... and the same step, in which these get gradients too

    @property
    def flat_moments(self) -> tuple[Moment, ...]:
        """Return the step in which a unit's parameters are one tensor, which either needs a gradient or doesn't."""
        return self.thawed_moments or self.moments

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
