"""Calculate the bytes that optimizers hold between steps, and the bytes in flight during a step. No torch import.

The temporaries in a step are those of torch 2.15, `torch/optim`. A fused Adam kernel needs none. Adam's `foreach`
implementation (torch's default on a GPU) computes all square roots before it uses the first. The loop over parameters
needs two tensors as large as the current parameter. SGD always changes parameters in place. Adam with 8-bit moments
keeps an fp32 scale for every 256 values (Dettmers et al. 2022, arXiv:2110.02861); we plan it but don't run it.
"""

from dataclasses import dataclass
from typing import Literal

SCALED_TOGETHER = 256  # the number of values in an 8-bit moment that share one fp32 scale


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optimizer's memory: the state it keeps between steps, and the temporaries it needs during a step."""

    title: str
    moments: int  # values kept for each trained value
    in_flight: Literal["none", "all", "largest"] = "none"  # temporaries of a step
    in_8_bits: bool = False

    def state_terms(self, values: int, value_bytes: int) -> list[tuple[str, int, int]]:
        """Return (name, number of values, bytes per value) for each kind of state, given `values` trained values."""
        if not self.moments:
            return []
        if not self.in_8_bits:
            name = {1: "momentum", 2: "two moments"}[self.moments]
            return [(name, values, self.moments * value_bytes)]
        return [
            ("two moments in 8 bits", values, self.moments),
            ("their scales", -(-values // SCALED_TOGETHER), self.moments * 4),
        ]

    def state_bytes(self, values: int, value_bytes: int = 4) -> int:
        return sum(count * size for _, count, size in self.state_terms(values, value_bytes))

    def in_flight_values(self, all_values: int, largest_values: int) -> int:
        """Return the number of values in flight during a step; the largest tensor has `largest_values` values."""
        return {"none": 0, "all": all_values, "largest": 2 * largest_values}[self.in_flight]


OPTIMIZERS = {
    "adam": Optimizer(title="Adam, fused", moments=2),
    "adam-foreach": Optimizer(title="Adam, foreach", moments=2, in_flight="all"),
    "adam-loop": Optimizer(title="Adam, one parameter at a time", moments=2, in_flight="largest"),
    "sgd": Optimizer(title="SGD", moments=0),
    "sgd-momentum": Optimizer(title="SGD with momentum", moments=1),
    "adam-8bit": Optimizer(title="Adam with 8-bit moments", moments=2, in_8_bits=True),
}


def named_optimizer(name: str) -> Optimizer:
    """Return the optimizer with that name. Raises ValueError if it isn't in OPTIMIZERS."""
    if name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {name!r}; choose one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]
