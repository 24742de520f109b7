import os
import platform
import py_compile
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import types
from pathlib import Path

import pytest
import torch
import workers_for_tests as workers

from fsdp_helpers.ranks.launch import RankError, RankTimeout, check_worker, launch

TESTS = Path(__file__).resolve().parent.parent


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition, timeout_s: float = 20.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return bool(condition())


def start_python(code: str, variables: dict[str, str] | None = None, **settings) -> subprocess.Popen:
    """A Python of its own that can import the workers; in a session of its own, as a kernel is."""
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}", **(variables or {})}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **settings,
    )


# ---------------------------------------------------------------- results


def test_results_in_rank_order():
    assert launch(workers.return_rank, world_size=3, device="cpu") == [(0, 3), (1, 3), (2, 3)]


def test_one_rank_is_a_group_too():
    assert launch(workers.all_reduce_rank, world_size=1, device="cpu") == [1.0]


def test_ranks_talk():
    # 1 + 2 + 3 = 6 on every rank
    assert launch(workers.all_reduce_rank, world_size=3, device="cpu") == [6.0, 6.0, 6.0]


def test_tensor_results():
    results = launch(workers.return_tensor, world_size=2, device="cpu")
    assert [result.tolist() for result in results] == [[0.0, 0.0], [1.0, 1.0]]


def test_every_rank_is_a_process_that_ends():
    pids = launch(workers.return_pid, world_size=2, device="cpu")
    assert len({*pids, os.getpid()}) == 3
    assert wait_until(lambda: not any(is_running(pid) for pid in pids))


def test_variables_as_under_torchrun_and_a_share_of_the_cores():
    results = launch(workers.return_variables, world_size=2, device="cpu")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert results == [([rank, rank, 2, 2], "gloo", max(1, cores // 2)) for rank in range(2)]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep freed memory")
def test_freed_memory_is_used_again():
    faults = launch(workers.count_page_faults, world_size=1, device="cpu")[0]
    assert faults[0] > 10_000  # three buffers of 8,192 pages, two or three of them new
    assert max(faults[2:]) < 100


def test_the_allocator_settings_end_with_the_server():
    """A Python that launches has the reader's own setting again, also for what it starts itself."""
    code = """
        import os, workers_for_tests as workers
        from fsdp_helpers.ranks.launch import launch
        launch(workers.return_rank, world_size=1, device="cpu")
        print(launch(workers.return_tunables, world_size=1, device="cpu")[0], os.environ.get("GLIBC_TUNABLES"))
    """
    settings = {"GLIBC_TUNABLES": "glibc.malloc.perturb=0"}
    with start_python(code, settings) as process:
        in_rank, in_parent = process.communicate(timeout=60)[0].split()
    assert in_rank.endswith(":glibc.malloc.perturb=0") and "tcache_count=0" in in_rank
    assert in_parent == "glibc.malloc.perturb=0"


def test_prints_arrive_as_whole_lines(capsys):
    launch(workers.print_lines, 50, world_size=2, device="cpu")
    output = capsys.readouterr()
    lines = output.out.splitlines()
    for rank in range(2):
        numbers = [line for line in lines if re.fullmatch(rf"rank {rank} line \d+", line)]
        assert numbers == [f"rank {rank} line {number}" for number in range(50)]
    assert lines.count("no newline at the end") == 2
    assert len(lines) == 2 * 50 + 2
    assert sorted(output.err.splitlines()) == ["to stderr 0", "to stderr 1"]


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_rank_that_raises(bad_rank):
    start_s = time.monotonic()
    with pytest.raises(RankError) as caught:
        launch(workers.raise_on, bad_rank, world_size=3, device="cpu")
    assert time.monotonic() - start_s < 30  # not the minutes that the others would wait in their barrier
    message = str(caught.value)
    assert message.startswith(f"rank {bad_rank} of 3 failed: ZeroDivisionError: on purpose, on rank {bad_rank}")
    assert re.search(r'workers_for_tests.py", line \d+, in raise_on', message)
    assert caught.value.rank == bad_rank


def test_the_next_launch_works():
    with pytest.raises(RankError):
        launch(workers.raise_on, 0, world_size=2, device="cpu")
    assert launch(workers.return_rank, world_size=2, device="cpu") == [(0, 2), (1, 2)]


def test_a_rank_that_is_killed():
    with pytest.raises(RankError, match="rank 1 of 2 failed: the process was ended by SIGKILL .*out of memory"):
        launch(workers.kill_itself, 1, world_size=2, device="cpu")


def test_a_rank_that_leaves():
    with pytest.raises(RankError, match="SystemExit: 0"):
        launch(workers.leave_with, 0, world_size=2, device="cpu")
    with pytest.raises(RankError, match="left with exit status 7 before its worker returned"):
        launch(workers.leave_at_once, 7, world_size=1, device="cpu")


def test_a_result_that_cannot_be_pickled():
    with pytest.raises(RankError, match="rank [01] of 2 failed: TypeError: cannot pickle"):
        launch(workers.return_unpicklable, world_size=2, device="cpu")


def test_a_rank_that_hangs():
    with pytest.raises(RankTimeout) as caught:
        launch(workers.hang_on, 1, world_size=2, device="cpu", timeout_s=2)
    message = str(caught.value)
    assert "after 2 s, 2 of 2 ranks had not finished" in message
    assert re.search(
        r"rank 0 was waiting in all_reduce\(\), called from workers_for_tests.py line \d+, in hang_on", message
    )
    assert re.search(r"rank 1 was at workers_for_tests.py line \d+, in sleep_for_ever", message)


def test_a_rank_that_ignores_sigterm_is_ended_too():
    start_s = time.monotonic()
    with pytest.raises(RankTimeout):
        launch(workers.ignore_sigterm, world_size=1, device="cpu", timeout_s=1)
    assert time.monotonic() - start_s < 20


def test_a_rank_that_never_stops_printing_is_ended_like_any_other():
    # In a process of its own: where this goes wrong, it goes on for ever.
    code = """
        import contextlib, io
        from fsdp_helpers.ranks.launch import RankError, RankTimeout, launch
        from workers_for_tests import print_for_ever, raise_while_another_prints

        def outcome(worker):
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    launch(worker, world_size=2, device="cpu", timeout_s=2)
            except (RankError, RankTimeout) as error:
                print(type(error).__name__, flush=True)

        outcome(raise_while_another_prints)
        outcome(print_for_ever)
    """
    process = start_python(code)
    try:
        output, _ = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    assert output.split() == ["RankError", "RankTimeout"]


# ---------------------------------------------------------------- refused before anything starts


def notebook_function():
    """A function as a notebook cell defines it: in __main__, with a file name that is no file."""
    cell = compile("def train(rank, world_size):\n    return rank\n", "<ipython-input-1>", "exec")
    code = next(constant for constant in cell.co_consts if isinstance(constant, types.CodeType))
    return types.FunctionType(code, {"__name__": "__main__"})


def nested_function():
    def worker(rank, world_size):
        return rank

    return worker


@pytest.mark.parametrize(
    "worker, reason",
    [
        (notebook_function(), r"(?s)'train' is defined in a notebook cell.*module.*%%writefile my_worker.py"),
        (lambda rank, world_size: rank, "is a lambda or is defined inside another function"),
        (nested_function(), "is a lambda or is defined inside another function"),
        (print, "a worker must be a function"),
        ("train", "a worker must be a function, this is 'str'"),
    ],
)
def test_workers_that_cannot_be_imported(worker, reason, monkeypatch):
    monkeypatch.setattr("fsdp_helpers.ranks.launch._start_rank", lambda *args: pytest.fail("a rank was started"))
    with pytest.raises(ValueError, match=reason):
        launch(worker, world_size=2)


def test_a_module_function_is_accepted():
    check_worker(workers.return_rank)


@pytest.mark.parametrize("world_size", [0, -1, 1.5, "2"])
def test_numbers_of_ranks_that_cannot_be(world_size):
    with pytest.raises(ValueError, match=f"world_size is {world_size!r}; it must be a whole number, 1 or more"):
        launch(workers.return_rank, world_size=world_size)


def test_more_ranks_than_cuda_devices():
    found = torch.cuda.device_count()
    wanted = found + 1
    with pytest.raises(ValueError, match=f"{wanted} ranks need {wanted} CUDA devices, this machine has {found}"):
        launch(workers.return_rank, world_size=wanted, device="cuda")


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


def test_a_module_written_beside_the_notebook(tmp_path):
    # What '%%writefile my_worker.py' does: a file in the working directory, imported by name.
    (tmp_path / "my_worker.py").write_text("def work(rank, world_size):\n    return rank * 10\n")
    code = """
        from fsdp_helpers.ranks.launch import launch
        from my_worker import work
        print(launch(work, world_size=2, device="cpu"))
    """
    output, errors = start_python(code, cwd=tmp_path).communicate(timeout=90)
    assert output == "[0, 10]\n", errors


# ---------------------------------------------------------------- interrupts and kills


def start_hanging_launch(folder: Path) -> subprocess.Popen:
    (folder / "tmp").mkdir()
    code = f"""
        import tempfile
        tempfile.tempdir = {str(folder / "tmp")!r}
        from fsdp_helpers.ranks.launch import launch
        from workers_for_tests import return_rank, write_pid_and_hang
        print("starting", flush=True)
        try:
            launch(write_pid_and_hang, {str(folder)!r}, world_size=2, device="cpu")
        except KeyboardInterrupt:
            print("interrupted", launch(return_rank, world_size=2, device="cpu"), flush=True)
    """
    return start_python(code)


def rank_pids(folder: Path) -> list[int]:
    """The ranks' process ids, once both have written them."""
    files = [folder / f"pid-{rank}" for rank in range(2)]
    assert wait_until(lambda: all(file.exists() and file.read_text() for file in files), 60)
    return [int(file.read_text()) for file in files]


def launch_folders(folder: Path) -> list[str]:
    return [path.name for path in (folder / "tmp").iterdir() if path.name.startswith("fsdp_helpers-")]


def test_interrupt_ends_the_ranks_and_the_next_launch_works(tmp_path):
    process = start_hanging_launch(tmp_path)
    pids = rank_pids(tmp_path)
    os.killpg(process.pid, signal.SIGINT)  # as Jupyter interrupts a kernel: the whole process group
    output, errors = process.communicate(timeout=60)
    assert output.splitlines()[1:] == ["interrupted [(0, 2), (1, 2)]"], errors
    assert errors == ""
    assert not any(is_running(pid) for pid in pids)
    assert launch_folders(tmp_path) == []


def test_interrupt_while_the_first_ranks_are_starting(tmp_path):
    process = start_hanging_launch(tmp_path)
    assert process.stdout.readline() == "starting\n"
    time.sleep(0.5)  # torch is being loaded for the ranks, which takes seconds
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert output == "interrupted [(0, 2), (1, 2)]\n", errors
    assert launch_folders(tmp_path) == []


def test_a_killed_parent_takes_its_ranks_along(tmp_path):
    process = start_hanging_launch(tmp_path)
    pids = rank_pids(tmp_path)
    assert launch_folders(tmp_path) != []
    process.kill()
    process.communicate(timeout=30)
    assert wait_until(lambda: not any(is_running(pid) for pid in pids))
    assert wait_until(lambda: launch_folders(tmp_path) == [])


# ---------------------------------------------------------------- side by side


@pytest.mark.long
def test_two_notebooks_launching_in_a_loop_never_collide():
    code = """
        from fsdp_helpers.ranks.launch import launch
        from workers_for_tests import all_reduce_rank
        print([launch(all_reduce_rank, world_size=2, device="cpu") for _ in range(10)])
    """
    outputs = [process.communicate(timeout=120) for process in [start_python(code) for _ in range(2)]]
    # 1 + 2 = 3 on both ranks, ten times, in both
    assert [output for output, _ in outputs] == [f"{[[3.0, 3.0]] * 10}\n"] * 2, outputs


def test_a_launch_leaves_no_folder():
    before = set(os.listdir(tempfile.gettempdir()))
    launch(workers.return_rank, world_size=1, device="cpu")
    with pytest.raises(RankError):
        launch(workers.leave_at_once, 1, world_size=1, device="cpu")
    assert set(os.listdir(tempfile.gettempdir())) == before
