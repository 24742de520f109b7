"""Make a plan: how much memory a model takes per device, whether it fits, and how long a step takes. No torch import.

1 GB is 10^9 bytes. We calculate the bytes that PyTorch allocates for tensors, and set aside an allowance for everything
else.
"""

import math
from dataclasses import asdict, dataclass

from fsdp_helpers.config import (
    ACTIVATION_CHECKPOINTING,
    APIS,
    SHARDING,
    STRATEGIES,
    TrainConfig,
    is_sharded,
    require_positive_int,
    setting,
)
from fsdp_helpers.planning.cluster import MOST_RANKS, Cluster
from fsdp_helpers.planning.devices import ATTENTION_COST, RECOMPUTED_GAIN, TYPICAL_RANGE, named_device
from fsdp_helpers.planning.models import Subject, named_subject
from fsdp_helpers.planning.optimizers import OPTIMIZERS, named_optimizer
from fsdp_helpers.planning.own_shards import own_state
from fsdp_helpers.planning.peak import ONLY_FSDP2, Step, walk_step
from fsdp_helpers.planning.precisions import PRECISIONS
from fsdp_helpers.planning.profile import StepProfile
from fsdp_helpers.planning.step_time import Speed, StepTime, time_step
from fsdp_helpers.planning.walk.ledger import Peak
from fsdp_helpers.planning.walk.units import num_shards
from fsdp_helpers.records import CollectiveCount, StateBytes

UPDATE_PASSES = 3  # each parameter is read and written, and its gradient is read; moments are extra
HEAD = "head"  # the module of a language model whose logits can be computed in chunks
CATEGORIES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "gathered": "unsharded units",
    "activations": "activations",
    "buffers": "communication buffers",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings for training on the cluster, named as in `TrainConfig`.

    Raises ValueError for settings that can't work.
    """

    batch: int  # the number of items (images, tokens or samples) that a rank processes in one forward and backward
    strategy: str = setting(
        "fsdp-auto-wrap", "how state is sharded; auto-wrap makes each block a unit", choices=STRATEGIES
    )
    api: str = setting("fsdp2", "fully_shard (fsdp2); FullyShardedDataParallel (fsdp1) is refused", choices=APIS)
    sharding: str = setting(
        "full",
        "shard everything (full, ZeRO-3); shard everything, but keep parameters unsharded from forward to backward "
        "(grad-op, ZeRO-2); or shard everything within each of several groups of ranks (hybrid)",
        choices=tuple(kind for kind in SHARDING if kind != "none"),
    )
    replicas: int = setting(2, "number of groups for hybrid sharding, each with a full copy of the state")
    precision: str = setting(
        "fp32",
        "fp32; mixed precision with fp32 shards and reductions (bf16, or fp16 with a scaled loss); or "
        "everything in bf16, moments included (pure-bf16). The command's default is bf16 if --device has it, else fp32",
        choices=tuple(PRECISIONS),
    )
    activation_checkpointing: str = setting(
        "none",
        "what backward recomputes: nothing (none), all of each block (units), or all of it except matrix products "
        "(selective)",
        choices=ACTIVATION_CHECKPOINTING,
    )
    micro_batches: int = setting(
        1, "number of micro-batches in a step; each is one forward and backward pass over a rank's batch"
    )
    sync_micro_batches: bool | None = setting(
        None, "reduce gradients after every micro-batch (the default if parameters are sharded), or only after the last"
    )
    optimizer: str = setting(
        "adam",
        "Adam in one fused kernel (adam), as torch computes it by default on a GPU (adam-foreach), or one parameter at "
        "a time (adam-loop); Adam with 8-bit moments (adam-8bit); or SGD, without or with momentum",
        choices=tuple(OPTIMIZERS),
    )
    loss_chunks: int = setting(
        1, "compute logits and loss in N chunks of tokens; each chunk is computed again in backward"
    )

    def __post_init__(self) -> None:
        for name in ("batch", "replicas", "micro_batches", "loss_chunks"):
            require_positive_int(name, getattr(self, name))
        named_optimizer(self.optimizer)
        if self.precision not in PRECISIONS:
            raise ValueError(f"unknown precision {self.precision!r}; choose one of {', '.join(PRECISIONS)}")
        if self.api == "fsdp1":
            raise ValueError(ONLY_FSDP2)
        self.config()

    def config(self) -> TrainConfig:
        """Return the configuration for `walk_step`, which gets the precision and the optimizer separately."""
        names = ("strategy", "sharding", "activation_checkpointing", "micro_batches", "sync_micro_batches")
        own = {name: getattr(self, name) for name in names}
        return TrainConfig(**own, global_batch_size=self.micro_batches * MOST_RANKS)

    @property
    def measured_precision(self) -> str:
        """Return the precision in which to profile activations: for mixed precision without FSDP, that's autocast.

        fp16 counts as bf16, since its values are the same size.
        """
        precision = "bf16" if self.precision == "fp16" else self.precision
        return "autocast" if precision == "bf16" and not is_sharded(self.strategy) else precision

    def check_world_size(self, world_size: int) -> None:
        """Raise ValueError if these settings can't work on `world_size` ranks."""
        if self.strategy == "local" and world_size != 1:
            raise ValueError(
                f"strategy 'local' trains in one process, but world_size is {world_size}; use 'ddp', or 1 rank"
            )
        if self.sharding == "hybrid" and (world_size % self.replicas or world_size // self.replicas < 2):
            raise ValueError(
                f"sharding 'hybrid' divides the ranks into {self.replicas} groups of two or more, but world_size is "
                f"{world_size}; use a multiple of {self.replicas}, {2 * self.replicas} or more"
            )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One rank's step on the cluster: the bytes it needs, the bytes it sends, and the time it takes."""

    model: str
    item: str
    num_params: int
    sequence: int = 1  # items per sequence
    active_params: int | None = None  # the parameters that one token uses, if that isn't all of them
    settings: Settings
    cluster: Cluster
    peak: Peak  # of the rank with the largest shards
    state: StateBytes  # of rank 0, without padding
    collectives: tuple[CollectiveCount, ...]
    step_flops: int | None  # operations in one rank's step, recomputation included
    model_flops: int | None = None  # the same without recomputation
    time: StepTime | None = None
    checkpoint_bytes: int = 0

    @property
    def host_bytes(self) -> int:
        """Return the bytes that a rank holds in host memory instead of on the device."""
        return self.state.total_bytes if self.settings.strategy == "fsdp-offload" else 0

    @property
    def node_host_bytes(self) -> int:
        """Return the bytes that a node holds in host memory."""
        return self.host_bytes * self.cluster.node_ranks

    @property
    def needed_bytes(self) -> float:
        return self.peak.bytes + self.cluster.allowance_bytes

    @property
    def spare_bytes(self) -> float:
        """Return the bytes that stay free on the device; negative if the plan doesn't fit."""
        return self.cluster.device_memory_bytes - self.needed_bytes

    @property
    def fits_host(self) -> bool:
        """Return True if the offloaded bytes fit in a node's host memory, or if that memory's size isn't known."""
        return self.node_host_bytes <= (self.cluster.host_memory_bytes or math.inf)

    @property
    def fits(self) -> bool:
        return self.spare_bytes >= 0 and self.fits_host

    @property
    def sent_bytes(self) -> int:
        return sum(collective.sent_bytes for collective in self.collectives)

    @property
    def communication_s(self) -> float:
        """Return the number of seconds that a rank's links are busy in a step."""
        return self.time.communication_s if self.time else self.sent_bytes / self.cluster.bandwidth_bytes_per_s

    @property
    def arithmetic_s(self) -> float | None:
        """Return how many seconds a step's arithmetic takes at the cluster's rate."""
        return self.time.arithmetic_s if self.time else None

    @property
    def step_s(self) -> tuple[float, float] | None:
        """Return the shortest and longest step time in seconds; None if kernel launches dominate or no rate is known."""
        return (self.time.shortest_s, self.time.longest_s) if self.time and not self.time.launches_decide else None

    @property
    def items_per_step(self) -> int:
        """Return the number of items in a step, across all ranks."""
        return self.settings.batch * self.settings.micro_batches * self.cluster.world_size

    @property
    def items_per_s(self) -> tuple[float, float] | None:
        """Return the items per second across all ranks, for the shortest and the longest step."""
        return (self.items_per_step / self.step_s[0], self.items_per_step / self.step_s[1]) if self.step_s else None

    @property
    def items_per_s_estimate(self) -> float | None:
        return self.items_per_step / self.time.estimate_s if self.time else None

    @property
    def mfu(self) -> float | None:
        """Return the model FLOPs utilization: FLOP/s without recomputation, as a fraction of the peak rate."""
        if self.time is None or self.cluster.peak_flops_per_s is None:
            return None
        return self.model_flops / self.time.estimate_s / self.cluster.peak_flops_per_s

    def can_compute(self, precision: str) -> bool:
        """Return True unless we know that the device doesn't support this precision."""
        return self.cluster.device is None or precision in named_device(self.cluster.device).peak_flops

    def by_category(self) -> dict[str, int]:
        """Return the bytes at the peak for each category in CATEGORIES."""
        sizes = self.peak.by_kind()
        return {words: sizes[kind] for kind, words in CATEGORIES.items()}

    def to_json(self) -> dict:
        """Return the plan as a dict of plain values."""
        return {
            "model": self.model,
            "num_params": self.num_params,
            "active_params": self.active_params or self.num_params,
            "items_per_step": self.items_per_step,
            "settings": asdict(self.settings),
            "cluster": asdict(self.cluster),
            "state": asdict(self.state),
            "peak": {"bytes": self.peak.bytes, "when": self.peak.when, **self.peak.by_kind()},
            "terms": [{"term": term, "formula": formula, "bytes": size} for term, formula, size in self.peak.rows()],
            "host_bytes": self.host_bytes,
            "node_host_bytes": self.node_host_bytes,
            "needed_bytes": self.needed_bytes,
            "fits": self.fits,
            "collectives": [asdict(collective) for collective in self.collectives],
            "sent_bytes": self.sent_bytes,
            "communication_s": self.communication_s,
            "arithmetic_s": self.arithmetic_s,
            "optimizer_s": self.time.optimizer_s if self.time else None,
            "exposed_s": self.time.exposed_s if self.time else None,
            "step_s": self.step_s,
            "step_estimate_s": self.time.estimate_s if self.time else None,
            "items_per_s": self.items_per_s,
            "items_per_s_estimate": self.items_per_s_estimate,
            "mfu": self.mfu,
            "checkpoint_bytes": self.checkpoint_bytes,
        }


def make_plan(subject: Subject | str, settings: Settings, cluster: Cluster) -> Plan:
    """Plan `subject`, or the model with that name, on `cluster`.

    We assume that devices can offload to a host, and that NCCL's collectives don't copy. Raises ValueError for an
    unknown name, or if the settings can't work on that number of ranks.
    """
    if isinstance(subject, str):
        subject = named_subject(subject)
    settings.check_world_size(cluster.world_size)
    subject.check(settings.batch, settings.precision, settings.activation_checkpointing, settings.loss_chunks)
    config = settings.config()
    units = () if settings.strategy == "fsdp" else subject.units
    chunks = {"loss_chunks": settings.loss_chunks} if settings.loss_chunks > 1 else {}
    profile = subject.profile_of(
        settings.batch, settings.measured_precision, settings.activation_checkpointing, **chunks
    )
    replicas = settings.replicas if settings.sharding == "hybrid" else None
    how = {"optimizer": settings.optimizer, "precision": settings.precision}
    step = walk_step(
        profile, config, cluster.world_size, units, backend="nccl", replicas=replicas, has_host=True, **how
    )
    optimizer, kept_bytes = named_optimizer(settings.optimizer), PRECISIONS[settings.precision].kept
    return Plan(
        model=subject.name,
        item=subject.item,
        num_params=subject.num_params,
        active_params=subject.active_params,
        sequence=subject.sequence,
        settings=settings,
        cluster=cluster,
        peak=step.peak,
        state=own_state(profile, config, cluster.world_size, replicas=replicas, **how),
        collectives=step.collectives,
        step_flops=step_flops(subject, settings),
        model_flops=_model_flops(subject, settings),
        time=_time(subject, settings, cluster, profile, step),
        checkpoint_bytes=kept_bytes * profile.num_params + optimizer.state_bytes(profile.num_trained, kept_bytes),
    )


def step_flops(subject: Subject, settings: Settings) -> int | None:
    """Return the number of operations in one rank's step, recomputation included; None if it's unknown.

    Backward takes two matrix products for each one in forward, or one if the weight is frozen. Recomputation repeats
    nearly all of forward. With a chunked loss, the head's forward pass is computed twice. Source: Chowdhery et al.
    2022, arXiv:2204.02311, appendix B.
    """
    forward = _forward_flops(subject, settings)
    if forward is None:
        return None
    passes = 1 + subject.backward_of(settings.batch) + (settings.activation_checkpointing == "units")
    twice = subject.unit_flops_of(settings.batch).get(HEAD, 0) if settings.loss_chunks > 1 else 0
    return round(passes * forward + settings.micro_batches * twice)


def _model_flops(subject: Subject, settings: Settings) -> int | None:
    forward = _forward_flops(subject, settings)
    return None if forward is None else round((1 + subject.backward_of(settings.batch)) * forward)


def _forward_flops(subject: Subject, settings: Settings) -> int | None:
    if subject.forward_flops is None:
        return None
    return settings.micro_batches * subject.forward_flops(settings.batch)


def _time(subject: Subject, settings: Settings, cluster: Cluster, profile: StepProfile, step: Step) -> StepTime | None:
    """Return a step's times, or None if no rate is known."""
    if cluster.flops_per_s is None or subject.forward_flops is None:
        return None
    sharded = settings.config().is_sharded
    if settings.sharding == "hybrid":
        shards = cluster.world_size // settings.replicas
    else:
        shards = num_shards(settings.sharding, cluster.world_size) if sharded else 1
    recomputes = settings.activation_checkpointing == "units"
    speed = Speed(
        flops_per_s=cluster.flops_per_s * (RECOMPUTED_GAIN if recomputes and cluster.is_typical else 1),
        network=cluster.network,
        shards=shards,
        replicas=cluster.world_size // shards,
        host_bytes_per_s=cluster.host_bytes_per_s,
        optimizer_s=_optimizer_s(settings, cluster, profile.num_trained / shards),
        spread=TYPICAL_RANGE if cluster.device else None,
    )
    factor = subject.backward_of(settings.batch) + recomputes
    weighed = _weighed_flops(subject, settings, cluster)
    return time_step(step, weighed, speed, backward_factor=factor, parts=settings.micro_batches)


def _weighed_flops(subject: Subject, settings: Settings, cluster: Cluster) -> dict[str, float]:
    """Return the operation count in forward, by module, weighted so that all operations take equally long."""
    found: dict[str, float] = dict(subject.unit_flops_of(settings.batch))
    if cluster.is_typical:
        for unit, flops in subject.attention_flops(settings.batch).items():
            found[unit] += (ATTENTION_COST - 1) * flops
    if settings.loss_chunks > 1 and HEAD in found:
        found[HEAD] *= 4 / 3  # its forward is computed twice
    return found


def _optimizer_s(settings: Settings, cluster: Cluster, values: float) -> float:
    """Return the time in seconds for a memory-bound update, which reads all state and writes all but the gradients."""
    value_bytes = PRECISIONS[settings.precision].kept
    state_bytes = named_optimizer(settings.optimizer).state_bytes(round(values), value_bytes)
    moved_bytes = UPDATE_PASSES * value_bytes * values + 2 * state_bytes
    on_host = settings.strategy == "fsdp-offload"
    rate = cluster.host_update_bytes_per_s if on_host else cluster.memory_bytes_per_s
    return moved_bytes / rate if rate else 0.0
