"""What a rank keeps between two steps, from arithmetic alone: fp32 parameters and Adam.

P parameters cost 4P bytes; so do their gradients, and each of Adam's two moments. N is the number of ranks. The state
and its division follow Rajbhandari et al. 2020, arXiv:1910.02054. Padding is left aside.
"""

FP32_BYTES = 4
STATE_BYTES = 4 * FP32_BYTES  # parameter, gradient, two moments
WITHOUT_GRADIENT_BYTES = 3 * FP32_BYTES


def held_bytes(strategy: str, num_params: int, world_size: int) -> int:
    """Bytes between two steps: 16 P in one process, 4 P more in DDP's buckets, 16 P / N under FSDP."""
    if strategy == "local":
        return STATE_BYTES * num_params
    if strategy == "ddp":
        return (STATE_BYTES + FP32_BYTES) * num_params
    return STATE_BYTES * num_params // world_size
