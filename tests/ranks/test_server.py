"""How ranks are started: with and without a main guard, where interrupts are ignored."""

import ast
import importlib
import os
import sys
import time
import traceback

import pytest
from leftovers import PROJECT
from programs import has_ended, needs_server, running, running_python, wait_until

from fsdp_helpers.ranks.launch import RankError
from fsdp_helpers.ranks.processes import Processes
from fsdp_helpers.ranks.server import NO_MAIN_GUARD

EARLY = """
import pathlib, sys, types
import fsdp_helpers

events = types.SimpleNamespace(register=lambda *_: None)
fsdp_helpers.load_ipython_extension(types.SimpleNamespace(register_magic_function=lambda *_, **__: None, events=events))
assert "torch" not in sys.modules
began = pathlib.Path(sys.argv[1])
while not began.exists() or not began.read_text():
    pass
"""


@needs_server
def test_an_extension_that_is_loaded_starts_a_server_which_ends_with_the_notebook_even_while_it_loads_torch(tmp_path):
    (tmp_path / "torch").mkdir()
    began = tmp_path / "torch" / "began"
    slow = f"import os, pathlib, time\npathlib.Path({str(began)!r}).write_text(str(os.getpid()))\ntime.sleep(600)\n"
    (tmp_path / "torch" / "__init__.py").write_text(slow)
    paths = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{PROJECT}"}
    with running([sys.executable, "-c", EARLY, str(began)], variables=paths) as process:
        assert process.wait(timeout=240) == 0
        assert wait_until(lambda: has_ended(int(began.read_text())), 30.0)


UNGUARDED = """
from fsdp_helpers.ranks.launch import launch
from launch_workers import load_torch_alone, return_rank

load_torch_alone()
print(launch(return_rank, world_size=2, device="cpu"))
"""


def test_a_script_without_a_main_guard_hears_it_once(tmp_path):
    script = tmp_path / "my_script.py"
    script.write_text(UNGUARDED)
    with running([sys.executable, str(script)]) as process:
        output, errors = process.communicate(timeout=240)
    assert process.returncode == 1 and output == ""
    assert errors.count("main guard") == errors.count("Traceback") == 1
    last = errors.splitlines()[-1]
    assert last.startswith("RuntimeError: my_script.py has no main guard: ") and '`if __name__ == "__main__":`' in last


def leave_without_a_main_guard(rank, world_size, group, send, link):
    """As such a rank ends, but slowly: its link closes long before its process is gone."""
    link.close()
    time.sleep(0.3)
    os._exit(NO_MAIN_GUARD)


def test_a_missing_main_guard_is_the_only_error_whichever_sign_of_it_comes_first():
    with Processes(leave_without_a_main_guard, 1, "cpu", lambda *_: None) as ranks:
        with pytest.raises(RuntimeError, match="has no main guard") as caught:
            ranks.collect([0])
    assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1


def test_a_module_that_launches_while_ranks_import_it_does_not_go_on_for_ever(tmp_path, monkeypatch, capfd):
    (tmp_path / "module_that_launches.py").write_text(
        "from fsdp_helpers.ranks.launch import launch\n"
        "def work(rank, world_size): return rank\n"
        "print(launch(work, world_size=2, device='cpu'))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RankError) as caught:
        importlib.import_module("module_that_launches")
    assert "a rank calls launch, perhaps because its worker's module does" in caught.value.summary
    assert capfd.readouterr() == ("", "")


OWN_TUNABLES = "glibc.malloc.perturb=0"  # a setting of the reader's
OWN_WORKER = """
import os

def work(rank, world_size):
    with open(f"/proc/{os.getppid()}/environ") as server:
        return "arena_max" in (begun_with := server.read()), "perturb" in begun_with, os.environ.get("GLIBC_TUNABLES")
"""


@needs_server
@pytest.mark.long
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
    # The server has the series' settings and the reader's; ranks and the Python that launches see the reader's alone.
    assert ranks == [(True, True, OWN_TUNABLES)] * 2
    assert (tunables, ignored) == (OWN_TUNABLES, True)
