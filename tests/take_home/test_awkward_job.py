"""A job with everything that makes a move hard goes through all of it, and has the losses of DDP throughout."""

import pytest
import torch
from awkward_job import train_ddp, train_fsdp2

from fsdp_helpers.ranks.launch import RankError, launch

SAVED_AT, KILLED_AT, LAST_STEP = 4, 9, 12  # steps; the checkpoint before the kill, of step 6, has no moments of `late`


def on_ranks(worker, world_size: int, *arguments) -> list:
    return launch(worker, *arguments, world_size=world_size, device="cpu", timeout_s=240, progress=False)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="set_reduce_scatter_unused_params came with torch 2.13")
def test_ddp_on_three_ranks_fsdp2_on_two_killed_in_a_save_and_on_with_three(tmp_path):
    path, folder, log = (str(tmp_path / name) for name in ("ddp.pt", "run", "steps.txt"))
    stayed = on_ranks(train_ddp, 3, path, SAVED_AT, LAST_STEP)[0]
    with pytest.raises(RankError, match="SIGKILL"):
        on_ranks(train_fsdp2, 2, path, folder, log, LAST_STEP, KILLED_AT)
    assert sorted(found.name for found in (tmp_path / "run").iterdir()) == ["000006", "unfinished-000009"]
    on_ranks(train_fsdp2, 3, path, folder, log, LAST_STEP)
    lines = [line.split() for line in (tmp_path / "steps.txt").read_text().splitlines()]
    assert [int(step) for step, *_ in lines] == [*range(SAVED_AT, KILLED_AT), *range(6, LAST_STEP)]
    for step, *found in lines:
        assert [float(number) for number in found] == pytest.approx(stayed[int(step)], abs=1e-5), step
