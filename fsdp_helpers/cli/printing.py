"""The commands' output: a line about the data, a short summary of a run, and JSON. No torch import."""

import json
import sys
import tempfile
from pathlib import Path

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.quantities import format_bytes, format_count
from fsdp_helpers.records import RankRecord, RunRecord


def print_data_source(source: str, config: TrainConfig) -> None:
    """Print to standard error which data a run uses."""
    from fsdp_helpers.data.source import describe_source

    print(describe_source(source, config.data_dir), file=sys.stderr)


def check_output_path(path: Path | None) -> None:
    """Raise ValueError if a file can't be written to `path`; call this before computing the file's contents."""
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"{path}: the folder {path.parent} doesn't exist")
    if path is not None and path.is_dir():
        raise ValueError(f"{path} is a folder; give a file")
    if path is not None:
        try:
            tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:
            raise ValueError(f"{path}: the folder {path.parent} isn't writable ({error.strerror})") from error


def write_json(content: dict, path: Path) -> None:
    """Write an object as JSON, atomically."""
    from fsdp_helpers.checkpointing.folder import atomic_file

    with atomic_file(path, "w") as file:
        json.dump(content, file, indent=1)


def print_summary(record: RunRecord) -> None:
    """Print the run's settings, its losses and accuracy, and the bytes on each rank."""
    config = record.config
    print(
        f"{config.model}, {config.strategy}, {format_count(record.world_size, 'rank')} on {record.device}, "
        f"data: {record.data_source}, {format_count(len(record.step_losses), 'step')} of "
        f"{format_count(config.global_batch_size, 'image')}"
        + (f", after the first {record.first_step} of an earlier run" if record.first_step else "")
    )
    if record.why_no_more_steps:
        print(record.why_no_more_steps)
    for epoch in record.epochs:
        trained = f"train loss {epoch.train_loss:.4f}, " if epoch.train_images else ""
        speed = f", {epoch.seconds:.1f} s, {epoch.images_per_s:,.0f} images/s" if epoch.train_images else ""
        print(
            f"epoch {epoch.epoch}: {trained}test loss {epoch.test_loss:.4f}, "
            f"accuracy {epoch.test_accuracy:.2%} ({epoch.test_correct} of {epoch.test_images}){speed}"
        )
    for rank in record.ranks:
        print(f"rank {rank.rank}: " + _describe_memory(rank))


def _describe_memory(rank: RankRecord) -> str:
    state = (
        f"parameters {format_bytes(rank.parameter_bytes)}, gradients {format_bytes(rank.gradient_bytes)}, "
        f"optimizer {format_bytes(rank.optimizer_bytes)}"
    )
    if rank.held_bytes is None:
        return state
    return f"{state}; held {format_bytes(rank.held_bytes)}, peak {format_bytes(rank.peak_bytes)}"
