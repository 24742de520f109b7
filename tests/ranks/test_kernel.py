"""A real kernel, as JupyterLab starts one: what a cell shows of a launch, and how launches end with the kernel.

Two kernels start at once and serve all tests, since each needs seconds to load torch, once more for its ranks. The
first loads ahead what every kernel does, the other what its tests need.
"""

import os
import re
import shutil
import signal
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from jupyter_client.manager import KernelManager
from leftovers import SESSION_VARIABLE
from programs import HELPERS, is_running, wait_until

from fsdp_helpers.ranks.server import start_method

PATIENCE_S = 200.0  # for a cell, also on a busy machine
SET_UP = """
import tempfile
from fsdp_helpers.ranks.launch import launch
from launch_workers import all_reduce_rank, load_torch_alone, raise_on, report_until_ended, return_args
kept = tempfile.TemporaryDirectory()
"""
OTHER_SET_UP = SET_UP + "load_torch_alone()\n"
LAUNCH = "launch(all_reduce_rank, world_size=2, device='cpu')"
SUMS = "[3.0, 3.0]"  # 1 + 2 on both ranks
HANG = "launch(report_until_ended, {folder!r}, world_size=2, device='cpu')"


class Kernel:
    """A kernel and a client of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.prompt = folder, 0  # the number of the last cell
        folder.mkdir()
        places = {name: str(folder) for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR", "TMPDIR")}
        environment = {**os.environ, **places, "PYTHONPATH": f"{HELPERS}{os.pathsep}{HELPERS.parents[1]}"}
        del environment[SESSION_VARIABLE]  # a kernel lives for several tests, each of which may leave nothing
        self.manager = KernelManager(connection_file=str(folder / "connection.json"))
        self.manager.start_kernel(cwd=str(folder), env=environment)
        self.client = self.manager.client()
        self.client.start_channels()

    @property
    def pid(self) -> int:
        return self.manager.provisioner.process.pid

    def begin(self, code: str) -> str:
        return self.client.execute(textwrap.dedent(code))

    def end(self, request: str) -> list[dict]:
        """The outputs of a cell, once it is idle; an output that is replaced in place counts as its last state."""
        outputs = []
        while True:
            message = self.client.get_iopub_msg(timeout=PATIENCE_S)
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != request:
                continue
            self.prompt = content.get("execution_count", self.prompt)
            if kind == "status" and content["execution_state"] == "idle":
                return [output for output in outputs if output["kind"] not in ("execute_input", "status")]
            display = content.get("transient", {}).get("display_id")
            outputs = [output for output in outputs if display is None or output["display"] != display]
            outputs.append({"kind": kind, "display": display, **content})

    def run(self, code: str) -> list[dict]:
        self.client.wait_for_ready(timeout=PATIENCE_S)
        return self.end(self.begin(code))

    def wait_for_report(self, request: str, step: int) -> None:
        """Until the cell says that its ranks have come so far."""
        while True:
            message = self.client.get_iopub_msg(timeout=PATIENCE_S)
            text = message["content"].get("data", {}).get("text/plain", "")
            if message["parent_header"].get("msg_id") == request and f" {step}/" in text:
                return

    def processes(self) -> set[int]:
        """All that the kernel has started, its fork server and their children included."""
        return descendants(self.pid)

    def shut_down(self) -> None:
        """End the kernel as JupyterLab does, and see that all goes with it: processes and temporary files."""
        processes = self.processes()
        kept = [path.name for path in self.temporary_files()]  # besides, that of ranks that are still open
        with_server = start_method() == "forkserver"
        assert any(name.startswith("pymp-") for name in kept) == with_server, "the fork server's socket lies there"
        assert any(name.startswith("tmp") for name in kept), "a cell keeps it"
        self.client.stop_channels()
        self.manager.shutdown_kernel()
        assert ended(processes)
        assert self.temporary_files() == []

    def temporary_files(self) -> list[Path]:
        """Of launches, of multiprocessing, and of the cells themselves."""
        return [path for kind in ("fsdp_helpers-*", "pymp-*", "tmp*") for path in self.folder.glob(kind)]


def descendants(pid: int) -> set[int]:
    return {child.pid for child in psutil.Process(pid).children(recursive=True)}


def ended(pids: set[int]) -> bool:
    return wait_until(lambda: not any(is_running(pid) for pid in pids), PATIENCE_S)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Two kernels that have launched; tests that restart one set it up again, since any test may come next."""
    both = [Kernel(tmp_path_factory.mktemp("kernel") / name) for name in ("one", "other")]
    for kernel in both:
        kernel.client.wait_for_ready(timeout=PATIENCE_S)
    set_ups = (SET_UP, OTHER_SET_UP)
    requests = [kernel.begin(set_up + LAUNCH) for kernel, set_up in zip(both, set_ups, strict=True)]
    assert [text_of(kernel.end(request)[-1]) for kernel, request in zip(both, requests, strict=True)] == [SUMS, SUMS]
    yield both
    with ThreadPoolExecutor(len(both)) as threads:  # a kernel takes seconds to end
        list(threads.map(Kernel.shut_down, both))


@pytest.fixture
def kernel(kernels) -> Kernel:
    return kernels[0]


def text_of(output: dict) -> str:
    return output.get("text") or output.get("data", {}).get("text/plain") or "\n".join(output["traceback"])


def the_error(outputs: list[dict]) -> list[str]:
    """All lines that a notebook shows of the cell's error."""
    (error,) = [output for output in outputs if output["kind"] == "error"]
    return "\n".join(error["traceback"]).splitlines()


def written_pids(folder: Path) -> list[int]:
    files = [folder / f"pid-{rank}" for rank in range(2)]
    assert wait_until(lambda: all(file.exists() and file.read_text() for file in files), PATIENCE_S)
    return [int(file.read_text()) for file in files]


def fresh_folder(kernel: Kernel) -> Path:
    folder = kernel.folder / f"run-{time.monotonic_ns()}"
    folder.mkdir()
    return folder


# ---------------------------------------------------------------- what a cell shows


def test_two_kernels_at_once(kernels):
    code = f"[{LAUNCH.replace(')', ', progress=False)')} for _ in range(4)]"
    requests = [kernel.begin(code) for kernel in kernels]
    found = [text_of(kernel.end(request)[-1]) for kernel, request in zip(kernels, requests, strict=True)]
    assert found == [f"[{', '.join([SUMS] * 4)}]"] * 2


def test_a_cell_says_at_once_what_is_starting(kernel):
    folder = fresh_folder(kernel)
    request = kernel.begin(HANG.format(folder=str(folder)))
    shown, displays = [""], set()
    while "counting" not in shown[-1]:
        content = kernel.client.get_iopub_msg(timeout=PATIENCE_S)["content"]
        if "data" in content:
            shown.append(content["data"]["text/plain"])
            displays.add(content["transient"]["display_id"])
    (folder / "stop").touch()
    *later, result = kernel.end(request)  # the ranks may report once more before they see the file, or not
    assert shown[1] == "report_until_ended, 2 ranks on cpu: starting"
    assert all(text_of(bar).startswith("counting: ") for bar in later)
    assert len(displays | {bar["display"] for bar in later}) == 1  # the line at the start, every state of the bar
    assert text_of(result) == "['stopped', 'stopped']"


def test_what_reports_nothing_leaves_one_line(kernel):
    (line,) = kernel.run("done = launch(all_reduce_rank, world_size=1, device='cpu')")
    assert text_of(line).startswith("all_reduce_rank, 1 rank on cpu: ended after ")


def test_a_cell_with_torchrun_says_that_it_starts_and_shows_lines_as_they_come(kernel):
    folder = fresh_folder(kernel)
    script = (
        "import os, time\nprint('begun')\nwhile not os.path.exists(os.environ['GO']): time.sleep(0.05)\nprint('done')"
    )
    (folder / "wait.py").write_text(script)
    code = f"""
        import os
        from fsdp_helpers.teaching.lessons import torchruns
        os.environ["GO"] = "{folder}/go"
        printed = torchruns.run_script(1, "{folder}/wait.py")
    """
    request, shown = kernel.begin(code), []
    while "begun\n" not in shown:
        content = kernel.client.get_iopub_msg(timeout=PATIENCE_S)["content"]
        shown += filter(None, [content.get("text"), content.get("data", {}).get("text/plain")])
    (folder / "go").touch()
    assert shown[0] == "torchrun wait.py: starting" and "torchrun wait.py: running" in shown
    outputs = [text_of(output) for output in kernel.end(request)]
    assert outputs[0] == "done\n" and outputs[1].startswith("torchrun wait.py: ended after ")


# ---------------------------------------------------------------- errors: the message and nothing else


def test_a_rank_that_fails_shows_its_own_traceback_alone(kernel):
    lines = the_error(kernel.run("launch(raise_on, 1, world_size=2, device='cpu')"))
    assert lines[0] == "RankError: rank 1 of 2 failed: ZeroDivisionError: on purpose, on rank 1"
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == "ZeroDivisionError: on purpose, on rank 1"
    files = [line.split('"')[1] for line in lines if line.lstrip().startswith("File ")]
    assert {Path(file).name for file in files} == {"launch_workers.py"}


@pytest.mark.parametrize(
    "cell, message",
    [
        ("def work(rank, world_size): pass\nlaunch(work, world_size=2)", "'work' is defined in a notebook cell"),
        ("launch(lambda rank, world_size: 0, world_size=2)", "'<lambda>' is a lambda"),
        ("class Box: pass\nlaunch(return_args, Box(), world_size=2)", "'Box' is defined in a notebook cell"),
        ("launch(return_args, world_size=0)", "world_size is 0; it must be a whole number"),
    ],
)
def test_a_launch_that_is_refused_says_why_in_one_line(kernel, cell, message):
    (line,) = the_error(kernel.run(cell))
    assert line.startswith("ValueError: ") and message in line
    assert ("%%writefile" in line) == ("world_size=2" in cell)
    assert "import <lambda>" not in line


def test_a_function_that_is_added_to_a_module_later(kernel):
    kernel.run("%%writefile my_worker.py\ndef first(rank, world_size): return 1")
    before = kernel.run("from my_worker import first\nlaunch(first, world_size=1, progress=False)")
    kernel.run(
        "%%writefile my_worker.py\n"
        "def first(rank, world_size): return second(rank, world_size) + 8\n"
        "def second(rank, world_size): return 2"
    )
    after = kernel.run(
        "from my_worker import second\n"
        "[launch(worker, world_size=1, progress=False) for worker in (first, second)]"  # the old first, too
    )
    assert [text_of(outputs[-1]) for outputs in (before, after)] == ["[1]", "[[10], [2]]"]


def test_a_checker_names_what_it_runs(kernel):
    kernel.run("%%writefile my_ddp.py\ndef average_gradients(model, bucket_bytes): ...")
    code = "from fsdp_helpers.teaching.exercises import notebook_02\nnotebook_02.check_average_gradients('my_ddp')"
    line, verdict = kernel.run(code)
    assert text_of(line).startswith("my_ddp.py, 2 ranks on cpu: ended after ")  # and from the start on: "starting"
    assert "Not yet:\x1b[0m on 2 ranks, " in text_of(verdict)


# ---------------------------------------------------------------- how launches end


def test_the_stop_button(kernel):
    folder = fresh_folder(kernel)
    request = kernel.begin(HANG.format(folder=str(folder)))
    pids = written_pids(folder)
    kernel.wait_for_report(request, step=3)
    kernel.manager.interrupt_kernel()
    (line,) = the_error(kernel.end(request))
    assert line == "interrupted; all ranks are stopped"
    assert not any(is_running(pid) for pid in pids)
    assert text_of(kernel.run(LAUNCH)[-1]) == SUMS


def test_a_rank_that_is_killed_from_outside(kernel):
    folder = fresh_folder(kernel)
    request = kernel.begin(HANG.format(folder=str(folder)))
    pids = written_pids(folder)
    os.kill(pids[1], signal.SIGKILL)
    (line,) = the_error(kernel.end(request))
    assert line.startswith("RankError: rank 1 of 2 failed: the process was ended by SIGKILL from outside")
    assert not any(is_running(pid) for pid in pids)


def test_a_restart_leaves_nothing_and_the_kernel_launches_again(kernels):
    kernel = kernels[1]
    folder = fresh_folder(kernel)
    kernel.begin(HANG.format(folder=str(folder)))
    pids = set(written_pids(folder))
    processes = kernel.processes()
    assert pids < processes
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # they can't tidy up after themselves, as when a kernel dies while it ends them
    kernel.manager.restart_kernel(now=True)
    assert ended(processes)
    assert wait_until(lambda: not list(kernel.folder.glob("fsdp_helpers-*")))
    for folder in kernel.temporary_files():
        shutil.rmtree(folder)  # of the kernel, which was killed
    assert text_of(kernel.run(OTHER_SET_UP + LAUNCH)[-1]) == SUMS


# ---------------------------------------------------------------- ranks that stay


OPEN = """
if "ranks" not in globals():
    %load_ext fsdp_helpers
    from fsdp_helpers import Ranks
    ranks = Ranks(2, device="cpu", timeout_s=5)
"""


@pytest.fixture
def with_variable(kernel) -> Kernel:
    """A kernel with two ranks that have a variable."""
    assert kernel.run(OPEN) == []
    kernel.run("%%ranks\nimport os, time\nimport torch.distributed as dist\nkept = 100 + rank")
    return kernel


def begin_on_ranks(kernel: Kernel, code: str) -> str:
    """Begin a cell, and wait until all ranks are in it."""
    folder = fresh_folder(kernel)
    request = kernel.begin(f"%%ranks\nopen(f'{folder}/here-{{rank}}', 'w').close()\n{code}")
    assert wait_until(lambda: len(list(folder.iterdir())) == 2, PATIENCE_S)
    return request


def test_a_cell_on_ranks_shows_what_they_agree_on_once(with_variable):
    assert [text_of(output) for output in with_variable.run("%%ranks\nprint('both')\nkept")] == [
        "both\nrank 0: 100\nrank 1: 101"
    ]
    assert [text_of(output) for output in with_variable.run("%%ranks 1\nkept")] == ["101"]
    assert text_of(with_variable.run("ranks['kept']")[0]) == "[100, 101]"


def test_a_traced_cell_shows_a_figure_and_a_table_and_another_option_is_refused_in_one_line(with_variable):
    shown = with_variable.run("%%ranks --trace\nimport torch\ndist.all_reduce(torch.ones(2))\nkept")
    assert text_of(shown[0]) == "rank 0: 100\nrank 1: 101"
    assert "In 1 collective, each rank sends 8 B" in shown[1]["metadata"]["image/png"]["alt"]
    assert "| all-reduce |  | 8 | 1, " in shown[-1]["data"]["text/markdown"]
    (refusal,) = with_variable.run("%%ranks 0 --trase\nkept")
    assert text_of(refusal).startswith("UsageError: %%ranks 0 --trase: give rank numbers")
    assert text_of(refusal).endswith("; the only option is --trace\n")


def test_a_cell_on_ranks_shows_its_lines_while_it_runs(with_variable):
    request = begin_on_ranks(
        with_variable, "print('begun')\nwhile not os.path.exists(f'go-{os.getppid()}'): time.sleep(0.05)"
    )
    while True:
        message = with_variable.client.get_iopub_msg(timeout=PATIENCE_S)
        if message["content"].get("data", {}).get("text/plain") == "begun":
            break
    with_variable.manager.interrupt_kernel()
    *_, error = with_variable.end(request)
    assert error["ename"] == "Interrupted"


def test_the_lines_of_an_error_are_those_of_the_cell(with_variable):
    first, *lines = the_error(with_variable.run("%%ranks\nif rank == 1:\n    1 / 0"))
    assert first == "RankError: rank 1 of 2 failed: ZeroDivisionError: division by zero"
    assert lines[1] == f'  File "Cell In[{with_variable.prompt}]", line 3, in <module>'
    assert lines[-2:] == ["rank 0 had finished the cell", "The ranks keep their variables."]
    (line, *_) = the_error(with_variable.run("%%ranks\n\nx = (\n"))
    assert line == f'  File "Cell In[{with_variable.prompt}]", line 3'


AGAIN = "run the `%%ranks` cells above this one again (Run > Run All Above Selected Cell)."
RESTARTED = f"The ranks were restarted, and their variables are gone: {AGAIN}"
KILLED = "the process was ended by SIGKILL from outside (often by the system, out of memory)"
MISSED = "it didn't take part in a collective that others began"
FAILURES = {  # the cell, what its error says first, and one of the lines after that
    "a kill": (
        "if rank == 1:\n    os.kill(os.getpid(), 9)",
        f"rank 1 of 2 failed: {KILLED}",
        "rank 0 had finished the cell",
    ),
    "an abort": (
        "dist.all_reduce(torch.zeros(2 + 999 * rank))",
        "rank 0 of 2 failed: the process was ended by SIGABRT",
        "",
    ),
    "reversed": (
        "for size in (2, 999) if rank else (999, 2):\n    dist.all_reduce(torch.zeros(size))",
        "rank 1 of 2 failed: the process was ended by SIGABRT",
        "",
    ),
    "nobody waits": (
        "if rank == 0:\n    work = dist.barrier(async_op=True)",
        f"rank 1 of 2 failed: {MISSED}",
        "rank 0 had finished the cell",
    ),
    "a step less": (
        "for step in range(3 - rank):\n    dist.barrier()",
        "Timed out waiting 5000ms",
        f"rank 1 had finished the cell, and {MISSED[3:]}",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_restart_says_first_what_failed_and_then_what_to_do(with_variable, name):
    code, said, line = FAILURES[name]
    first, *lines = the_error(with_variable.run(f"%%ranks\nimport torch\n{code}"))
    assert first.startswith("RankError: ") and said in first
    assert line in ["", *lines] and lines[-1] == RESTARTED
    failed = with_variable.prompt
    lost = f"These ranks were restarted after Cell In[{failed}] failed: {AGAIN}"
    for cell in ("%%ranks\ntorch.ones(1)", "%%ranks\nkept", "ranks['kept']"):
        assert the_error(with_variable.run(cell))[-1].endswith(lost)
    assert the_error(with_variable.run("%%ranks\na_typo"))[-1] == "The ranks keep their variables."
    with_variable.run("%%ranks\nkept = 1\ndel kept")
    assert the_error(with_variable.run("%%ranks\nkept"))[-1] == "The ranks keep their variables."


@pytest.mark.parametrize(
    "code",
    [
        "dist.reduce_scatter_tensor(torch.zeros(3), torch.zeros(5))",
        "dist.all_gather([torch.zeros(2)] * 3, torch.zeros(2))",
        "raise RuntimeError(f'rank {rank} has no gloo')",
    ],
)
def test_an_error_that_all_ranks_raise_before_they_send_loses_nothing(with_variable, code):
    assert the_error(with_variable.run(f"%%ranks\nimport torch\n{code}"))[-1] == "The ranks keep their variables."
    assert text_of(with_variable.run("%%ranks\ndist.all_reduce(total := torch.ones(1))\ntotal")[0]) == "tensor([2.])"


def test_what_one_rank_prints_while_another_hangs_has_its_name(with_variable):
    request = begin_on_ranks(with_variable, "if rank:\n    print('step 1')\nelse:\n    time.sleep(600)")
    shown = ""
    while "step 1" not in shown:
        shown = with_variable.client.get_iopub_msg(timeout=PATIENCE_S)["content"].get("data", {}).get("text/plain", "")
    with_variable.manager.interrupt_kernel()
    *_, output, _ = with_variable.end(request)
    assert [shown, text_of(output)] == ["rank 1: step 1"] * 2


@pytest.mark.parametrize(
    "cell, card",
    [
        ("%%ranks\nif rank == 0:\n    dist.barrier()", "hang-"),
        ("raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB')", "memory-"),
        ("%%ranks\nimport torch\ntorch.ones(2) + torch.ones(3)", None),  # as in any program
        ("1 / 0", None),
    ],
)
def test_below_a_failed_cell_is_a_link_to_the_card_that_quotes_its_message(with_variable, cell, card):
    outputs = with_variable.run(cell)
    assert [output["kind"] for output in outputs if "data" not in output] == ["error"]
    links = [output["data"]["text/markdown"] for output in outputs if "text/markdown" in output.get("data", {})]
    assert len(links) == (card is not None)
    if card:
        title, link = re.fullmatch(r"The guide of failures: \[(.+)\]\((.+)\)", links[0]).groups()
        path = HELPERS.parents[1] / "notebooks" / link
        assert path.name.startswith(card) and title in path.read_text()


def test_stop_ends_a_loop_on_ranks_and_keeps_their_variables(with_variable):
    request = begin_on_ranks(with_variable, "while True: pass")
    with_variable.manager.interrupt_kernel()
    first, *lines, last = the_error(with_variable.end(request))
    assert first == "interrupted" and last == "The ranks keep their variables."
    assert len(lines) == 2 and all("line 3" in line for line in lines)
    assert text_of(with_variable.run("ranks['kept']")[0]) == "[100, 101]"


def test_stop_ends_a_collective_that_another_rank_never_joins(with_variable):
    request = begin_on_ranks(with_variable, "dist.barrier() if rank else time.sleep(600)")
    with_variable.manager.interrupt_kernel()
    lines = the_error(with_variable.end(request))
    assert lines[0] == "interrupted" and lines[-1].startswith("The ranks were restarted")
    assert text_of(with_variable.run("%%ranks\n1 + 1")[0]) == "2"


def test_stop_pressed_twice_is_stop(with_variable):
    """The second comes while the first waits for a rank that doesn't let itself be interrupted."""
    code = "while True:\n    try:\n        time.sleep(600)\n    except KeyboardInterrupt:\n        pass"
    request = begin_on_ranks(with_variable, code)
    for _ in range(2):
        with_variable.manager.interrupt_kernel()
        time.sleep(0.5)
    with_variable.end(request)
    assert text_of(with_variable.run("%%ranks\n1 + 1")[0]) == "2"


def test_stop_in_a_cell_without_ranks_leaves_them_alone(with_variable):
    pids = text_of(with_variable.run("ranks.pids")[0])
    request = with_variable.begin("import time; time.sleep(600)")
    time.sleep(1)
    with_variable.manager.interrupt_kernel()
    assert "KeyboardInterrupt" in the_error(with_variable.end(request))[-1]
    assert text_of(with_variable.run("ranks.pids")[0]) == pids
    assert text_of(with_variable.run("%%ranks\nkept")[0]) == "rank 0: 100\nrank 1: 101"


def test_ranks_end_with_a_kernel_that_is_killed(with_variable):
    """Also a rank that is stopped, and what a rank has started."""
    with_variable.run(
        "%%ranks\nimport subprocess\nsleeper = subprocess.Popen(['sleep', '600'], start_new_session=True)"
    )
    pids = list(map(int, text_of(with_variable.run("*ranks.pids,")[0]).strip("()").split(",")))
    os.kill(pids[1], signal.SIGSTOP)
    processes = with_variable.processes()
    assert set(pids) < processes
    with_variable.manager.restart_kernel(now=True)
    assert ended(processes)
    assert wait_until(lambda: not list(with_variable.folder.glob("fsdp_helpers-*")))
    for folder in with_variable.temporary_files():
        shutil.rmtree(folder)  # of the kernel, which was killed
    with_variable.run(SET_UP + LAUNCH)
