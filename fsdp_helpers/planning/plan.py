"""A plan: what a model takes on a number of devices, how long a step communicates, and whether it fits. No torch.

GB are 10^9 bytes. What is counted is what PyTorch allocates for tensors; what lies outside the count is an allowance.
"""

import math
from dataclasses import asdict, dataclass, fields

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.planning.held import own_state
from fsdp_helpers.planning.models import Subject
from fsdp_helpers.planning.peak import walk_step
from fsdp_helpers.planning.traffic import step_range_s
from fsdp_helpers.planning.walk.ledger import Peak
from fsdp_helpers.quantities import GB
from fsdp_helpers.records import CollectiveCount, StateBytes

# CUDA's context with its kernels: 0.5 to 2 GB, S. Bekman, "Machine Learning Engineering", on additional GPU memory use.
CONTEXT_BYTES = 2 * GB
# NCCL's buffers (4 MiB for each pair of devices and channel, NCCL_BUFFSIZE) and a fragmented pool: a choice, no count.
NCCL_AND_FRAGMENTATION_BYTES = 2 * GB
LINK_BYTES_PER_S = 50e9  # 400 Gbit/s for each device, as in many clusters
CATEGORIES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimiser state",
    "gathered": "gathered units",
    "activations": "activations",
    "buffers": "communication buffers",
}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """So many devices, one for each rank: their memory, their link, their speed.

    Raises ValueError for what no cluster can be.
    """

    world_size: int
    device_memory_bytes: float
    bandwidth_bytes_per_s: float = LINK_BYTES_PER_S  # that one rank sends at
    flops_per_s: float | None = None  # that a model reaches, not those of the data sheet
    allowance_bytes: float = CONTEXT_BYTES + NCCL_AND_FRAGMENTATION_BYTES  # outside the count

    def __post_init__(self) -> None:
        require_whole("world_size", self.world_size)
        for setting in fields(self)[1:]:
            value = getattr(self, setting.name)
            lowest = "zero or more" if setting.name == "allowance_bytes" else "above zero"
            if value is not None and not (_is_number(value) and (value > 0 or value == 0 and "or more" in lowest)):
                raise ValueError(f"{setting.name} is {value}; it must be a number {lowest}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the model is trained on the cluster; the words are those of `TrainConfig`.

    Raises ValueError for settings that cannot work.
    """

    batch: int  # of one rank in one forward and backward, in the items of the model
    strategy: str = "fsdp-auto-wrap"
    api: str = "fsdp2"
    sharding: str = "full"
    replicas: int = 2  # groups of ranks, each with a copy of the state, where sharding is "hybrid"
    precision: str = "fp32"
    activation_checkpointing: str = "none"

    def __post_init__(self) -> None:
        for name in ("batch", "replicas"):
            require_whole(name, getattr(self, name))
        self.config()

    def config(self) -> TrainConfig:
        own = {name: value for name, value in asdict(self).items() if name not in ("batch", "replicas")}
        return TrainConfig(**own)

    def check_world_size(self, world_size: int) -> None:
        """Raise ValueError if `world_size` ranks cannot run these settings."""
        if self.strategy == "local" and world_size != 1:
            raise ValueError(
                f"strategy 'local' trains in one process, world_size is {world_size}; use 'ddp', or 1 rank"
            )
        if self.sharding == "hybrid" and (world_size % self.replicas or world_size // self.replicas < 2):
            raise ValueError(
                f"sharding 'hybrid' divides the ranks into {self.replicas} groups of two or more, world_size is "
                f"{world_size}; use a multiple of {self.replicas}, {2 * self.replicas} or more"
            )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one rank of the cluster needs, sends and computes in a step."""

    model: str
    item: str
    num_params: int
    settings: Settings
    cluster: Cluster
    peak: Peak  # on the rank with the largest slices
    state: StateBytes  # of rank 0, without padding
    collectives: tuple[CollectiveCount, ...]
    step_flops: int | None  # of one rank

    @property
    def host_bytes(self) -> int:
        """What lies in host memory instead of the device's."""
        return self.state.total_bytes if self.settings.strategy == "fsdp-offload" else 0

    @property
    def needed_bytes(self) -> float:
        return self.peak.bytes + self.cluster.allowance_bytes

    @property
    def spare_bytes(self) -> float:
        """Below zero where the plan does not fit."""
        return self.cluster.device_memory_bytes - self.needed_bytes

    @property
    def fits(self) -> bool:
        return self.spare_bytes >= 0

    @property
    def sent_bytes(self) -> int:
        return sum(collective.sent_bytes for collective in self.collectives)

    @property
    def communication_s(self) -> float:
        """The time in which the link carries what a rank sends in a step."""
        return self.sent_bytes / self.cluster.bandwidth_bytes_per_s

    @property
    def arithmetic_s(self) -> float | None:
        """The time for the arithmetic of a step, at the stated rate."""
        rate = self.cluster.flops_per_s
        return None if rate is None or self.step_flops is None else self.step_flops / rate

    @property
    def step_s(self) -> tuple[float, float] | None:
        """The shortest and the longest step: all communication hidden behind the arithmetic, or none of it."""
        if self.arithmetic_s is None:
            return None
        return step_range_s(self.arithmetic_s, self.communication_s)

    @property
    def items_per_s(self) -> tuple[float, float] | None:
        """All ranks together, in the shortest and in the longest step."""
        if self.step_s is None:
            return None
        items = self.settings.batch * self.cluster.world_size
        return items / self.step_s[0], items / self.step_s[1]

    def by_category(self) -> dict[str, int]:
        """Bytes at the peak, by the words of CATEGORIES."""
        sizes = self.peak.by_kind()
        return {words: sizes[kind] for kind, words in CATEGORIES.items()}

    def to_json(self) -> dict:
        """The plan as plain values."""
        return {
            "model": self.model,
            "num_params": self.num_params,
            "settings": asdict(self.settings),
            "cluster": asdict(self.cluster),
            "state": asdict(self.state),
            "peak": {"bytes": self.peak.bytes, "when": self.peak.when, **self.peak.by_kind()},
            "terms": [{"term": term, "formula": formula, "bytes": size} for term, formula, size in self.peak.rows()],
            "host_bytes": self.host_bytes,
            "needed_bytes": self.needed_bytes,
            "fits": self.fits,
            "collectives": [asdict(collective) for collective in self.collectives],
            "sent_bytes": self.sent_bytes,
            "communication_s": self.communication_s,
            "arithmetic_s": self.arithmetic_s,
            "step_s": self.step_s,
            "items_per_s": self.items_per_s,
        }


def make_plan(subject: Subject, settings: Settings, cluster: Cluster) -> Plan:
    """The plan of `subject` on `cluster`, for devices beside a host, whose collectives need no copies.

    Raises ValueError where the ranks do not go with the settings.
    """
    settings.check_world_size(cluster.world_size)
    config = settings.config()
    units = () if settings.strategy == "fsdp" else subject.units
    profile = subject.profile_of(settings.batch, settings.precision, settings.activation_checkpointing)
    replicas = settings.replicas if settings.sharding == "hybrid" else None
    step = walk_step(profile, config, cluster.world_size, units, backend="nccl", replicas=replicas, has_host=True)
    return Plan(
        model=subject.name,
        item=subject.item,
        num_params=subject.num_params,
        settings=settings,
        cluster=cluster,
        peak=step.peak,
        state=own_state(profile, config, cluster.world_size, units, replicas=replicas),
        collectives=step.collectives,
        step_flops=step_flops(subject, settings),
    )


def step_flops(subject: Subject, settings: Settings) -> int | None:
    """Backward takes two products for each of forward; recomputing takes forward once more, of all but a little.

    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
    """
    if subject.forward_flops is None:
        return None
    passes = 4 if settings.activation_checkpointing == "units" else 3
    return passes * subject.forward_flops(settings.batch)


def require_whole(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a whole number, 1 or more")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
