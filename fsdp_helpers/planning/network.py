"""Estimate how long a collective takes, from bandwidth and latency within nodes and between them. No torch import.

A ring of ranks passes through every node, and every rank has a link out of its node. NCCL runs as many rings as there
are links, so a collective over full nodes uses all of a node's links, and each rank's link carries its share.
Within a node, each ring goes from rank to rank over the fast links. The slower of the two kinds of links determines the
time. Sources: NCCL's own model of a ring, `src/graph/tuning.cc` (`ncclTopoTuneModel`), from which we take the latency
per step within and between nodes; nccl-tests, `doc/PERFORMANCE.md`, on bus bandwidth.
"""

from dataclasses import dataclass

from fsdp_helpers.planning.traffic import ring_sent_bytes

STEPS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # times around the ring
# In NCCL's model (protocol "Simple"), a ring takes 8.4 µs to start, 3.4 µs per step over NVLink, 9.6 µs over the network.
WITHIN_LATENCY_S, BETWEEN_LATENCY_S, START_S = 3.4e-6, 9.6e-6, 8.4e-6


@dataclass(frozen=True, kw_only=True)
class Network:
    """The links between ranks: the bytes per second that a rank sends, within its node and to other nodes."""

    between_bytes_per_s: float
    within_bytes_per_s: float | None = None  # defaults to between_bytes_per_s
    ranks_per_node: int = 1
    within_latency_s: float = WITHIN_LATENCY_S
    between_latency_s: float = BETWEEN_LATENCY_S
    start_s: float = START_S
    sums_twice: bool = False  # gloo's reduce-scatter is an all-reduce, after which each rank keeps only its shard

    def seconds(self, op: str, full_bytes: float, num_ranks: int, *, stride: int = 1) -> float:
        """Return how many seconds `op` takes across `num_ranks` ranks whose numbers are `stride` apart.

        `full_bytes` is the size of the full tensor, as in `ring_sent_bytes`.
        """
        if num_ranks == 1 or not full_bytes:
            return 0.0
        if op == "reduce_scatter" and self.sums_twice:
            op = "all_reduce"
        in_node = max(1, min(num_ranks, self.ranks_per_node // stride))  # the ring's ranks in one node
        nodes = -(-num_ranks // in_node)
        sent_bytes = ring_sent_bytes(op, full_bytes, num_ranks)
        within = self.within_bytes_per_s or self.between_bytes_per_s
        rate = min(within if in_node > 1 else float("inf"), self.between_bytes_per_s * in_node if nodes > 1 else within)
        around = STEPS.get(op, 1)
        hops_s = (num_ranks - nodes) * self.within_latency_s + (nodes - 1) * self.between_latency_s
        return self.start_s + around * hops_s + sent_bytes / rate
