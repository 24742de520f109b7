"""Each chapter's subject is called in a cell, as plain torch, and the reader has seen what a cell launches.

Quick: notebooks are read as syntax trees, not run.
"""

import nbformat
import pytest
from chapters import NOTEBOOKS, body, launched, listed, not_called, read_chapter, written

# What a chapter's objectives name, its body calls, and no test of it changes; of names with | between them any will do.
CALLS = {
    "00": ("dist.all_reduce",),
    "03": ("dist.all_gather_into_tensor", "CommDebugMode"),
    "04": ("FullyShardedDataParallel",),
    "05": ("CPUOffloadPolicy", "FullyShardedDataParallel"),
    "06": ("fully_shard", "get_state_dict"),
    "07": ("to_local",),
    "08": ("export_chrome_trace",),
    "13": (
        *("fully_shard", "to_empty", "set_requires_gradient_sync", "checkpoint_wrapper|checkpoint"),
        *("register_forward_hook", "full_tensor", "unshard"),
    ),
    "14": ("clip_grad_norm_", "get_state_dict", "no_sync"),
    "15": (
        *("init_device_mesh", "redistribute", "fully_shard", "dist.all_to_all_single", "schedule.step"),
        *("all_to_all_single_autograd", "clip_grads_with_norm_"),
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


@pytest.mark.parametrize("number", [number for number in SERIES if number not in ("09", "10", "11", "12")])
def test_the_reader_has_seen_what_is_launched(number):
    assert unseen_workers(number, {name: read_chapter(name) for name in SERIES}) == []
