"""Calculate the bytes that a rank sends in a step along each dimension of a mesh. No torch import.

All functions assume ring collectives, as `ring_sent_bytes` does, and fp32 values unless you pass `value_bytes`.
`tokens` is the number of tokens that the ranks along the dimension process together in a step: the number of sequences
times their full length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fsdp_helpers.planning.precisions import FP32_BYTES
from fsdp_helpers.planning.traffic import ring_sent_bytes


def fsdp_sent_bytes(params: int, ranks: int, *, reshards: bool = True, value_bytes: int = FP32_BYTES) -> int:
    """Return the bytes for 3 · (N−1)/N · P values: FSDP all-gathers each unit twice and reduce-scatters it once.

    If it never `reshards` within a step, as in a pipeline, it all-gathers each unit only once. Padding isn't counted, and
    every parameter is assumed to be in a unit below the root.
    """
    full_bytes = params * value_bytes
    gathered = ring_sent_bytes("all_gather", (2 if reshards else 1) * full_bytes, ranks)
    return gathered + ring_sent_bytes("reduce_scatter", full_bytes, ranks)


def hybrid_sent_bytes(params: int, shards: int, replicas: int, *, value_bytes: int = FP32_BYTES) -> int:
    """Return the bytes for FSDP across S `shards`, plus 2 · (R−1)/R · P/S values all-reduced across R `replicas`."""
    reduced = ring_sent_bytes("all_reduce", params * value_bytes // shards, replicas)
    return fsdp_sent_bytes(params, shards, value_bytes=value_bytes) + reduced


def tensor_sent_bytes(layers: int, tokens: int, width: int, ranks: int, *, value_bytes: int = FP32_BYTES) -> int:
    """Return the bytes for 2 all-reduces in each block's forward pass and 2 in its backward pass.

    That's 4 · L · 2 · (t−1)/t · tokens · width values, for L layers and t ranks. With sequence parallelism, each
    all-reduce is split into a reduce-scatter and an all-gather; the number of bytes stays the same.

    Sources: M. Shoeybi et al. 2019, arXiv:1909.08053, section 3; V. Korthikanti et al. 2022, arXiv:2205.05198.
    """
    return 4 * layers * ring_sent_bytes("all_reduce", tokens * width * value_bytes, ranks)


def context_sent_bytes(layers: int, tokens: int, kv_width: int, ranks: int, *, value_bytes: int = FP32_BYTES) -> int:
    """Return the bytes sent to all-gather keys and values, and to reduce-scatter their gradients.

    That's 4 · L · (c−1)/c · tokens · kv_width values, for L layers and c ranks. `kv_width` is the width of the keys,
    which is less than the model's if several heads share keys. A ring that keeps the tensors it receives sends the same
    number of bytes; a ring that passes keys and values around again in backward sends 1.5 times as many.

    Source: H. Liu et al. 2023, arXiv:2310.01889.
    """
    full_bytes = 2 * tokens * kv_width * value_bytes  # keys and values
    gathered = ring_sent_bytes("all_gather", full_bytes, ranks)
    return layers * (gathered + ring_sent_bytes("reduce_scatter", full_bytes, ranks))


def pipeline_sent_bytes(tokens: int, width: int, *, at_the_end: bool = False, value_bytes: int = FP32_BYTES) -> int:
    """Return the bytes for sending activations forward and gradients back: 2 · tokens · width values.

    A stage `at_the_end` (the first or the last) sends only one of the two. The numbers of stages and micro-batches
    don't matter. Source: Y. Huang et al. 2018, arXiv:1811.06965.
    """
    return (1 if at_the_end else 2) * tokens * width * value_bytes


def pipeline_bubble(stages: int, micro_batches: int) -> float:
    """Return the fraction of a step that a stage spends waiting: (S−1) / (M+S−1), for both GPipe and 1F1B.

    Source: D. Narayanan et al. 2021, arXiv:2104.04473, section 2.2, which divides by M instead, the time that the work
    would take without any waiting.
    """
    return (stages - 1) / (micro_batches + stages - 1)


def expert_sent_bytes(
    layers: int, rows_to_others: int, rows_from_others: int, width: int, *, value_bytes: int = FP32_BYTES
) -> int:
    """Return the bytes for sending tokens to experts and results back: 2 · L · (out + in) · width values.

    The factor of 2 is for forward and backward. `rows_to_others` (out) and `rows_from_others` (in) are the numbers of
    tokens that leave and reach this rank in one layer. With a balanced router, (e−1)/e of a rank's tokens leave it, and
    the same number reach it. The counts themselves, which are also sent, aren't included.

    Source: D. Lepikhin et al. 2020, arXiv:2006.16668.
    """
    return 2 * layers * (rows_to_others + rows_from_others) * width * value_bytes


class PipelineWork(NamedTuple):
    """A micro-batch's forward pass ("F") or backward pass ("B") in a stage, timed in units of one forward pass."""

    kind: str
    number: int
    start: float
    end: float


def pipeline_spans(orders: Sequence[Sequence[str]], *, backward: float = 2.0) -> list[list[PipelineWork]]:
    """Return the earliest possible schedule for each stage; `orders` lists each stage's work, such as "F0" or "B3".

    A forward pass waits for the previous stage, and a backward pass waits for the next one. A forward pass takes 1 unit
    of time, and a backward pass takes `backward` units; sending is free. Raises ValueError for orders that deadlock.
    """
    ends: dict[tuple[int, str], float] = {}
    spans: list[list[PipelineWork]] = [[] for _ in orders]
    while any(len(done) < len(order) for done, order in zip(spans, orders, strict=True)):
        before = len(ends)
        for stage, (done, order) in enumerate(zip(spans, orders, strict=True)):
            if len(done) == len(order):
                continue
            name = order[len(done)]
            kind, number = name[0], int(name[1:])
            needed = stage - 1 if kind == "F" else stage + 1
            if 0 <= needed < len(orders) and (needed, name) not in ends:
                continue
            start = max(ends.get((needed, name), 0.0), done[-1].end if done else 0.0)
            ends[stage, name] = start + (1.0 if kind == "F" else backward)
            done.append(PipelineWork(kind, number, start, ends[stage, name]))
        if len(ends) == before:
            waiting = [order[len(done)] for done, order in zip(spans, orders, strict=True) if len(done) < len(order)]
            raise ValueError(f"the stages wait for each other: {', '.join(waiting)} can never begin")
    return spans


def idle_share(spans: Sequence[Sequence[PipelineWork]]) -> float:
    """Return the fraction of the schedule that a stage spends idle, on average over all stages."""
    end = max(work.end for stage in spans for work in stage)
    busy = sum(work.end - work.start for stage in spans for work in stage)
    return 1 - busy / (end * len(spans))


def most_in_flight(order: Sequence[str]) -> int:
    """Return the largest number of micro-batches whose activations a stage holds at the same time."""
    in_flight = most = 0
    for name in order:
        in_flight += 1 if name.startswith("F") else -1
        most = max(most, in_flight)
    return most


@dataclass(frozen=True, kw_only=True)
class DimensionedRun:
    """A training run on a mesh with several dimensions: its model, its mesh, and its published numbers."""

    model: str
    params: int
    layers: int
    width: int
    kv_width: int
    data: int
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    sequences: int  # per step and data-parallel rank
    length: int  # tokens per sequence
    tokens_per_s: float | None = None  # per GPU
    memory_gib: float | None = None  # per GPU

    @property
    def num_gpus(self) -> int:
        return self.data * self.tensor * self.context * self.pipeline

    def sent_bytes(self, value_bytes: int = 2) -> dict[str, int]:
        """Return the bytes that a rank sends in a step along each dimension, with `value_bytes` per value.

        A rank has `layers / pipeline` layers (a fraction, if they don't split evenly), works on `1 / context` of the
        tokens, and keeps `1 / tensor` of each matrix, which FSDP shards across the data and context ranks, without
        resharding within a pipeline. In a pipeline of three or more stages, the rank is in the middle.
        """
        layers = self.layers / self.pipeline
        own_tokens = self.sequences * self.length // self.context
        own_params = self.params // (self.tensor * self.pipeline)
        both = {"value_bytes": value_bytes}
        sent = {
            "FSDP": fsdp_sent_bytes(own_params, self.data * self.context, reshards=self.pipeline == 1, **both),
            "tensor": round(layers * tensor_sent_bytes(1, own_tokens, self.width, self.tensor, **both)),
            "context": round(
                layers
                * context_sent_bytes(
                    1, self.sequences * self.length, self.kv_width // self.tensor, self.context, **both
                )
            ),
            "pipeline": 0,
        }
        if self.pipeline > 1:
            sent["pipeline"] = pipeline_sent_bytes(own_tokens, self.width, at_the_end=self.pipeline == 2, **both)
        return {name: size for name, size in sent.items() if size}


LLAMA_70B = {"model": "Llama 3.1 70B", "params": 70_553_706_496, "layers": 80, "width": 8192, "kv_width": 1024}
LLAMA_405B = {"model": "Llama 3.1 405B", "params": 405_853_388_800, "layers": 126, "width": 16384, "kv_width": 1024}
# torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 4 (2D + AsyncTP), 5 (Interleaved 1F1B) and 6 (1F1B):
# H100s, torch.compile, Float8, full recomputation.
PUBLISHED_DIMENSIONS = (
    DimensionedRun(
        **LLAMA_70B, data=32, tensor=8, sequences=16, length=8192, tokens_per_s=876, memory_gib=67.6,
    ),
    DimensionedRun(
        **LLAMA_405B, data=8, tensor=8, pipeline=8, sequences=32, length=8192, tokens_per_s=128, memory_gib=72.7,
    ),
    *(
        DimensionedRun(
            **LLAMA_405B, data=8 // context, tensor=8, context=context, pipeline=8, sequences=8,
            length=32_768 * context, tokens_per_s=speed, memory_gib=memory,
        )
        for context, speed, memory in ((1, 76, 75.3), (2, 47, 75.9), (4, 31, 77.1), (8, 16, 84.9))
    ),
)  # fmt: skip
