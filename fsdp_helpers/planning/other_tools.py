"""The memory estimates of two widely used tools, by their published formulas. No torch.

Both look only at parameters: neither knows about activations, units, or the buffers of collectives.
"""

from collections import Counter
from math import prod

from fsdp_helpers.planning.profile import StepProfile
from fsdp_helpers.planning.state import FP32_BYTES


def accelerate_bytes(profile: StepProfile, precision: str = "fp32") -> int:
    """Return the peak that `accelerate estimate-memory` gives for training with Adam on one device; it has no sharding.

    In fp32, that's four times the model: parameters, gradients, two moments. In bf16, its largest number is that of the
    moments, twice the fp32 model. Source: `estimate_training_usage`, accelerate/commands/estimate.py.
    """
    return (4 if precision == "fp32" else 2) * FP32_BYTES * profile.num_params


def deepspeed_zero3_bytes(profile: StepProfile, world_size: int) -> int:
    """Return the result of `estimate_zero3_model_states_mem_needs_all_live` without offload, for one device.

    It's 4 bytes for each parameter of the largest layer, plus 18 for each parameter of the model divided by the number
    of devices: those of mixed precision, whatever the run's. Source: `estimate_zero3_model_states_mem_needs`,
    deepspeed/runtime/zero/stage3.py.
    """
    return 4 * largest_layer_params(profile) + 18 * profile.num_params // world_size


def largest_layer_params(profile: StepProfile) -> int:
    """Return the size of the module with the most parameters of its own, excluding modules inside it."""
    layers: Counter[str] = Counter()
    for name, shape in profile.shapes.items():
        layers[name.rpartition(".")[0]] += prod(shape)
    return max(layers.values())
