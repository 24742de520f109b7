"""The settings of a run, checked before any process starts.

Everything about a setting is declared in its `TrainConfig` field: its default, choices and meaning, and whether it
changes the losses. The command line, `--help` and the check for resumed runs all read it from there.
"""

import math
from dataclasses import Field, dataclass, field, fields
from typing import Any

MODELS = ("shallow", "deep", "simple", "vit", "vit-deep", "vit-mnist")
STRATEGIES = ("local", "ddp", "fsdp", "fsdp-auto-wrap", "fsdp-offload")
APIS = ("fsdp1", "fsdp2")
SHARDING = ("full", "grad-op", "hybrid", "none")
BACKWARD_PREFETCH = ("pre", "post", "none")
PRECISIONS = ("fp32", "bf16")
FEWEST_AND_MOST_TRAIN_IMAGES = (1_437, 60_000)  # the bundled digits, MNIST
ACTIVATION_CHECKPOINTING = ("none", "units", "selective")


def is_sharded(strategy: str) -> bool:
    """Return True if each rank keeps only a shard of the model. Raises ValueError for an unknown strategy."""
    require_choice("strategy", strategy, STRATEGIES)
    return strategy.startswith("fsdp")


def setting(
    default: Any,
    meaning: str,
    *,
    choices: tuple[str, ...] | None = None,
    at_least_one: bool = False,
    changes_losses: bool = False,
    flag: str | None = None,
    factor: float = 1,
) -> Any:
    """Return a dataclass field for a setting; the command line turns it into a flag.

    If `changes_losses` is true, a resumed run must use the same value. `flag` is the flag's name if that
    isn't the field's name. The field's value is the flag's value times `factor`, for example to turn GB into bytes.
    """
    metadata = {
        "meaning": meaning,
        "choices": choices,
        "at_least_one": at_least_one,
        "changes_losses": changes_losses,
        "flag": flag,
        "factor": factor,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of one training run.

    Raises ValueError for settings that can't work; the message includes the numbers.
    """

    model: str = setting("shallow", "the network", choices=MODELS, changes_losses=True)
    strategy: str = setting("local", "how the work and the state are divided among ranks", choices=STRATEGIES)
    api: str = setting("fsdp2", "FullyShardedDataParallel (fsdp1) or fully_shard (fsdp2)", choices=APIS)
    min_num_params: int = setting(
        20_000, "make each module with at least N parameters a unit (for auto-wrap and recomputation)"
    )
    sharding: str = setting(
        "full",
        "shard everything (full, ZeRO-3); the same, but keep parameters unsharded until backward is done (grad-op); "
        "shard within each of two groups of ranks (hybrid); or shard nothing (none, fsdp1 only)",
        choices=SHARDING,
    )
    reshard_after_forward: bool = setting(
        True, "fsdp2: keep parameters unsharded from forward to backward, as grad-op does"
    )
    backward_prefetch: str = setting(
        "pre",
        "fsdp1: all-gather the next unit before (pre) or after (post) computing this one's gradients, or only "
        "when it's needed (none)",
        choices=BACKWARD_PREFETCH,
    )
    bucket_view: bool = setting(
        False, "ddp: make gradients views of the buckets instead of copying them to the buckets and back"
    )
    epochs: int = setting(1, "number of passes over the training images", at_least_one=True)
    max_steps: int | None = setting(None, "stop after N steps", at_least_one=True)
    global_batch_size: int = setting(256, "images per step, over all ranks", at_least_one=True, changes_losses=True)
    learning_rate: float = setting(1e-3, "Adam's learning rate", changes_losses=True)
    seed: int = setting(0, "seed for the initial values, the order of the images, and dropout", changes_losses=True)
    train_images: int | None = setting(None, "train on only the first N images", at_least_one=True, changes_losses=True)
    test_images: int | None = setting(None, "test on only the first N images", at_least_one=True)
    dropout: bool = setting(
        True, "train without dropout, for example to compare one process with many", changes_losses=True
    )
    precision: str = setting(
        "fp32",
        "dtype in which FSDP all-gathers and computes; shards, reductions and the optimizer stay in fp32",
        choices=PRECISIONS,
        changes_losses=True,
    )
    activation_checkpointing: str = setting(
        "none",
        "recompute activations in backward: everything in each unit (units), or all except matrix products (selective)",
        choices=ACTIVATION_CHECKPOINTING,
    )
    micro_batches: int = setting(
        1,
        "split a rank's batch into N parts, each with its own forward and backward pass",
        at_least_one=True,
        changes_losses=True,
    )
    sync_micro_batches: bool | None = setting(
        None,
        "reduce gradients after every part, or only once, after the last; by default, sharded strategies reduce after "
        "every part, so that they never hold full gradients, and ddp reduces once",
    )
    data_dir: str | None = setting(
        None, "folder with MNIST (default: FSDP_DATA_DIR if set, otherwise data/ in the project's root)"
    )
    checkpoint_dir: str | None = setting(None, "save the run's state in DIR after the last step")
    checkpoint_every: int | None = setting(None, "also save after every N steps", at_least_one=True)
    keep_last: int | None = setting(
        None, "keep only the newest N checkpoints; a resumed run does the same", at_least_one=True
    )
    resume: bool = setting(False, "continue from the newest checkpoint, or from the start if there is none")

    @property
    def reduces_every_part(self) -> bool:
        """Return True if gradients are reduced after every micro-batch, False if only once, after the last.

        With sharded parameters, gradients that haven't been reduced yet are full size: 4 bytes per parameter of the
        model. With DDP, they're always full size. FSDP1 can't accumulate shards that it has moved to the host.
        """
        if self.sync_micro_batches is not None:
            return self.sync_micro_batches
        on_host = (self.strategy, self.api) == ("fsdp-offload", "fsdp1")
        return self.is_sharded and self.sharding != "none" and not on_host

    @property
    def is_sharded(self) -> bool:
        return is_sharded(self.strategy)

    def __post_init__(self) -> None:
        for one in fields(self):
            _check_by_itself(one, getattr(self, one.name))
        if self.min_num_params < 0:
            raise ValueError(f"min_num_params is {self.min_num_params}; it must be 0 or more")
        if self.checkpoint_dir == "":
            raise ValueError(
                "checkpoint_dir is empty, perhaps because a shell variable isn't set; give a value, or leave it out"
            )
        self._check_api()
        self._check_resharding()
        self._check_levers()
        if not 0 < self.learning_rate < float("inf"):
            raise ValueError(f"learning_rate is {self.learning_rate}; it must be a number above zero")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must be a whole number from 0 to 2^63 - 1")
        for name in ("resume", "checkpoint_every", "keep_last"):
            if getattr(self, name) and self.checkpoint_dir is None:
                raise ValueError(f"{name} needs checkpoint_dir, the folder of the run's checkpoints")

    def _check_api(self) -> None:
        if self.bucket_view and self.strategy != "ddp":
            raise ValueError(
                f"bucket_view is a DDP setting, but strategy is {self.strategy!r}; use 'ddp', or leave it out"
            )
        if not self.is_sharded:
            if (self.sharding, self.backward_prefetch) != ("full", "pre"):
                raise ValueError(f"sharding and backward_prefetch are FSDP settings, but strategy is {self.strategy!r}")
        elif self.api == "fsdp2" and self.sharding == "none":
            raise ValueError("sharding 'none' exists only in FSDP1; for full copies with fsdp2, use strategy 'ddp'")
        elif self.api == "fsdp2" and self.backward_prefetch != "pre":
            raise ValueError(
                f"backward_prefetch {self.backward_prefetch!r} is an FSDP1 option; use api 'fsdp1', or leave it out"
            )

    def _check_resharding(self) -> None:
        if self.reshard_after_forward:
            return
        if not self.is_sharded:
            raise ValueError(
                f"reshard_after_forward is an FSDP2 setting, but strategy is {self.strategy!r}; leave it out"
            )
        if self.api == "fsdp1":
            raise ValueError(
                "reshard_after_forward is an FSDP2 setting; in FSDP1, sharding 'grad-op' keeps parameters unsharded "
                "until the last backward pass"
            )

    def _check_levers(self) -> None:
        if self.precision == "bf16" and not self.is_sharded:
            raise ValueError(
                f"precision 'bf16' is FSDP's mixed precision, but strategy is {self.strategy!r}; "
                "use strategy 'fsdp' or 'fsdp-auto-wrap', or precision 'fp32'"
            )
        if self.sync_micro_batches and self.micro_batches == 1:
            raise ValueError("sync_micro_batches needs several micro-batches, but micro_batches is 1; use 2 or more")
        if self.sync_micro_batches and (self.strategy, self.api) == ("fsdp-offload", "fsdp1"):
            raise ValueError(
                "FSDP1 can't accumulate gradients that it has moved to the host: with CPU offload, leave out "
                "sync_micro_batches, or use api 'fsdp2'"
            )

    def check_device(self, device: str) -> None:
        """Raise ValueError if this configuration can't run on `device` ("cpu" or "cuda")."""
        if self.strategy == "fsdp-offload" and self.api == "fsdp1" and device == "cpu":
            raise ValueError(
                "FSDP1's CPUOffload keeps parameters in pinned host memory, and pinning needs an accelerator; "
                "this run is on the CPU. Use api 'fsdp2', whose CPUOffloadPolicy runs without one"
            )

    def check_world_size(self, world_size: int) -> None:
        """Raise ValueError if this configuration can't run on `world_size` ranks."""
        require_positive_int("world_size", world_size)
        if self.strategy == "local" and world_size != 1:
            raise ValueError(
                f"strategy 'local' trains in one process, but world_size is {world_size}; "
                "use strategy 'ddp' for several processes, or world_size 1"
            )
        if self.sharding == "hybrid" and (world_size < 4 or world_size % 2):
            raise ValueError(
                f"sharding 'hybrid' needs two groups of at least two ranks, but world_size is {world_size}; "
                "use an even number, 4 or more"
            )
        if self.global_batch_size % world_size:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} isn't divisible by world_size {world_size}: "
                f"{self.global_batch_size % world_size} would be left over; "
                f"use {self._batch_sizes_nearby(world_size)}"
            )
        images_per_rank = self.global_batch_size // world_size
        if images_per_rank % self.micro_batches:
            raise ValueError(
                f"a rank's {images_per_rank} images (global_batch_size {self.global_batch_size} / world_size "
                f"{world_size}) aren't divisible by micro_batches {self.micro_batches}: "
                f"{images_per_rank % self.micro_batches} would be left over; use a divisor of {images_per_rank}"
            )

    def _batch_sizes_nearby(self, world_size: int) -> str:
        """Return the nearest global batch sizes that split evenly and don't exceed the number of training images."""
        fewest, most = (self.train_images or known for known in FEWEST_AND_MOST_TRAIN_IMAGES)
        together = world_size * self.micro_batches
        larger = (self.global_batch_size // together + 1) * together
        smaller = min(self.global_batch_size, most) // together * together
        fitting = [larger] * (larger <= fewest) + [smaller] * (smaller > 0)
        return " or ".join(map(str, fitting)) or "fewer ranks"

    def check_data_size(self, source: str, train_images: int, test_images: int) -> None:
        """Raise ValueError if `source` has fewer images than this run needs."""
        for name, available in (("train_images", train_images), ("test_images", test_images)):
            wanted = getattr(self, name)
            if wanted is not None and wanted > available:
                raise ValueError(
                    f"{name} is {wanted}, but {source} has {available}; use fewer, or leave it out to use all of them"
                )
        used = self.train_images or train_images
        if used < self.global_batch_size:
            raise ValueError(
                f"{used} training images don't fill one global batch of {self.global_batch_size}; "
                "use a smaller global_batch_size or more training images"
            )


# The settings that the next step's loss depends on, with their defaults.
LOSS_SETTINGS = {one.name: one.default for one in fields(TrainConfig) if one.metadata["changes_losses"]}


def _check_by_itself(one: Field, value: object) -> None:
    """Check the value of one setting; None is allowed if the setting's default is None."""
    if one.metadata["choices"] is not None:
        require_choice(one.name, value, one.metadata["choices"])
    if one.metadata["at_least_one"] and not (value is None and one.default is None):
        require_positive_int(one.name, value)


# ---------------------------------------------------------------- checks that other modules share


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}; choose one of {', '.join(choices)}")


def require_positive_int(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a positive whole number."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a whole number, 1 or more")


def require_seconds(**limits_s: float | None) -> None:
    """Raise ValueError unless each limit is None or a positive number of seconds; the message names the limit."""
    for name, limit_s in limits_s.items():
        if limit_s is not None and not (is_number(limit_s) and limit_s > 0):
            raise ValueError(f"{name} is {limit_s!r}; it must be a number of seconds above 0")


def is_number(value: object) -> bool:
    """Return True if `value` is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
