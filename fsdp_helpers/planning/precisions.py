"""Bytes per value in each precision. No torch import."""

from dataclasses import dataclass

FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class ValueBytes:
    """Bytes per value when stored and updated, when unsharded for computation, and when reduced."""

    kept: int
    gathered: int
    reduced: int


PRECISIONS = {
    "fp32": ValueBytes(kept=4, gathered=4, reduced=4),
    "bf16": ValueBytes(kept=4, gathered=2, reduced=4),  # mixed: computes in bf16, keeps fp32
    "fp16": ValueBytes(kept=4, gathered=2, reduced=4),  # the same in fp16, with a scaled loss: for V100 and T4
    "pure-bf16": ValueBytes(kept=2, gathered=2, reduced=2),  # moments included
}
