"""Each chapter's subject is called in a cell, as plain torch, and the reader has seen what a cell launches.

Quick: notebooks are read as syntax trees, not run.
"""

import nbformat
import pytest
from chapters import NOTEBOOKS, body, launched, listed, not_called, read_chapter, written

# What a chapter's objectives name, and its body calls; of names with | between them any will do.
CALLS = {
    "00": ("dist.all_reduce", "fully_shard"),
    "01": ("optimizer.zero_grad", "loss.backward", "optimizer.step", "profile"),
    "02": ("dist.all_reduce", "dist.broadcast", "mp.spawn", "DistributedDataParallel", "set_epoch"),
    "03": (
        "dist.reduce_scatter_tensor",
        "dist.all_gather_into_tensor",
        "fully_shard",
        "FullyShardedDataParallel",
        "to_local",
        "unshard",
        "reshard",
        "CommDebugMode",
    ),
    "04": ("fully_shard", "FullyShardedDataParallel", "auto_wrap_policy=", "reshard_after_forward=", "resize_"),
    "05": ("fully_shard", "CPUOffloadPolicy", "FullyShardedDataParallel", "CPUOffload"),
    "06": ("fully_shard", "dcp.save", "dcp.load", "dcp.async_save", "get_state_dict", "set_state_dict"),
    "07": (
        "fully_shard",
        "MixedPrecisionPolicy",
        "checkpoint_wrapper|checkpoint",
        "set_requires_gradient_sync",
        "clip_grad_norm_",
        "to_local",
    ),
    "08": (
        "fully_shard",
        "to_empty",
        "torch.compile",
        "set_modules_to_forward_prefetch",
        "export_chrome_trace",
    ),
    "13": (
        "fully_shard",
        "to_empty",
        "HuggingFaceStorageReader",
        "set_requires_gradient_sync",
        "checkpoint_wrapper|checkpoint",
        "register_forward_hook",
        "full_tensor",
        "unshard",
        "reshard",
    ),
    "14": (
        "DistributedDataParallel",
        "fully_shard",
        "set_requires_gradient_sync",
        "clip_grad_norm_",
        "get_state_dict",
        "set_model_state_dict",
        "set_optimizer_state_dict",
        "FullyShardedDataParallel|FSDP",
        "state_dict_type",
        "optim_state_dict",
        "no_sync",
    ),
    "15": (
        "init_device_mesh",
        "redistribute",
        "fully_shard",
        "parallelize_module",
        "dist.all_reduce",
        "dist.reduce_scatter_tensor",
        "dist.all_to_all_single",
        "schedule.step",
        "all_to_all_single_autograd",
        "clip_grads_with_norm_",
    ),
}
SERIES = sorted(path.name[:2] for path in NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))


# Measurements, whose text says what they do.
TOLD = {"save_every_way", "resume_without_each", "train_and_be_killed"}


def unseen_workers(number: str, chapters: dict[str, nbformat.NotebookNode]) -> list[str]:
    """The rank functions that a chapter's body launches, and neither it nor an earlier chapter shows."""
    seen = set()
    for earlier, notebook in chapters.items():
        if earlier <= number:
            seen |= written(notebook.cells) | listed(notebook.cells)
    return sorted(launched(body(chapters[number])) - seen - TOLD)


@pytest.mark.parametrize("number", CALLS)
def test_the_subject_is_called_in_a_cell(number):
    assert not_called(body(read_chapter(number)), CALLS[number]) == []


@pytest.mark.parametrize("number", CALLS)
def test_the_reader_has_seen_what_is_launched(number):
    assert unseen_workers(number, {name: read_chapter(name) for name in SERIES}) == []
