"""The checklist names each fault and lets the healthy job pass; 14's tables have the rows of a DDP script."""

import inspect
import re

import pytest
import torch
from chapters import read_chapter
from leftovers import PROJECT
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from workers_for_tests import bytes_reduced

from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.teaching.lessons import after_the_move

SAYS = {
    "no fault": None,
    "a head used every other step": None,
    "ranks use different heads": "the ranks have trained different parameters, including heads.0.bias",
    "optimizer built first": "55 of the optimizer's parameters aren't the model's",
    "one unit": "there's only one unit, so the full model",
    # 4 blocks of 8 layers, and 15 of the 28 units are norms or projections of fewer than 10,000 parameters
    "every layer a unit": "15 of 28 units have fewer than 10,000 parameters",
    "uneven data": "the ranks have [5, 6] batches",
    "Adam's state not loaded": "Adam has counted 1 steps instead of 2",
    "evaluated, not resharded": "7 parameters aren't sharded, including positions",
}


HEALTHY = ("no fault", "a head used every other step")


def test_each_fault_is_named_on_every_rank():
    assert SAYS.keys() == {case for _, case, *_ in after_the_move.SYMPTOMS}
    for found in launch(after_the_move.visit, world_size=2, device="cpu", timeout_s=240, progress=False):
        assert found.keys() == SAYS.keys()
        for case, says in SAYS.items():
            assert found[case] == [] if says is None else found[case][0].startswith(says), case


def test_each_symptom_leads_to_its_own_failures():
    """Links to files that are there, and whose names begin with the kind of thing that the reader sees."""
    rows = after_the_move.checklist(dict.fromkeys(SAYS, []))
    entries = {row[1]: re.findall(r"\[(\S+)\]\((\S+)\)", row[-1]) for row in rows}
    for case, links in entries.items():
        assert bool(links) == (case not in HEALTHY)
        for shown, path in links:
            assert path == f"failures/{shown}.py" and (PROJECT / "notebooks" / path).exists(), case
    kinds = {case: links[0][0].partition("-")[0] for case, links in entries.items() if links}
    assert list(kinds.values()) == ["wrong", "wrong", "memory", "slow", "hang", "save", "crash"]


def table_of_14(cell_id: str) -> list[list[str]]:
    """The rows of a table in notebook 14, without its header."""
    (cell,) = [cell for cell in read_chapter("14").cells if cell.id == cell_id]
    return [line.strip("| ").split(" | ") for line in cell.source.splitlines()[2:]]


@pytest.mark.skipif(torch.__version__ < "2.15", reason="said of torch 2.15")
def test_what_changed_is_there():
    from torch.distributed.checkpoint.staging import StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
    from torch.distributed.fsdp import share_comm_ctx

    assert torch.distributed.checkpoint.FsspecReader and torch.distributed.checkpoint.FsspecWriter
    for name in ("set_reduce_scatter_unused_params", "set_separate_reduce_scatter_group", "reset_iter_state"):
        assert hasattr(FSDPModule, name) and any(f"`{name}`" in row[0] for row in table_of_14("changes"))
    assert hasattr(FSDPModule, "set_symm_mem_for_comm") and share_comm_ctx  # 04's settings for GPUs
    assert AsyncCheckpointerType.PROCESS and StagingOptions(use_pinned_memory=True)  # 06's for saving in the background
    assert "param_dtype_override_fn" in inspect.signature(MixedPrecisionPolicy).parameters
    for api, reduced in (("FSDP2", 20 * 4), ("FSDP1", 20 * 2)):  # in fp32, and in bf16
        found = launch(bytes_reduced, api, world_size=2, device="cpu", timeout_s=240, progress=False)
        assert found == [reduced] * 2, api
