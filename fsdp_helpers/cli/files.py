"""Files that several commands write, and the line they print about data."""

import json
import sys
import tempfile
from pathlib import Path

from fsdp_helpers.config import TrainConfig


def print_data_source(source: str, config: TrainConfig) -> None:
    """Print to standard error which data a run uses."""
    from fsdp_helpers.data.images import describe_source

    print(describe_source(source, config.data_dir), file=sys.stderr)


def check_output_path(path: Path | None) -> None:
    """Raise ValueError if no file can be written to `path`, before anything is computed for it."""
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"{path}: the folder {path.parent} does not exist")
    if path is not None and path.is_dir():
        raise ValueError(f"{path} is a folder; give a file")
    if path is not None:
        try:
            tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:
            raise ValueError(f"{path}: the folder {path.parent} isn't writable ({error.strerror})") from error


def write_json(content: dict, path: Path) -> None:
    """Write an object as JSON, atomically."""
    from fsdp_helpers.checkpointing.folder import whole_file

    with whole_file(path, "w") as file:
        json.dump(content, file, indent=1)
