"""Ranks that wait for one another forever are ended soon; slow ones are not."""

import os
import re
from types import SimpleNamespace

import launch_workers as workers
import psutil
import pytest

from fsdp_helpers.ranks import processes
from fsdp_helpers.ranks.launch import RankTimeout, launch

STALL_S = 1.5


def test_ranks_that_only_wait_are_ended_and_say_where():
    with pytest.raises(RankTimeout) as caught:
        launch(workers.hang_on, 1, world_size=2, device="cpu", timeout_s=240, stall_s=STALL_S)
    assert "after 1.5 s in which no rank computed or reported anything, 2 of 2 ranks had not" in str(caught.value)
    first, second = caught.value.places
    assert re.fullmatch(r"rank 0 was waiting in all_reduce\(\), called from launch_workers.py .* hang_on", first)
    assert re.fullmatch(r"rank 1 was at launch_workers.py line \d+, in sleep_for_ever", second)


@pytest.mark.parametrize("way", ["compute", "report", "print"])
def test_one_rank_that_moves_is_enough(way):
    answers = launch(
        workers.keep_others_waiting, way, 2 * STALL_S, world_size=2, device="cpu", stall_s=STALL_S, progress=False
    )
    assert answers == [2.0, 2.0]


def test_one_rank_that_computes_is_enough_however_many_wait(monkeypatch):
    now_s, spent_s = 100.0, dict.fromkeys(range(64), 5.0)
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(processes, "cpu_seconds", lambda pid: spent_s[pid])
    group = object.__new__(processes.Processes)
    group.world_size, group.stall_s, group.notes = 64, 10.0, spent_s
    group._processes = [SimpleNamespace(pid=rank) for rank in spent_s]
    group._moved()
    now_s += 9.9
    assert not group._have_hung(list(spent_s))
    spent_s[63] += 0.5  # a twentieth of a core, the others nothing
    now_s += 0.2
    assert not group._have_hung(list(spent_s))
    now_s += 10.0
    assert group._have_hung(list(spent_s))


def test_a_rank_counts_even_if_others_processes_are_hidden(monkeypatch):
    def refuse(process, recursive=False):
        raise psutil.AccessDenied(1)

    monkeypatch.setattr(psutil.Process, "children", refuse)
    assert processes.cpu_seconds(os.getpid()) > 0.0


def test_the_clock_runs_once_all_ranks_are_in_the_group(tmp_path, monkeypatch):
    module = tmp_path / "slow_to_import.py"
    module.write_text("import os, time\ntime.sleep(float(os.environ.get('WORLD_SIZE', 0)) * 1.5)\n")
    with module.open("a") as file:
        file.write("def work(rank, world_size):\n    return rank\n")
    monkeypatch.syspath_prepend(tmp_path)
    from slow_to_import import work

    assert launch(work, world_size=2, device="cpu", stall_s=STALL_S) == [0, 1]


def test_a_limit_must_be_a_number_of_seconds():
    with pytest.raises(ValueError, match="stall_s is 0; it must be a number of seconds above 0"):
        launch(workers.hang_on, 1, world_size=2, device="cpu", stall_s=0)
