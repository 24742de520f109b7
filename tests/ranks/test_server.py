"""How ranks are started: forked or spawned, with and without a main guard, where signals are missing or ignored."""

import ast
import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import sys
from pathlib import Path

import launch_workers as workers
import pytest
from programs import is_running, running, running_python, wait_until
from runs import mostly_long

from fsdp_helpers.ranks import server as fork_server
from fsdp_helpers.ranks.allocator import MALLOC_TUNABLES
from fsdp_helpers.ranks.gpus import NONE
from fsdp_helpers.ranks.launch import RankError, launch
from fsdp_helpers.ranks.server import choose_start_method


def test_a_server_where_there_can_be_one(monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["fork", "spawn", "forkserver"])
    assert [choose_start_method(name) for name in (None, "forkserver", "spawn")] == [
        "forkserver",
        "forkserver",
        "spawn",
    ]
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    assert choose_start_method(None) == "spawn"
    with pytest.raises(ValueError, match="unknown start method 'forkserver'; choose one of spawn"):
        choose_start_method("forkserver")


@pytest.mark.parametrize("name", ["fork", "thread", 3])
def test_other_start_methods_are_refused(name):
    with pytest.raises(ValueError, match=f"unknown start method {name!r}; choose one of forkserver, spawn"):
        launch(workers.return_rank, world_size=1, start_method=name)


def test_spawned_ranks_keep_every_promise():
    """Results, talk, settings, no GPU in sight, and nothing left of what they start."""
    found = launch(workers.describe_and_leave_processes, world_size=2, device="cpu", start_method="spawn")
    assert [rank["rank"] for rank, _ in found] == [(0, 2), (1, 2)]
    assert [rank["sum"] for rank, _ in found] == [3.0, 3.0]  # 1 + 2
    assert [rank["visible_gpus"] for rank, _ in found] == [NONE, NONE]
    assert not [pid for _, pids in found for pid in pids if Path("/proc", str(pid)).exists()]


# What Windows lacks, taken away at the top of a script: a spawned rank imports the script, and lacks it too.
# Each of the five processes loads torch, so nothing else is loaded.
WITHOUT = """
import faulthandler, multiprocessing, os, signal, sys, tempfile
import torch.distributed  # for other systems torch asks for other names
from multiprocessing import resource_tracker

resource_tracker._HAVE_SIGMASK = False  # as Python itself finds it there

multiprocessing.get_all_start_methods = lambda: ["spawn"]
for module, names in {
    signal: ("SIGUSR1", "SIGALRM", "SIGKILL", "alarm", "pthread_sigmask"),
    faulthandler: ("register", "unregister"),
    os: ("fork", "setsid", "killpg"),
}.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)

if __name__ == "__main__":
    from fsdp_helpers.ranks.launch import RankError, RankTimeout, launch
    from launch_workers import hang_on, raise_on, return_rank

    print(launch(return_rank, world_size=2, device="cpu"))
    for worker, timeout_s in ((raise_on, None), (hang_on, 1)):  # on one rank: each would load torch
        try:
            launch(worker, 0, world_size=1, device="cpu", timeout_s=timeout_s)
        except (RankError, RankTimeout) as error:
            print(str(error).splitlines()[0:2])
"""


def test_a_system_without_a_server_and_without_signals(tmp_path):
    script = tmp_path / "without.py"
    script.write_text(WITHOUT)
    with running([sys.executable, str(script)]) as process:
        output, errors = process.communicate(timeout=240)
    assert output.splitlines() == [
        "[(0, 2), (1, 2)]",
        "['rank 0 of 1 failed: ZeroDivisionError: on purpose, on rank 0', '']",
        "['after 1 s, 1 of 1 ranks had not finished (0 had)', 'rank 0 was running; this system cannot ask it where']",
    ], errors


UNGUARDED = """
from fsdp_helpers.ranks.launch import launch
from launch_workers import load_torch_alone, return_rank

load_torch_alone()
print(launch(return_rank, world_size=2, device="cpu", start_method={start_method!r}))
"""


@pytest.mark.parametrize("start_method", mostly_long(["forkserver", "spawn"]))
def test_a_script_without_a_main_guard_hears_it_once(start_method, tmp_path):
    script = tmp_path / "my_script.py"
    script.write_text(UNGUARDED.format(start_method=start_method))
    with running([sys.executable, str(script)]) as process:
        output, errors = process.communicate(timeout=240)
    assert process.returncode == 1 and output == ""
    assert errors.count("main guard") == errors.count("Traceback") == 1
    last = errors.splitlines()[-1]
    assert last.startswith("RuntimeError: my_script.py has no main guard: ") and '`if __name__ == "__main__":`' in last


def test_a_module_that_launches_while_ranks_import_it_does_not_go_on_for_ever(tmp_path, monkeypatch, capfd):
    (tmp_path / "module_that_launches.py").write_text(
        "from fsdp_helpers.ranks.launch import launch\n"
        "def work(rank, world_size): return rank\n"
        "print(launch(work, world_size=2, device='cpu'))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RankError) as caught:
        importlib.import_module("module_that_launches")
    assert "calls launch while a rank imports it" in caught.value.summary
    assert capfd.readouterr() == ("", "")


OWN_TUNABLES = "glibc.malloc.perturb=0"  # a setting of the reader's
OWN_WORKER = """
import os

def work(rank, world_size):
    return rank * 10, os.environ.get("GLIBC_TUNABLES")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_python_with_settings_of_its_own(tmp_path):
    """A worker that `%%writefile` put beside the notebook, and the reader's allocator settings.

    Besides, as under `nohup ... &`, interrupts that are ignored, and stay ignored.
    """
    (tmp_path / "my_worker.py").write_text(OWN_WORKER)
    code = """
        import os, signal
        from fsdp_helpers.ranks.launch import launch
        from launch_workers import load_torch_alone
        from my_worker import work
        load_torch_alone()
        os.kill(os.getpid(), signal.SIGINT)
        launch(work, world_size=1, device="cpu")
        ranks = launch(work, world_size=2, device="cpu")
        print((ranks, os.environ.get("GLIBC_TUNABLES"), signal.getsignal(signal.SIGINT) is signal.SIG_IGN))
    """
    ignoring = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    own = {"GLIBC_TUNABLES": OWN_TUNABLES}
    with running_python(code, prelude=ignoring, variables=own, cwd=tmp_path) as process:
        output, errors = process.communicate(timeout=240)
    assert errors == ""
    ranks, tunables, ignored = ast.literal_eval(output)
    # Ranks have the reader's setting after the series' own; the Python that launches has the reader's alone again.
    assert ranks == [(0, f"{MALLOC_TUNABLES}:{OWN_TUNABLES}"), (10, f"{MALLOC_TUNABLES}:{OWN_TUNABLES}")]
    assert (tunables, ignored) == (OWN_TUNABLES, True)


@pytest.mark.skipif(sys.platform != "linux", reason="the environment of a process is read from /proc")
def test_one_server_serves_until_it_is_idle_or_the_other_kind_of_ranks_is_started(monkeypatch):
    """Glibc reads the settings of the allocator, which are for CPU ranks alone, when a process starts.

    So a server for the other kind of ranks is a different process. Those that start no rank load nothing ahead.
    """

    def server() -> tuple[int, bool]:
        pid = multiprocessing.forkserver._forkserver._forkserver_pid
        environment = Path(f"/proc/{pid}/environ")
        assert wait_until(environment.read_bytes)  # empty for a moment, while the process begins
        return pid, b"arena_max" in environment.read_bytes()  # glibc cuts its variable where it reads

    launch(workers.return_rank, world_size=1, device="cpu")
    of_cpu_ranks, has_settings = server()
    assert has_settings
    with fork_server.server_in_use():
        fork_server.end_idle_server()
        assert is_running(of_cpu_ranks)  # a launch is under way
    fork_server.end_idle_server()
    assert not is_running(of_cpu_ranks)

    loaded_ahead = fork_server.PRELOADED
    monkeypatch.setattr(fork_server, "PRELOADED", [])
    with fork_server.server_in_use(), fork_server.ready_to_start("forkserver", "cpu"):
        of_cpu_ranks, has_settings = server()
        assert has_settings
    with fork_server.server_in_use(), fork_server.ready_to_start("forkserver", "cuda"):
        assert MALLOC_TUNABLES not in os.environ.get("GLIBC_TUNABLES", "")
        of_cuda_ranks, has_settings = server()
        assert not is_running(of_cpu_ranks) and not has_settings
    with fork_server.server_in_use(), fork_server.ready_to_start("forkserver", "cuda"):
        assert server() == (of_cuda_ranks, False)  # it serves on
    monkeypatch.setattr(fork_server, "PRELOADED", loaded_ahead)
    assert launch(workers.return_rank, world_size=1, device="cpu") == [(0, 1)]
    assert server()[1] and not is_running(of_cuda_ranks)
