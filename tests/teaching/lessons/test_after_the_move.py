"""The checklist names each fault and lets the healthy job pass; a rank knows who it is, whoever started it."""

import json
import os
import re

import pytest
from leftovers import PROJECT

from fsdp_helpers.ranks.launching.launch import launch
from fsdp_helpers.teaching.failures.gallery import GALLERY
from fsdp_helpers.teaching.lessons import after_the_move

SAYS = {
    "no fault": None,
    "optimizer built before": "55 of the optimizer's parameters are not the model's",
    "one unit": "one unit: all of the model",
    # 4 blocks of 8 layers, and 15 of the 28 units are norms or projections of fewer than 10,000 parameters
    "every layer a unit": "15 of 28 units have less than 10,000 parameters",
    "uneven data": "the ranks have [5, 6] batches",
    "Adam's state not loaded": "Adam has counted [1] steps instead of 2",
    "evaluated, not resharded": "7 parameters are whole, positions among them",
}


def test_each_fault_is_named_on_every_rank():
    assert SAYS.keys() == {case for _, case, *_ in after_the_move.SYMPTOMS}
    for found in launch(after_the_move.visit, world_size=2, device="cpu", timeout_s=240, progress=False):
        assert found.keys() == SAYS.keys()
        for case, says in SAYS.items():
            assert found[case] == [] if says is None else found[case][0].startswith(says), case


def test_each_symptom_leads_to_its_own_entries_of_11():
    """Links to headings of 11 that are there, and whose names begin with the kind of thing that the reader sees."""
    rows = after_the_move.checklist(dict.fromkeys(SAYS, []))
    entries = {row[1]: re.findall(r"\[(\S+)\]\(11_when_it_breaks\.ipynb#(\S+)\)", row[-1]) for row in rows}
    notebook = json.loads((PROJECT / "notebooks" / "11_when_it_breaks.ipynb").read_text())
    headings = {"".join(cell["source"]).partition("\n")[0] for cell in notebook["cells"]}
    for case, links in entries.items():
        assert bool(links) == (case != "no fault")
        for shown, anchor in links:
            assert shown == anchor and anchor in GALLERY and f"### {anchor}" in headings, case
    kinds = {case: links[0][0].partition("-")[0] for case, links in entries.items() if links}
    assert list(kinds.values()) == ["wrong", "memory", "slow", "hang", "save", "crash"]


def test_srun_and_torchrun_tell_a_rank_the_same(monkeypatch, tmp_path):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho node1\necho node2\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    # the second task of the second node, of two nodes with four GPUs each
    of_srun = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "node[1-2]"}
    of_torchrun = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "node1"}
    for variable, value in {**of_srun, **of_torchrun}.items():
        monkeypatch.setenv(variable, value)
    assert after_the_move.ranks_from_srun() == after_the_move.ranks_from_torchrun()
    assert after_the_move.ranks_from_srun()["rank"] == 5


@pytest.mark.parametrize("old", ["`model.module`", "`with model.no_sync()`", "`Join([model])`"])
def test_what_must_not_stay_is_listed(old):
    assert old in {row[0] for row in after_the_move.LEFTOVERS}
