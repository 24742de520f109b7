"""What a rank holds, from arithmetic alone: fp32 parameters and Adam, no torch import.

P parameters cost 4P bytes; so do their gradients, and each of Adam's two moments. N is the number of ranks. The state
and its division follow Rajbhandari et al. 2020, arXiv:1910.02054; what FSDP holds within a step follows the order in
which FSDP1 and FSDP2 allocate, as their traces in notebooks 03 and 04 show it. Padding is left aside.
"""

from dataclasses import dataclass

from fsdp_helpers.config import is_sharded
from fsdp_helpers.planning.state import FP32_BYTES, WITHOUT_GRADIENT_BYTES, held_bytes


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, how it is cut, and what one rank's images need.

    `activation_bytes` is what one process needs at its peak beyond its 16 P bytes of state, with one rank's images:
    measure it once, on one process.
    """

    num_params: int  # P
    unit_params: tuple[int, ...] = ()  # parameters of each FSDP unit below the root; none: one unit
    activation_bytes: int = 0

    @property
    def root_params(self) -> int:
        return self.num_params - sum(self.unit_params)

    @property
    def largest_unit(self) -> int:
        return max(self.unit_params, default=self.num_params)


def peak_bytes(strategy: str, api: str, workload: Workload, world_size: int) -> int:
    """The highest point of a step: with the activations, or where the largest unit's gradients are reduced."""
    if not is_sharded(strategy):
        return held_bytes(strategy, workload.num_params, world_size) + workload.activation_bytes
    return max(_peak_with_activations(api, workload, world_size), _peak_in_reduction(api, workload, world_size))


def _peak_with_activations(api: str, workload: Workload, world_size: int) -> int:
    """Late in backward: the root whole in parameters and gradients, all other gradients reduced to slices.

    FSDP2 keeps what went into a reduce-scatter until the next one, so the last unit's whole gradients are there too.
    """
    kept_input = max(workload.unit_params, default=0) if api == "fsdp2" else 0
    return (
        WITHOUT_GRADIENT_BYTES * workload.num_params // world_size
        + FP32_BYTES * sum(workload.unit_params) // world_size
        + FP32_BYTES * (2 * workload.root_params + kept_input)
        + workload.activation_bytes
    )


def _peak_in_reduction(api: str, workload: Workload, world_size: int) -> int:
    """The largest unit's reduce-scatter: its gradients, and the same laid out for sending, are both whole.

    FSDP1 still has the unit's gathered parameters; FSDP2 has freed them, and takes a new slice for the result.
    """
    unit = workload.largest_unit
    of_unit = 3 * unit if api == "fsdp1" else 2 * unit + unit // world_size
    others = workload.num_params - unit - workload.root_params if workload.unit_params else 0
    gathered_root = workload.root_params if workload.unit_params else 0
    return (
        WITHOUT_GRADIENT_BYTES * workload.num_params // world_size
        + FP32_BYTES * others // world_size
        + FP32_BYTES * (gathered_root + of_unit)
    )
