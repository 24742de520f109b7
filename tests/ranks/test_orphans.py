"""Nothing that a worker starts outlives its launch, however the launch ends (interrupts: see test_launch)."""

import sys
from pathlib import Path

import launch_workers as workers
import pytest
from programs import has_ended

from fsdp_helpers.ranks.launch import RankError, RankTimeout, launch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux alone")

RAISED = {"success": None, "failure": RankError, "kill": RankError, "time-out": RankTimeout}


def pids_of(folder: Path) -> list[int]:
    """The ids of the rank and of what it started."""
    return list(map(int, (folder / "pids-0").read_text().split()))


def end_a_launch(end: str, folder: Path) -> list[int]:
    """Launch a rank that leaves processes behind, and check how the launch ends; the ids of all of them."""
    (folder / "pids-0").unlink(missing_ok=True)
    # The time is up once the rank, which has started everything by then, only sleeps.
    settings = {"world_size": 1, "device": "cpu", "stall_s": 1 if end == "time-out" else None}
    if RAISED[end] is None:
        launch(workers.leave_processes, str(folder), end, **settings)
    else:
        with pytest.raises(RAISED[end]):
            launch(workers.leave_processes, str(folder), end, **settings)
    return pids_of(folder)


@pytest.mark.parametrize("end", RAISED)
def test_what_a_worker_started_ends_with_the_launch(end, tmp_path):
    pids = end_a_launch(end, tmp_path)
    assert len(pids) == 8
    assert all(has_ended(pid) for pid in pids)  # at once, without a moment's grace
