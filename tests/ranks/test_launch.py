import contextlib
import io
import os
import platform
import py_compile
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import launch_workers as workers
import pytest
from programs import has_ended, is_running, needs_server, running_python, wait_until

from fsdp_helpers.ranks.errors import Answer, Failure
from fsdp_helpers.ranks.launch import RankError, RankTimeout, launch
from fsdp_helpers.ranks.processes import Processes

# ---------------------------------------------------------------- results


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    """What each of three ranks says of itself."""
    return launch(workers.describe_itself, world_size=3, device="cpu")


def test_a_thread_pool_that_stays_open_does_not_keep_a_rank():
    assert launch(workers.leave_a_thread_pool_open, world_size=1, timeout_s=20) == [(0, 1)]


def test_results_in_rank_order(ranks):
    assert [rank["rank"] for rank in ranks] == [(0, 3), (1, 3), (2, 3)]
    assert [rank["tensor"].tolist() for rank in ranks] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


def test_ranks_talk(ranks):
    assert [rank["sum"] for rank in ranks] == [6.0] * 3  # 1 + 2 + 3 on every rank
    assert {rank["backend"] for rank in ranks} == {"gloo"}


def test_every_rank_is_a_process_that_ends(ranks):
    pids = [rank["pid"] for rank in ranks]
    assert len({*pids, os.getpid()}) == 4
    assert not any(is_running(pid) for pid in pids)


def test_variables_as_under_torchrun_and_a_share_of_the_cores(ranks):
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert [rank["variables"] for rank in ranks] == [[number, number, 3, 3] for number in range(3)]
    assert [rank["num_threads"] for rank in ranks] == [max(1, cores // 3)] * 3


@needs_server
def test_the_garbage_collector_passes_over_what_the_server_has_loaded(ranks):
    assert min(rank["num_frozen"] for rank in ranks) > 50_000  # torch alone brings several times as many objects


def test_prints_arrive_as_whole_lines_and_say_who_printed_them(capsys):
    launch(workers.print_lines, 50, world_size=2, device="cpu")
    output = capsys.readouterr()
    lines = output.out.splitlines()
    for rank in range(2):
        own = [line.removeprefix(f"[rank {rank}] ") for line in lines if line.startswith(f"[rank {rank}] ")]
        assert own[:50] == [f"rank {rank} line {number}" for number in range(50)]
        assert sorted(own[50:]) == ["by a C library", "by a process", "bytes: ü", "no newline at the end"]
    assert len(lines) == 2 * 54
    assert sorted(output.err.splitlines()) == ["[rank 0] to stderr 0", "[rank 1] to stderr 1"]


def test_lines_of_a_single_rank_have_no_names(capsys):
    launch(workers.print_lines, 1, device="cpu", world_size=1)
    output = capsys.readouterr()
    assert output.out.splitlines().count("no newline at the end") == 1
    assert "[rank" not in output.out + output.err


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_rank_that_raises(bad_rank):
    with pytest.raises(RankError) as caught:  # at once: the others would wait in their barrier for half an hour
        launch(workers.raise_on, bad_rank, world_size=3, device="cpu")
    message = str(caught.value)
    assert message.startswith(f"rank {bad_rank} of 3 failed: ZeroDivisionError: on purpose, on rank {bad_rank}")
    assert re.search(r'launch_workers.py", line \d+, in raise_on', message)
    assert caught.value.rank == bad_rank


def test_a_rank_that_is_killed():
    with pytest.raises(RankError, match="rank 1 of 2 failed: the process was ended by SIGKILL .*out of memory"):
        launch(workers.kill_itself, 1, world_size=2, device="cpu")


class Told(Processes):
    """Processes that never started; what they say is given: (after how many seconds, rank, its failure or exit code)."""

    def __init__(self, *said: tuple[float, int, Failure | int]) -> None:
        self.world_size, self.number, self.stall_s = len(said), 1, None
        self.answers, self.ends, self._processes = {}, {}, [SimpleNamespace(pid=0)] * len(said)
        self._said, self._began_s = sorted(said, key=lambda one: one[0]), time.monotonic()

    def _listen(self, ranks, wait_s):
        after_s, rank, said = self._said[0]
        left_s = self._began_s + after_s - time.monotonic()
        time.sleep(min(max(0.0, left_s), wait_s))
        if left_s <= wait_s:
            self._said.pop(0)
            known = self.ends if isinstance(said, int) else self.answers
            known[rank] = said if isinstance(said, int) else Answer(None, failure=said)


def test_a_rank_whose_time_was_up_comes_before_those_whose_connection_it_closed():
    """An error with gloo's name comes first, unless its transport raised it."""
    closed, late = (
        f"RuntimeError: [gloo/transport/tcp/pair.cc:1] {said}" for said in ("Connection closed", "Timed out")
    )
    said = [Failure(closed, when_s=1.0), Failure(late, when_s=2.0), Failure("invalid for gloo", when_s=3.0)]
    for last, cause in ((3, "rank 2 of 3 failed: invalid"), (2, "rank 1 of 2 failed: .*Timed out")):
        with pytest.raises(RankError, match=cause):
            Told(*((0.0, rank, failure) for rank, failure in enumerate(said[:last]))).answers_of_all()


@pytest.mark.parametrize("times_s", [(1.0, 2.0, 3.0), (3.0, 1.0, 2.0), (3.0, 2.0, 1.0)])
def test_of_several_failures_the_first_is_told(times_s):
    """Whichever message is read first: the others fail because of it."""
    said = [(0.0, rank, Failure(f"failed at {when_s} s", when_s=when_s)) for rank, when_s in enumerate(times_s)]
    with pytest.raises(RankError) as caught:
        Told(*said).answers_of_all()
    assert str(caught.value) == f"rank {times_s.index(1.0)} of 3 failed: failed at 1.0 s"


@pytest.mark.parametrize("cause", [-signal.SIGKILL, Failure("MemoryError")])
def test_a_cause_that_is_heard_after_its_effect(cause):
    """The connection breaks at once; what broke it arrives a moment later."""
    effect = Failure("RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:29500", when_s=0.0)
    with pytest.raises(RankError, match="rank 1 of 2 failed: (the process was ended by SIGKILL|MemoryError)"):
        Told((0.0, 0, effect), (0.2, 1, cause)).answers_of_all()


def test_a_rank_that_leaves():
    with pytest.raises(RankError, match="SystemExit: 0"):
        launch(workers.leave_with, 0, world_size=2, device="cpu")
    with pytest.raises(RankError, match="rank 0 of 1 failed: the process ended with exit status 7"):
        launch(workers.leave_at_once, 7, world_size=1, device="cpu")


def test_a_result_that_cannot_travel():
    with pytest.raises(RankError, match="rank [01] of 2 failed: ValueError: the result of 'return_unpicklable' is of"):
        launch(workers.return_unpicklable, world_size=2, device="cpu")
    with pytest.raises(RankError, match="rank 0 of 1 failed: its answer arrived, but can't be read: ValueError: inv"):
        launch(workers.return_what_cannot_be_read, world_size=1, device="cpu")


def test_a_rank_that_ignores_sigterm_is_ended_too():
    """It would sleep forever. Once it only sleeps, it ignores the signal; before, on a busy machine, it might not."""
    with pytest.raises(RankTimeout):
        launch(workers.ignore_sigterm, world_size=1, device="cpu", stall_s=1)


class Nowhere(io.TextIOBase):
    """Takes what is printed, and keeps none of it."""

    def write(self, text: str) -> int:
        return len(text)


def test_a_rank_that_never_stops_printing_is_ended_like_any_other():
    with contextlib.redirect_stdout(Nowhere()):
        with pytest.raises(RankError, match="rank 0 of 2 failed: ZeroDivisionError: on purpose"):
            launch(workers.raise_while_another_prints, world_size=2, device="cpu")
        with pytest.raises(RankTimeout, match="after 1 s, 2 of 2 ranks had not finished"):
            launch(workers.print_for_ever, world_size=2, device="cpu", timeout_s=1)


# ---------------------------------------------------------------- refused before anything starts


@pytest.fixture
def nothing_starts(monkeypatch):
    refuse = lambda *args, **settings: pytest.fail("a rank was started")  # noqa: E731
    monkeypatch.setattr("fsdp_helpers.ranks.launch.Processes", refuse)


@pytest.mark.parametrize("world_size", [0, -1, 1.5, "2", True])
def test_numbers_of_ranks_that_cannot_be(world_size, nothing_starts):
    with pytest.raises(ValueError, match=f"world_size is {world_size!r}; it must be a whole number, 1 or more"):
        launch(workers.return_rank, world_size=world_size)


@pytest.mark.parametrize("timeout_s", [0, -1, 0.0, float("nan"), float("inf"), True, "5"])
def test_times_that_cannot_be(timeout_s, nothing_starts):
    with pytest.raises(ValueError, match=f"timeout_s is {timeout_s!r}; it must be a number of seconds above 0"):
        launch(workers.return_rank, world_size=1, timeout_s=timeout_s)


def test_unknown_device():
    with pytest.raises(ValueError, match="unknown device 'tpu'; choose one of auto, cpu, cuda"):
        launch(workers.return_rank, world_size=1, device="tpu")


# ---------------------------------------------------------------- edits between two launches


def test_an_edit_counts_from_the_next_launch(tmp_path, monkeypatch):
    module = tmp_path / "my_worker_to_edit.py"
    module.write_text("def work(rank, world_size):\n    return 'old'\n")
    os.utime(module, (1_000_000_000, 1_000_000_000))
    py_compile.compile(str(module))  # the cache that a first import leaves
    monkeypatch.syspath_prepend(tmp_path)
    import my_worker_to_edit

    assert launch(my_worker_to_edit.work, world_size=1, device="cpu") == ["old"]
    # The same number of bytes and the same second of change: all that Python compares with its cache.
    module.write_text("def work(rank, world_size):\n    return 'new'\n")
    os.utime(module, (1_000_000_000, 1_000_000_000))
    assert launch(my_worker_to_edit.work, world_size=1, device="cpu") == ["new"]


# ---------------------------------------------------------------- interrupts and kills


@contextmanager
def hanging_launches(folder: Path) -> Iterator:
    """A Python that, for each line that it reads, launches ranks that hang, and others once it is interrupted."""
    short = tempfile.mkdtemp()  # the server's socket lies there, and its path has to fit into 107 characters
    (folder / "tmp").symlink_to(short)
    code = f"""
        import sys, tempfile
        tempfile.tempdir = {short!r}
        from fsdp_helpers.ranks.launch import launch
        from launch_workers import leave_processes, load_torch_alone, return_rank
        load_torch_alone()
        for _ in sys.stdin:
            try:
                print("starting", flush=True)
                launch(leave_processes, {str(folder)!r}, "interrupt", world_size=2, device="cpu")
            except KeyboardInterrupt:
                print("interrupted", launch(return_rank, world_size=2, device="cpu"), flush=True)
    """
    with running_python(code, stdin=subprocess.PIPE) as process:
        yield process
    shutil.rmtree(short)


def start_hanging(process) -> None:
    process.stdin.write("go\n")
    process.stdin.flush()
    assert process.stdout.readline() == "starting\n", process.stderr.read()


def written_pids(folder: Path) -> list[int]:
    """The process ids of both ranks and of all that they started, once they are written."""
    files = [folder / f"pids-{rank}" for rank in range(2)]
    assert wait_until(lambda: all(file.exists() for file in files), 200)
    pids = [int(pid) for file in files for pid in file.read_text().split()]
    for file in files:
        file.unlink()
    assert len(pids) == 16 and all(is_running(pid) for pid in pids)
    return pids


def launch_folders(folder: Path) -> list[str]:
    return [path.name for path in (folder / "tmp").iterdir() if path.name.startswith("fsdp_helpers-")]


def interrupt(process, folder: Path) -> None:
    """As Jupyter interrupts a kernel, the whole process group; and the next launch works."""
    os.killpg(process.pid, signal.SIGINT)
    assert process.stdout.readline() == "interrupted [(0, 2), (1, 2)]\n", process.stderr.read()
    assert launch_folders(folder) == []


def test_interrupted_while_starting_interrupted_while_running_and_killed(tmp_path):
    """One Python after the other would say the same of each, and take three times as long to load torch."""
    with hanging_launches(tmp_path) as process:
        start_hanging(process)
        time.sleep(0.5)  # torch is being loaded for the ranks, which takes seconds
        interrupt(process, tmp_path)

        start_hanging(process)
        pids = written_pids(tmp_path)
        interrupt(process, tmp_path)
        assert all(has_ended(pid) for pid in pids)

        start_hanging(process)
        pids = written_pids(tmp_path)
        assert launch_folders(tmp_path) != []
        process.kill()
        _, errors = process.communicate(timeout=240)
        assert wait_until(lambda: all(has_ended(pid) for pid in pids))
        assert wait_until(lambda: launch_folders(tmp_path) == [])
        assert errors == ""


# ---------------------------------------------------------------- the environment


def test_ranks_have_the_environment_of_their_launch(monkeypatch):
    """Also where the server that forks them is older than a change."""
    launch(workers.return_rank, world_size=1, device="cpu")
    monkeypatch.setenv("SET_AFTER_THE_FIRST_LAUNCH", "yes")
    with_it = launch(workers.return_environment, world_size=1, device="cpu")[0]
    monkeypatch.delenv("SET_AFTER_THE_FIRST_LAUNCH")
    without = launch(workers.return_environment, world_size=1, device="cpu")[0]
    assert with_it["SET_AFTER_THE_FIRST_LAUNCH"] == "yes"
    assert "SET_AFTER_THE_FIRST_LAUNCH" not in without
    assert without["WORLD_SIZE"] == "1"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep freed memory")
def test_freed_memory_is_used_again():
    ranks = [
        counts for seed in range(4) for counts in launch(workers.count_new_buffers, seed, world_size=2, device="cpu")
    ]
    assert {counts[0] for counts in ranks} <= {2, 3}
    # In most ranks, no round from the third on needs a new buffer; in long runs of the tests, up to four of the eight
    # needed one. Without MALLOC_TUNABLES, more than half of these ranks need 16; without `keep_freed_memory`, all need 24.
    assert max(sum(counts[2:]) for counts in ranks) < 8
