"""Write a model as a folder in Hugging Face format: `config.json`, several safetensors files, and their index.

torch's own writer does the work. Each rank writes only its own rows.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from fsdp_helpers.checkpointing.folder import CheckpointError
from fsdp_helpers.checkpointing.shard_index import failures_named
from fsdp_helpers.checkpointing.training_state import ignore_single_process_warnings, name_in_plain, this_rank
from fsdp_helpers.ranks.group import gather_over_ranks

CONFIG, SHARDED = "config.json", "sharded"  # the latter is the folder to which torch's writer first writes the shards


def tensors_in_files(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's tensors keyed by their names in the files. If a tensor has two names, the first is used."""
    firsts = {name for name, _ in model.named_parameters()}
    repeated = {name for name, _ in model.named_parameters(remove_duplicate=False)} - firsts
    hidden = {name_in_plain(model, name) for name in repeated}
    return {name: tensor for name, tensor in get_model_state_dict(model).items() if name not in hidden}


def save_hugging_face(model: nn.Module, folder: str | os.PathLike, config: dict, *, num_files: int = 3) -> None:
    """Write the model to a new folder; every rank writes its shards, which are then joined into full tensors.

    The folder has a temporary name until it's complete. Raises CheckpointError on every rank if `folder` already exists
    or any rank can't write; in that case, nothing is left behind.
    """
    folder = Path(folder).absolute()
    unfinished = folder.with_name(f".{folder.name}-unfinished")
    _raise_on_every_rank(f"{folder} already exists; give the name of a new folder" if folder.exists() else "")
    description = json.dumps(config, indent=1) + "\n"  # on every rank, or all others would wait for rank 0's error

    def begin() -> None:
        shutil.rmtree(unfinished, ignore_errors=True)  # left there by a killed process
        unfinished.mkdir(parents=True)

    def finish() -> None:
        shutil.rmtree(unfinished / SHARDED)
        (unfinished / CONFIG).write_text(description)
        unfinished.rename(folder)

    tensors = tensors_in_files(model)
    file_of = {name: 1 + number * num_files // len(tensors) for number, name in enumerate(tensors)}
    writer = HuggingFaceStorageWriter(
        str(unfinished), fqn_to_index_mapping=file_of, save_distributed=True, enable_consolidation=True
    )
    try:
        _on_rank_0(begin, folder)  # no rank writes until the folder exists
        with failures_named(folder, "write the model"), ignore_single_process_warnings():
            dcp.save(tensors, storage_writer=writer)
        _on_rank_0(finish, folder)  # no rank continues until the folder has its final name
    except CheckpointError:
        if this_rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)  # makes room in case the disk is full
        raise


def _on_rank_0(act: Callable[[], None], folder: Path) -> None:
    """Let rank 0 act while the others wait. Raises CheckpointError on every rank if it can't."""
    problem = ""
    if this_rank() == 0:
        try:
            act()
        except OSError as error:
            problem = f"{folder}: rank 0 couldn't write the model: {error}"
    _raise_on_every_rank(problem)


def _raise_on_every_rank(problem: str) -> None:
    """Raise CheckpointError on every rank if any rank has a problem, so that no rank waits for one that gave up."""
    if found := next(filter(None, gather_over_ranks(problem)), ""):
        raise CheckpointError(found)
