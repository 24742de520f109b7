"""Calculate the bytes that a rank holds between two steps, for fp32 parameters and Adam.

P parameters take 4P bytes, and so do their gradients and each of Adam's two moments. N is the number of ranks. Padding
isn't counted, as in Rajbhandari et al. 2020, arXiv:1910.02054.
"""

from dataclasses import dataclass

from fsdp_helpers.config import is_sharded

FP32_BYTES = 4
STATE_BYTES = 4 * FP32_BYTES  # parameter, gradient, two moments
# Bytes per parameter if nothing is sharded. DDP has a second copy of each gradient, in a bucket.
WHOLE_BYTES = {"local": STATE_BYTES, "ddp": STATE_BYTES + FP32_BYTES}


@dataclass(frozen=True, kw_only=True)
class ValueBytes:
    """Bytes per value when it's stored and updated, when it's unsharded to compute, and when it's reduced."""

    kept: int
    gathered: int
    reduced: int


PRECISIONS = {
    "fp32": ValueBytes(kept=4, gathered=4, reduced=4),
    "bf16": ValueBytes(kept=4, gathered=2, reduced=4),  # mixed: computes in bf16, keeps fp32
    "fp16": ValueBytes(kept=4, gathered=2, reduced=4),  # the same in fp16, with a scaled loss: for V100 and T4
    "pure-bf16": ValueBytes(kept=2, gathered=2, reduced=2),  # moments included
}


def held_bytes(strategy: str, num_params: int, world_size: int, *, bucket_view: bool = False) -> int:
    """Return a rank's bytes between two steps: 16 P in one process, 20 P with DDP's buckets, 16 P / N with FSDP.

    With `bucket_view`, DDP's gradients are views of its buckets, which saves 4 P. Raises ValueError for an unknown
    strategy.
    """
    if is_sharded(strategy):
        return STATE_BYTES * num_params // world_size
    return (STATE_BYTES if bucket_view else WHOLE_BYTES[strategy]) * num_params


def num_shards(sharding: str, world_size: int) -> int:
    """Return the number of ranks that share a copy of the state: half with "hybrid", one with "none", otherwise all."""
    return {"hybrid": world_size // 2, "none": 1}.get(sharding, world_size)
