"""Each chapter's subject is called in a cell, as plain torch, and the reader has seen what a cell launches.

Quick: notebooks are read as syntax trees, not run.
"""

import nbformat
import pytest
from chapters import body, code_cells, launched, listed, not_called, read_chapter, statements, tree_of, written

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
        "auto_wrap_policy=",
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
SERIES = ("00", "01", "02", "03", "04", "05", "06", "07", "08", "09", "10", "11", "12", "13", "14", "15")


def unseen_workers(number: str, chapters: dict[str, nbformat.NotebookNode]) -> list[str]:
    """The rank functions that a chapter's body launches, and neither it nor an earlier chapter shows."""
    seen = set()
    for earlier, notebook in chapters.items():
        if earlier <= number:
            seen |= written(notebook.cells) | listed(notebook.cells)
    return sorted(launched(body(chapters[number])) - seen)


@pytest.mark.parametrize("number", CALLS)
def test_the_subject_is_called_in_a_cell(number):
    assert not_called(body(read_chapter(number)), CALLS[number]) == []


@pytest.mark.parametrize("number", CALLS)
def test_the_reader_has_seen_what_is_launched(number):
    assert unseen_workers(number, {name: read_chapter(name) for name in SERIES}) == []


# ---------------------------------------------------------------- the checks can fail


def notebook(*sources: str) -> nbformat.NotebookNode:
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    exercises = nbformat.v4.new_markdown_cell("## Exercises\n")
    return nbformat.v4.new_notebook(cells=[*cells, exercises, nbformat.v4.new_code_cell("fully_shard(model)")])


@pytest.mark.parametrize(
    "source, missing",
    [
        ("fully_shard(model)", []),
        ("%%ranks\nfsdp.fully_shard(model)", []),
        ("%%ranks 0,1\nfully_shard(model)", []),
        ("%%writefile my_job.py\ndef work(rank, world_size):\n    fully_shard(rank)", []),
        ("%time fully_shard(model)", ["fully_shard"]),
        ("%%bash\nfully_shard(model)", ["fully_shard"]),
        ("print('fully_shard(model)')  # fully_shard(model)", ["fully_shard"]),
        ("fully_shard = 3", ["fully_shard"]),
        ("not_fully_shard(model)", ["fully_shard"]),
    ],
)
def test_a_call_is_a_call(source, missing):
    assert not_called(body(notebook(source)), ("fully_shard",)) == missing


def test_a_keyword_and_a_dotted_name():
    cells = body(notebook("dcp.save(state)\nFSDP(model, auto_wrap_policy=None)"))
    assert not_called(cells, ("dcp.save", "auto_wrap_policy=")) == []
    assert not_called(cells, ("dcp.load", "policy=")) == ["dcp.load", "policy="]
    assert not_called(cells, ("dcp.load|dcp.save", "policy=|load")) == ["policy=|load"]


def test_a_worker_that_is_never_shown_is_found():
    hidden, shown = "launch(train_it, world_size=2)", "show.source(by_hand.train_it)"
    traced = "launch(traced, by_hand.train_it, config, world_size=2)"
    in_a_cell = "%%writefile job.py\ndef train_it(rank, world_size): ...\n"
    for source in (hidden, traced):
        assert unseen_workers("02", {"02": notebook(source)}) == ["train_it"]
        assert unseen_workers("02", {"01": notebook(shown), "02": notebook(source)}) == []
        assert unseen_workers("02", {"02": notebook(in_a_cell, source)}) == []
        assert unseen_workers("02", {"02": notebook(source), "03": notebook(shown)}) == ["train_it"]  # too late


def test_statements_are_compared_without_comments_and_docstrings():
    one, other = code_cells(
        body(notebook("%%ranks\n# a loop\ndef f():\n    'What it is.'\n    return 1  # one\n", "def f(): return 1"))
    )
    assert statements(tree_of(one)) == statements(tree_of(other)) == ["def f():\n    return 1"]
