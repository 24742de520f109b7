"""gpu-check: a row for whatever happens in a check. Nothing here needs a GPU; tests/imagined_gpu runs it beside one."""

import json
import os
import signal
import subprocess
import sys
from functools import partial

import psutil
import pytest
import torch
from programs import is_running, running_python, wait_until
from runs import main_in_process, mostly_long

from fsdp_helpers.cli.doctor import device_checks, gpu_check, many_gpu_checks, one_check, training_checks
from fsdp_helpers.cli.doctor.facts import DESCRIBE, fact_lines
from fsdp_helpers.cli.doctor.gpu_check import PASTE, Report, check_gpus
from fsdp_helpers.cli.doctor.gpu_checks import CHECKS
from fsdp_helpers.cli.doctor.one_check import (
    MARK,
    ask_child,
    describe_process,
    how_it_ended,
    last_error,
    last_lines,
    marked_processes,
    run_check,
)
from fsdp_helpers.cli.doctor.rows import FAIL, PASS, SKIP, Check, Outcome, Row, Unfit, count_results, markdown_table
from fsdp_helpers.measuring.step_profile import measure_run
from fsdp_helpers.ranks.gpus import NONE, VISIBLE, Gpus
from fsdp_helpers.ranks.launching.launch import RankError, launch

ONE_GPU = Gpus(1)


@pytest.fixture
def no_gpus(monkeypatch):
    monkeypatch.setenv(VISIBLE, NONE)


# ---------------------------------------------------------------- the command


def test_without_a_gpu_every_row_is_skipped_with_the_reason(no_gpus, tmp_path, capsys):
    assert main_in_process("gpu-check", "--json", tmp_path / "found.json") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == lines[-1] == PASTE
    rows = [line for line in lines if line.startswith("| ")][2:]
    assert len(rows) == len(CHECKS) + 1
    assert all("| SKIP | no GPU: CUDA_VISIBLE_DEVICES hides them |" in row for row in rows)
    found = json.loads((tmp_path / "found.json").read_text())
    assert {row["result"] for row in found["rows"]} == {SKIP} and "torch" in found["facts"]


@pytest.mark.parametrize("limit", ["0", "-1", "inf", "nan"])
def test_a_limit_that_cannot_be(limit, capsys):
    assert main_in_process("gpu-check", "--limit", limit) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "give a number of seconds above 0" in said


def test_a_failed_row_is_exit_status_1(monkeypatch, capsys):
    row = Row("a", FAIL, "2", "1", 0.1, details=("Traceback", "ValueError: 2"))
    monkeypatch.setattr(gpu_check, "check_gpus", lambda *_, **__: Report([row], {"torch": "9"}))
    assert main_in_process("gpu-check") == 1
    out = capsys.readouterr().out
    assert "| a | FAIL | 2 | 1 | 0.1 |" in out and "ValueError: 2" in out and "0 PASS, 1 FAIL, 0 SKIP." in out


# ---------------------------------------------------------------- one check, one process


def test_a_check_that_hangs_becomes_a_row_and_is_gone():
    check = next(iter(CHECKS.values()))
    row = run_check(check, ONE_GPU, limit_s=0.2, mark="hangs")
    assert (row.result, row.measured) == (FAIL, "still running after 0.2 s")
    assert marked_processes("hangs") == []


HANGS = """
from fsdp_helpers.cli.doctor import gpu_check, gpu_checks, one_check
from fsdp_helpers.ranks.gpus import Gpus

gpu_check.find_gpus = lambda wanted: Gpus(1)
gpu_check._describe = lambda *_: print("here", flush=True) or {}
check = gpu_checks.CHECKS["a stopped rank on the CPU is named"]
gpu_check.check_gpus([check], 240.0, lambda *_: None)
"""


def test_sigterm_ends_the_running_check(tmp_path):
    with running_python(HANGS, variables={"TMPDIR": str(tmp_path)}) as command:
        command.stdout.readline()
        children = psutil.Process(command.pid).children
        assert wait_until(children)
        family = children(recursive=True)
        command.terminate()
        assert command.wait(timeout=240) == 128 + signal.SIGTERM
        assert psutil.wait_procs(family, timeout=240)[1] == []
    assert list(tmp_path.glob("gpu-check-*")) == []


def test_a_check_that_raises_becomes_a_row_with_its_last_lines():
    row = run_check(Check("no such check", None, "anything"), ONE_GPU, limit_s=240, mark="raises")
    assert (row.result, row.measured) == (FAIL, "KeyError: 'no such check'")
    assert row.details[0].startswith("Traceback") and row.details[-1] == row.measured


def test_a_check_for_more_gpus_is_skipped():
    row = run_check(Check("two", None, "anything", gpus=2), ONE_GPU, limit_s=60, mark="skipped")
    assert (row.result, row.measured) == (SKIP, "needs 2 GPUs, this machine has 1")


def test_a_child_hands_over_what_it_found():
    """The description of a machine, which needs no ranks."""
    facts = ask_child(DESCRIBE, ONE_GPU, 240, "describes").content
    assert facts["torch"] == torch.__version__ and facts["gpus"] == []
    assert f"torch {torch.__version__}" in fact_lines(facts)[0]


def raise_unfit(num_gpus):
    raise Unfit("needs a network")


@pytest.mark.parametrize(
    "run, result, measured, values",
    [
        (lambda num_gpus: Outcome(True, f"{num_gpus} of 1", {"x": 1.0}), PASS, "1 of 1", {"x": 1.0}),
        (lambda num_gpus: Outcome(False, "0 of 1"), FAIL, "0 of 1", {}),
        (raise_unfit, SKIP, "needs a network", {}),
    ],
)
def test_what_a_check_found_is_its_row(run, result, measured, values, monkeypatch, tmp_path):
    """Both what the child does and what its parent makes of it, in this process."""

    def ask_this_process(title, gpus, limit_s, mark):
        one_check.main(title, str(gpus.count), gpus.problem, str(tmp_path / "answer.json"))
        return one_check.Answer(json.loads((tmp_path / "answer.json").read_text()), "printed", "")

    check = Check("ours", run, "1 of 1")
    monkeypatch.setattr("fsdp_helpers.ranks.gpus._known", [])
    monkeypatch.setitem(CHECKS, "ours", check)
    monkeypatch.setattr(one_check, "ask_child", ask_this_process)
    row = run_check(check, ONE_GPU, limit_s=240, mark="here")
    assert (row.result, row.measured, row.values, row.expected) == (result, measured, values, "1 of 1")
    assert row.details == (("printed",) if result == FAIL else ())


def test_what_is_left_behind_is_found_and_ended(monkeypatch):
    monkeypatch.setattr(gpu_check, "find_gpus", lambda wanted: ONE_GPU)
    monkeypatch.setattr(gpu_check, "ask_child", lambda *_: one_check.Answer({"gpus": [{"free_bytes": 5}]}, "", ""))
    sleeper = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
    with subprocess.Popen(sleeper, env={**os.environ, MARK: "left"}, stdout=subprocess.PIPE) as left:
        left.stdout.readline()  # while a program is being loaded its environment is empty
        monkeypatch.setattr(gpu_check.uuid, "uuid4", lambda: type("Mark", (), {"hex": "left"}))
        (row,) = check_gpus([], 60.0, lambda *_: None).rows
        assert left.wait(timeout=240) != 0
    assert row.result == FAIL and row.measured == "1 processes, 0 B of a GPU"
    assert f"{left.pid} " in row.details[0] and "time.sleep(600)" in row.details[0]


@pytest.mark.parametrize(
    "before, after, result",
    [([9_000_000_000], [8_999_000_000], PASS), ([9_000_000_000], [8_000_000_000], FAIL), ([1], [], FAIL)],
)
def test_memory_of_a_gpu_that_is_not_given_back(monkeypatch, before, after, result):
    facts = [{"gpus": [{"free_bytes": size} for size in sizes]} for sizes in (before, after)]
    monkeypatch.setattr(gpu_check, "ask_child", lambda *_: one_check.Answer(facts[1], "", ""))
    assert gpu_check._look_for_leftovers(facts[0], ONE_GPU, 60.0, "nobody").result == result


def test_a_process_that_is_gone_is_described():
    done = subprocess.Popen([sys.executable, "-c", ""])
    process = psutil.Process(done.pid)
    done.wait()
    assert wait_until(lambda: not is_running(done.pid))
    assert describe_process(process) == f"{done.pid}, gone by now"


# ---------------------------------------------------------------- text


def test_the_table_is_markdown_whatever_a_cell_holds():
    rows = [Row("a|b", FAIL, "two\nlines", "1", 1.26), Row("c", PASS, "1", "1", 0.0)]
    assert markdown_table(rows)[1:] == [
        "| --- | --- | --- | --- | --- |",
        r"| a\|b | FAIL | two lines | 1 | 1.3 |",
        "| c | PASS | 1 | 1 | 0.0 |",
    ]
    assert count_results(rows) == "1 PASS, 1 FAIL, 0 SKIP"


def test_the_end_of_an_output(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    printed = f"Traceback\n  File {tmp_path}/x.py\nValueError: a: b\n  more\nbye\n"
    assert last_error(printed) == "ValueError: a: b"
    assert last_error("killed\n") == last_error("") == ""
    assert how_it_ended(-11, "", 60) == "ended with exit status -11"
    assert how_it_ended(1, "ValueError: " + "a " * 500, 60).endswith("a ...")
    assert last_lines(printed)[1] == "  File ~/x.py"


# ---------------------------------------------------------------- the checks themselves, on CPU ranks in place of GPUs


@pytest.fixture
def on_cpu(monkeypatch):
    """The checks, with gloo between CPU ranks where they ask for CUDA."""

    def launch_on_cpu(*arguments, device, **settings):
        return launch(*arguments, device="cpu", **settings)

    for module in (device_checks, training_checks):
        monkeypatch.setattr(module, "launch", launch_on_cpu)
    monkeypatch.setattr(many_gpu_checks, "measure_run", lambda config, ranks, device: measure_run(config, ranks, "cpu"))
    monkeypatch.setenv("FSDP_OFFLINE", "1")


RIGHT = {
    "FSDP2, fsdp-auto-wrap": (training_checks.against_ddp("fsdp-auto-wrap", "fsdp2"), 2),
    "bytes sent": (partial(many_gpu_checks.sent_bytes, "fsdp1"), 2),
    "dead": (partial(many_gpu_checks.blame, "dead"), 2),
    "local": (training_checks.against_ddp("local", "fsdp2"), 2),
    "bf16": (partial(training_checks.bf16, "fsdp2"), 2),
    "resumed": (partial(training_checks.resume, "fsdp1"), 2),
    "peak": (partial(many_gpu_checks.predicted_peak, "fsdp2"), 2),
    "stopped": (partial(many_gpu_checks.blame, "stopped"), 2),
    "hybrid": (training_checks.against_ddp("fsdp-auto-wrap", "fsdp1", sharding="hybrid"), 4),
    "two dimensions": (training_checks.two_dimensions, 4),
    "compiled": (training_checks.compiled_block, 2),
    "take-home": (many_gpu_checks.take_home("fsdp2.py"), 2),
    "moved": (many_gpu_checks.take_home("from_ddp.py"), 2),
    "fine-tuned": (many_gpu_checks.take_home("finetune.py"), 2),
}


@pytest.mark.parametrize("name", mostly_long(RIGHT, telling=(0, 1, 2)))
def test_a_check_passes_where_all_is_well(name, on_cpu):
    run, num_gpus = RIGHT[name]
    outcome = run(num_gpus)
    assert outcome.passed, outcome.measured


def test_a_check_fails_where_losses_differ(on_cpu, monkeypatch):
    class Run:
        def __init__(self, *losses):
            self.step_losses = losses

    monkeypatch.setattr(training_checks, "runs", lambda *_: [Run(1.0, 0.5), Run(1.0, 0.5), Run(1.0, 0.5001)])
    outcome = training_checks.against_ddp("fsdp", "fsdp2")(1)
    assert not outcome.passed and outcome.measured == "at most 1.0e-04 from DDP; a second run 1.0e-04 off"


def test_a_check_fails_where_nobody_is_blamed(on_cpu, monkeypatch):
    monkeypatch.setattr(device_checks, "launch", lambda *_, **__: [])
    outcome = device_checks.who_is_blamed("dead", 2, "cuda")
    assert (outcome.passed, outcome.measured) == (False, "no rank failed")


def test_who_is_blamed_for_a_stopped_rank(on_cpu, monkeypatch):
    """That a rank which waits for it names it is test_roll_call's."""

    def launch_in_vain(*_, **__):
        raise RankError(0, 2, "SilentRanks: rank 1 did not answer within 8 s")

    monkeypatch.setattr(device_checks, "launch", launch_in_vain)
    stopped = CHECKS["a stopped rank on the CPU is named"].run(1)
    assert (stopped.passed, device_checks.who_is_blamed("dead", 2, "cpu").passed) == (True, False)
    assert stopped.measured == "rank 0 of 2 failed: SilentRanks: rank 1 did not answer within 8 s"


def test_every_take_home_script_has_a_row():
    scripts = {path.name for path in many_gpu_checks.TAKE_HOME.glob("*.py")}
    assert set(many_gpu_checks.SCRIPTS) == scripts
