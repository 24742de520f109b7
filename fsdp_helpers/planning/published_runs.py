"""Published training runs, each with its plan. No torch import."""

from dataclasses import dataclass

from fsdp_helpers.models.shapes import LLAMA_SHAPES, LlamaShape
from fsdp_helpers.planning.cluster import Cluster
from fsdp_helpers.planning.models import llama_subject
from fsdp_helpers.planning.plan import Plan, Settings, make_plan

GIB = 2**30
LLAMA_2 = {"vocabulary": 32_000, "context": 4_096}
SHAPES = LLAMA_SHAPES | {
    # Llama 2, arXiv:2307.09288, table 1, and the models' config.json
    "llama-2-7b": LlamaShape(width=4096, depth=32, num_heads=32, num_kv_heads=32, mlp_width=11008, **LLAMA_2),
    "llama-2-13b": LlamaShape(width=5120, depth=40, num_heads=40, num_kv_heads=40, mlp_width=13824, **LLAMA_2),
    "llama-2-70b": LlamaShape(width=8192, depth=80, num_heads=64, num_kv_heads=8, mlp_width=28672, **LLAMA_2),
}
TITAN_A100 = "torchtitan, docs/performance.md, 2024"
TITAN_H100 = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_MACHINE = "96 GB, 500 W"  # of its H100s; the H100 in our table has 80 GB and 700 W
FMS = "foundation-model-stack/fms-fsdp, README"


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published run: its model, its settings and its results."""

    source: str
    model: str
    device: str
    world_size: int
    sequences: int  # per rank, in one forward and backward
    recomputed: str
    tokens_per_s: float  # per rank
    memory_bytes: float | None = None  # the most memory that a rank reserved
    replicas: int | None = None  # the number of copies of the state if sharding is hybrid
    machine: str = ""  # how its GPUs differ from the device in our table

    def plan(self) -> Plan:
        """Return the plan for this run, in bf16, with each block as a unit."""
        subject = llama_subject(self.model, SHAPES[self.model])
        hybrid = {"sharding": "hybrid", "replicas": self.replicas} if self.replicas else {}
        settings = Settings(
            batch=self.sequences * subject.sequence,
            precision="bf16",
            activation_checkpointing=self.recomputed,
            optimizer="adam",
            **hybrid,
        )
        return make_plan(subject, settings, Cluster.of(self.device, self.world_size))


PUBLISHED = (
    Published(
        source=TITAN_H100, model="llama-8b", device="h100", world_size=8, sequences=2, recomputed="selective",
        tokens_per_s=5_762, memory_bytes=82.4 * GIB, machine=TITAN_MACHINE,
    ),
    Published(
        source=TITAN_H100, model="llama-8b", device="h100", world_size=128, sequences=2, recomputed="selective",
        tokens_per_s=5_605, memory_bytes=67.0 * GIB, machine=TITAN_MACHINE,
    ),
    Published(
        source=TITAN_A100, model="llama-8b", device="a100", world_size=64, sequences=1, recomputed="selective",
        tokens_per_s=2_973,
    ),
    Published(
        source=TITAN_A100, model="llama-70b", device="a100", world_size=64, sequences=1, recomputed="units",
        tokens_per_s=331,
    ),
    Published(
        source=TITAN_A100, model="llama-2-13b", device="a100", world_size=64, sequences=2, recomputed="none",
        tokens_per_s=2_162,
    ),
    Published(
        source=TITAN_A100, model="llama-2-70b", device="a100", world_size=64, sequences=2, recomputed="units",
        tokens_per_s=353,
    ),
    Published(
        source=FMS, model="llama-2-7b", device="a100", world_size=128, sequences=2, recomputed="none",
        tokens_per_s=3_760, replicas=16,
    ),
    Published(
        source=FMS, model="llama-2-70b", device="a100", world_size=128, sequences=6, recomputed="units",
        tokens_per_s=380,
    ),
)  # fmt: skip
