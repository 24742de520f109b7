"""What goes into a run, checked before any process starts."""

from dataclasses import dataclass

MODELS = ("shallow", "deep", "simple", "vit", "vit-deep")
STRATEGIES = ("local", "ddp", "fsdp", "fsdp-auto-wrap", "fsdp-offload")
APIS = ("fsdp1", "fsdp2")
SHARDING = ("full", "grad-op", "hybrid", "none")
BACKWARD_PREFETCH = ("pre", "post", "none")
PRECISIONS = ("fp32", "bf16")
ACTIVATION_CHECKPOINTING = ("none", "units", "selective")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of one training run.

    Raises ValueError, with the numbers in the message, for settings that cannot work.
    """

    model: str = "shallow"
    strategy: str = "local"
    api: str = "fsdp2"  # fsdp1: FullyShardedDataParallel, fsdp2: fully_shard
    min_num_params: int = 20_000  # auto-wrap: the parameters that make a module a unit
    sharding: str = "full"  # full: ZeRO-3, grad-op: ZeRO-2, hybrid: two groups, none: no sharding (fsdp1)
    backward_prefetch: str = "pre"  # fsdp1: when backward gathers the next unit
    epochs: int = 1
    max_steps: int | None = None  # end training early, mid-epoch if need be
    global_batch_size: int = 256  # images a step, over all ranks
    learning_rate: float = 1e-3
    seed: int = 0
    train_images: int | None = None  # the first N; None is all
    test_images: int | None = None
    dropout: bool = True
    precision: str = "fp32"  # bf16: FSDP gathers and computes in bfloat16; slices, reduction and optimiser stay fp32
    activation_checkpointing: str = "none"  # units: recompute each unit in backward; selective: all but its products
    micro_batches: int = 1  # gradient accumulation: parts of a rank's batch, one forward and one backward each
    sync_micro_batches: bool = False  # reduce gradients after every part, instead of once after the last
    clip_norm: float | None = None  # scale gradients down to this norm over the whole model
    data_dir: str | None = None  # None: FSDP_DATA_DIR, else data/ at the project's root
    checkpoint_dir: str | None = None  # a checkpoint after the last step goes there; None: no checkpoint
    checkpoint_every: int | None = None  # and one after every so many steps
    keep_last: int | None = None  # remove all checkpoints but the newest so many; None keeps all
    resume: bool = False  # go on from the newest checkpoint; from the start where there is none

    def __post_init__(self) -> None:
        _require_choice("model", self.model, MODELS)
        _require_choice("strategy", self.strategy, STRATEGIES)
        _require_choice("api", self.api, APIS)
        _require_choice("sharding", self.sharding, SHARDING)
        _require_choice("backward_prefetch", self.backward_prefetch, BACKWARD_PREFETCH)
        if self.min_num_params < 0:
            raise ValueError(f"min_num_params is {self.min_num_params}; it must be 0 or more")
        _require_choice("precision", self.precision, PRECISIONS)
        _require_choice("activation_checkpointing", self.activation_checkpointing, ACTIVATION_CHECKPOINTING)
        self._check_api()
        self._check_levers()
        for name in ("epochs", "global_batch_size", "micro_batches"):
            _require_at_least_one(name, getattr(self, name))
        for name in ("max_steps", "train_images", "test_images", "checkpoint_every", "keep_last"):
            if getattr(self, name) is not None:
                _require_at_least_one(name, getattr(self, name))
        if not 0 < self.learning_rate < float("inf"):
            raise ValueError(f"learning_rate is {self.learning_rate}; it must be a number above zero")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must be a whole number from 0 to 2^63 - 1")

        for name in ("resume", "checkpoint_every", "keep_last"):
            if getattr(self, name) and self.checkpoint_dir is None:
                raise ValueError(f"{name} needs checkpoint_dir, the folder of the run's checkpoints")

    def _check_api(self) -> None:
        if not self.strategy.startswith("fsdp"):
            if (self.sharding, self.backward_prefetch) != ("full", "pre"):
                raise ValueError(f"sharding and backward_prefetch belong to FSDP, strategy is {self.strategy!r}")
        elif self.api == "fsdp2" and self.sharding == "none":
            raise ValueError("sharding 'none' exists in FSDP1 only; with fsdp2 use strategy 'ddp' for whole copies")
        elif self.api == "fsdp2" and self.backward_prefetch != "pre":
            raise ValueError(
                f"backward_prefetch {self.backward_prefetch!r} is an option of FSDP1; use api 'fsdp1', or leave it out"
            )

    def _check_levers(self) -> None:
        if self.precision == "bf16" and not self.strategy.startswith("fsdp"):
            raise ValueError(
                f"precision 'bf16' is FSDP's mixed precision, strategy is {self.strategy!r}; "
                "use strategy 'fsdp' or 'fsdp-auto-wrap', or precision 'fp32'"
            )
        if self.sync_micro_batches and self.micro_batches == 1:
            raise ValueError("sync_micro_batches needs several micro-batches, micro_batches is 1; use 2 or more")
        if self.sync_micro_batches and (self.strategy, self.api) == ("fsdp-offload", "fsdp1"):
            raise ValueError(
                "FSDP1 cannot add up gradients that it has moved to the host: with CPU offload leave out "
                "sync_micro_batches, or use api 'fsdp2'"
            )
        if self.clip_norm is not None and not 0 < self.clip_norm < float("inf"):
            raise ValueError(f"clip_norm is {self.clip_norm}; it must be a number above zero")

    def check_device(self, device: str) -> None:
        """Raise ValueError where `device` ("cpu" or "cuda") cannot run this configuration."""
        if self.strategy == "fsdp-offload" and self.api == "fsdp1" and device == "cpu":
            raise ValueError(
                "FSDP1's CPUOffload keeps parameters in pinned host memory, and pinning needs an accelerator; "
                "this run is on the CPU. Use api 'fsdp2', whose CPUOffloadPolicy runs without one"
            )

    def check_world_size(self, world_size: int) -> None:
        """Raise ValueError where `world_size` ranks cannot run this configuration."""
        _require_at_least_one("world_size", world_size)
        if self.strategy == "local" and world_size != 1:
            raise ValueError(
                f"strategy 'local' trains in one process, world_size is {world_size}; "
                "use strategy 'ddp' for several, or world_size 1"
            )
        if self.sharding == "hybrid" and (world_size < 4 or world_size % 2):
            raise ValueError(
                f"sharding 'hybrid' needs two groups of at least two ranks, world_size is {world_size}; "
                "use an even number, 4 or more"
            )
        if self.global_batch_size % world_size:
            smaller = self.global_batch_size // world_size * world_size
            raise ValueError(
                f"global_batch_size {self.global_batch_size} does not divide by world_size {world_size}: "
                f"{self.global_batch_size % world_size} image(s) would be left over; "
                f"use {smaller + world_size}" + (f" or {smaller}" if smaller else "")
            )
        images_per_rank = self.global_batch_size // world_size
        if images_per_rank % self.micro_batches:
            raise ValueError(
                f"a rank's {images_per_rank} images (global_batch_size {self.global_batch_size} / world_size "
                f"{world_size}) do not divide by micro_batches {self.micro_batches}: "
                f"{images_per_rank % self.micro_batches} would be left over; use a divisor of {images_per_rank}"
            )

    def check_data_size(self, available: int) -> None:
        """Raise ValueError where `available` training images do not fill one global batch."""
        used = min(available, self.train_images or available)
        if used < self.global_batch_size:
            raise ValueError(
                f"{used} training images do not fill one global batch of {self.global_batch_size}; "
                "use a smaller global_batch_size or more training images"
            )


def _require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}; choose one of {', '.join(choices)}")


def _require_at_least_one(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a whole number, 1 or more")
