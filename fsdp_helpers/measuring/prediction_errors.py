"""Compare predictions with measurements, across models, strategies and world sizes, to see how good the planner is."""

import gc
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.measuring.rank_of_n import RankOfN, measure_rank_of_n, measure_this_rank
from fsdp_helpers.measuring.step_profile import measure_run, units_of
from fsdp_helpers.planning.own_shards import own_state
from fsdp_helpers.planning.peak import walk_step
from fsdp_helpers.planning.profile import StepProfile
from fsdp_helpers.ranks.launch import launch

IMAGES = 8  # per rank
# Modules with at least this many parameters are units: DeepNet's large layers, and the transformers' blocks.
THRESHOLDS = {"deep": 20_000, "vit-mnist": 40_000, "vit-deep": 500_000}
VARIANTS = {
    "DDP": {"strategy": "ddp"},
    "FSDP2": {"strategy": "fsdp"},
    "auto-wrap": {"strategy": "fsdp-auto-wrap"},
    "checkpointed": {"strategy": "fsdp-auto-wrap", "activation_checkpointing": "units"},
    "bf16": {"strategy": "fsdp-auto-wrap", "precision": "bf16"},
}


class Run(NamedTuple):
    """The run that a row describes: its model, its variant (strategy and settings) and its world size."""

    model: str
    variant: str
    world_size: int
    real: bool  # True: one process per rank; False: one real rank, with the others faked


@dataclass(frozen=True, kw_only=True)
class ErrorRow:
    """The results of one run: the prediction, and rank 0's measurements."""

    model: str
    variant: str
    world_size: int
    real: bool
    when: str  # when in the step the predicted peak occurs
    predicted_bytes: int
    peak_bytes: int
    predicted_state_bytes: int
    state_bytes: int
    predicted_sent_bytes: int
    sent_bytes: int

    @property
    def run(self) -> Run:
        return Run(self.model, self.variant, self.world_size, self.real)

    @property
    def error(self) -> float:
        """Return the relative error of the predicted peak; it's positive if the prediction is too high."""
        return self.predicted_bytes / self.peak_bytes - 1

    @property
    def is_exact(self) -> bool:
        """Return True if both the state and the sent bytes were predicted to the byte."""
        return (self.predicted_state_bytes, self.predicted_sent_bytes) == (self.state_bytes, self.sent_bytes)


def variant_config(model: str, variant: str, world_size: int) -> TrainConfig:
    """Return the configuration of a run with IMAGES on each rank."""
    return TrainConfig(
        model=model,
        min_num_params=THRESHOLDS[model],
        global_batch_size=IMAGES * world_size,
        **VARIANTS[variant],
    )


@cache
def profile_of(model: str, activation_checkpointing: str, precision: str) -> StepProfile:
    """Return the profile of a step on IMAGES, measured in one process; all strategies and world sizes share it."""
    settings = {"activation_checkpointing": activation_checkpointing, "precision": precision}
    config = TrainConfig(
        model=model, strategy="fsdp", min_num_params=THRESHOLDS[model], global_batch_size=IMAGES, **settings
    )
    return measure_run(config, 1)


def measure_errors(runs: Iterable[Run]) -> Iterator[ErrorRow]:
    """Measure the runs one by one, and yield a row for each. Real ranks run in new processes."""
    for run in runs:
        config = variant_config(run.model, run.variant, run.world_size)
        gc.collect()  # free memory from earlier runs in this process, since the next ranks need it
        if run.real:
            measured, *_ = launch(measure_this_rank, config, world_size=run.world_size, device="cpu", progress=False)
        else:
            measured = measure_rank_of_n(config, run.world_size)
        profile = profile_of(run.model, config.activation_checkpointing, config.precision)
        yield error_row(run, config, profile, units_of(config), measured)


def error_row(run: Run, config: TrainConfig, profile: StepProfile, units: Sequence[str], measured: RankOfN) -> ErrorRow:
    """Return a row that combines a measurement with its prediction.

    Broadcasts don't count: DDP broadcasts buffers, such as BatchNorm's statistics, but plans leave those out.
    """
    ranks = run.world_size
    step = walk_step(profile, config, ranks, units, backend="gloo" if run.real else "fake")
    return ErrorRow(
        **run._asdict(),
        when=step.peak.when,
        predicted_bytes=step.peak.bytes,
        peak_bytes=measured.peak_bytes,
        predicted_state_bytes=own_state(profile, config, ranks).total_bytes,
        state_bytes=measured.state.total_bytes,
        predicted_sent_bytes=step.sent_bytes,
        sent_bytes=sum(seen.sent_bytes for seen in measured.collectives if seen.op != "broadcast"),
    )


def read_errors(path: str | Path) -> list[ErrorRow]:
    """Return the rows of a saved table."""
    return [ErrorRow(**row) for row in json.loads(Path(path).read_text())["rows"]]
