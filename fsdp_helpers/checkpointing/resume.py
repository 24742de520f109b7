"""Save and resume a run: when to save, which settings to save besides tensors, and which settings must match.

On SIGTERM, all ranks save and stop after the same step. Slurm sends SIGTERM before it kills a job that has reached its
time limit or is preempted, and torchrun forwards it to its ranks. The signal may reach some machines earlier than
others, so after every step, the ranks check whether any of them has received it.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import torch
from torch import nn

from fsdp_helpers.checkpointing import folder as checkpoint_folder
from fsdp_helpers.checkpointing.checkpoint import load, save
from fsdp_helpers.checkpointing.folder import Checkpoint, CheckpointError
from fsdp_helpers.checkpointing.shard_index import read_index
from fsdp_helpers.config import LOSS_SETTINGS, TrainConfig
from fsdp_helpers.ranks.group import gather_over_ranks, sum_over_ranks

_asked: bool | None = None  # whether SIGTERM has arrived; None while it isn't being watched for


class Stopped(Exception):
    """The run was asked to end early, and its progress has been saved."""


@contextmanager
def catching_sigterm() -> Iterator[None]:
    """Within the block, remember a SIGTERM instead of exiting. Every rank of the group has to enter the block."""
    global _asked

    def note(*_: object) -> None:
        global _asked
        _asked = True

    before, _asked = signal.signal(signal.SIGTERM, note), False
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        _asked = None


def asked_to_stop() -> bool:
    """Return True on all ranks once any rank has been asked to stop. Under `catching_sigterm`, this is a collective."""
    return _asked is not None and bool(sum_over_ranks(torch.tensor(int(_asked))))


def check_checkpoints(config: TrainConfig, data_source: str) -> None:
    """Before any process starts, raise CheckpointError if this run won't be able to save or to resume."""
    if config.checkpoint_dir is None:
        return
    folder = Path(config.checkpoint_dir)
    if folder.exists():
        checkpoint_folder.clear_unfinished(folder)
    else:
        checkpoint_folder.check_new_folder(folder)
    start = find_start(config, data_source)
    if start is not None:
        read_index(start[0])  # raises for a damaged one


def find_start(config: TrainConfig, data_source: str) -> tuple[Path, Checkpoint] | None:
    """Return the checkpoint that the run resumes from; None if it starts from scratch.

    Raises CheckpointError for a checkpoint that's damaged or belongs to a different run, and for a run without --resume
    whose folder already has checkpoints.
    """
    newest = checkpoint_folder.find_newest(Path(config.checkpoint_dir)) if config.checkpoint_dir else None
    if newest is None:
        return None
    if not config.resume:
        raise CheckpointError(
            f"{newest.parent} has checkpoints up to {newest.name}; continue from there with --resume, or choose "
            f"another --checkpoint-dir"
        )
    checkpoint = checkpoint_folder.read_checkpoint(newest)
    _check_same_run(newest, checkpoint, config, data_source)
    return newest, checkpoint


def _check_same_run(path: Path, checkpoint: Checkpoint, config: TrainConfig, data_source: str) -> None:
    if checkpoint.settings.get("clip_norm") is not None:  # `train` clipped gradients before version 2.3
        raise CheckpointError(
            f"{path} was saved with clip_norm {checkpoint.settings['clip_norm']}, and `train` no longer clips "
            "gradients; continue this run with the version that saved it"
        )
    for name, now in _settings(config, data_source).items():
        saved = checkpoint.settings.get(name, LOSS_SETTINGS.get(name))  # the checkpoint may be older than the setting
        if saved != now:
            raise CheckpointError(
                f"{path} was saved with {name} {saved!r}, but this run has {now!r}; use the same value to continue, or "
                f"another --checkpoint-dir for a different run"
            )


def remove_unfinished(config: TrainConfig) -> None:
    """Remove an interrupted rank's unfinished files, unless the next run already holds the folder's lock."""
    if config.checkpoint_dir is not None and Path(config.checkpoint_dir).is_dir():
        with suppress(CheckpointError):
            checkpoint_folder.clear_unfinished(Path(config.checkpoint_dir))


class RunCheckpoints:
    """The object that saves and loads a run's full state; without a checkpoint folder, it does nothing."""

    def __init__(self, config: TrainConfig, rank: int, data_source: str) -> None:
        self._config, self._rank = config, rank
        self._start = find_start(config, data_source)
        earlier = self._start[1].settings if self._start else {}
        self._keep_last = config.keep_last or earlier.get("keep_last")  # saved, but don't have to match
        self._settings = _settings(config, data_source) | {"keep_last": self._keep_last}
        self.step = self._start[1].step if self._start else 0  # optimizer steps since the beginning of the run
        if len(set(gather_over_ranks(self.step))) > 1:
            raise CheckpointError(
                f"the ranks don't all see the same files in {config.checkpoint_dir}; all machines must share it"
            )

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Load the parameters, the optimizer state and each rank's random state; see `checkpoint.load`."""
        if self._start is not None:
            load(self._start[0], model, optimizer)

    def after_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, last_step: int) -> None:
        """Count a step, and save after the last step and after every `checkpoint_every` steps.

        Raises Stopped, with a checkpoint of this step, if the run received SIGTERM.
        """
        self.step += 1
        every = self._config.checkpoint_every
        is_last = self.step == last_step
        stops = not is_last and asked_to_stop()
        is_due = is_last or stops or (every is not None and self.step % every == 0)
        if is_due and self._config.checkpoint_dir is not None:
            self._save(model, optimizer)
        if stops:
            raise Stopped(
                f"ended early by SIGTERM: saved after step {self.step} of {last_step} in "
                f"{self._config.checkpoint_dir}; continue from there with --resume"
            )

    def _save(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        folder = Path(self._config.checkpoint_dir)
        try:
            save(folder / checkpoint_folder.checkpoint_name(self.step), model, optimizer, settings=self._settings)
        except (OSError, CheckpointError) as error:
            raise CheckpointError(
                f"{folder}: no checkpoint for step {self.step} was saved ({error}); older checkpoints are kept"
            ) from error
        if self._rank == 0 and self._keep_last:
            self._remove_older(folder, self._keep_last)

    def _remove_older(self, folder: Path, keep_last: int) -> None:
        try:
            checkpoint_folder.keep_newest(folder, keep_last)
        except (OSError, CheckpointError) as error:
            raise CheckpointError(
                f"{folder}: the checkpoint of step {self.step} was saved, but an older one wasn't removed ({error})"
            ) from error


@contextmanager
def run_checkpoints(config: TrainConfig, rank: int, data_source: str) -> Iterator[RunCheckpoints]:
    """Yield the checkpoints of this run; rank 0 keeps their folder locked within the block."""
    locks = config.checkpoint_dir is not None and rank == 0
    with checkpoint_folder.locked(Path(config.checkpoint_dir)) if locks else nullcontext():
        gather_over_ranks(None)  # no rank looks for checkpoints until rank 0 has the lock
        yield RunCheckpoints(config, rank, data_source)


def _settings(config: TrainConfig, data_source: str) -> dict:
    return {name: getattr(config, name) for name in LOSS_SETTINGS} | {"data_source": data_source}
