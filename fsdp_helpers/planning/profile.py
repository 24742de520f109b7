"""A step of one process, event by event: the record from which every peak is computed. No torch.

It is measured once, on one process with one rank's images (`measuring.step_profile`), or put together from the bytes of
a block (`planning.transformer`). Nothing in it depends on the strategy.
"""

from dataclasses import dataclass, field
from math import prod

ROOT = ""  # the name of the whole model among its modules


@dataclass(frozen=True, kw_only=True)
class Moment:
    """An event of a step, and the activations from it until the next event.

    Activations are all that is allocated besides parameters, finished gradients and optimizer state: what forward
    keeps for backward, and what an operation has in flight.
    """

    event: str  # enter_forward, leave_forward, enter_backward, leave_backward, or gradient: one is finished. What is
    # recomputed enters and leaves forward again, within backward
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
    buffer_bytes: int = 0  # tables and statistics, which no strategy shards
    thawed: frozenset[str] = frozenset()  # frozen parameters that share a unit with a trained one ...
    thawed_moments: tuple[Moment, ...] = ()  # ... and the same step, in which these get gradients too

    @property
    def flat_moments(self) -> tuple[Moment, ...]:
        """The step where the parameters of a unit are one tensor, which needs a gradient or needs none."""
        return self.thawed_moments or self.moments

    @property
    def num_params(self) -> int:
        return sum(prod(shape) for shape in self.shapes.values())

    @property
    def trained(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters that are trained."""
        return {name: shape for name, shape in self.shapes.items() if name not in self.frozen}

    @property
    def num_trained(self) -> int:
        return sum(prod(shape) for shape in self.trained.values())
