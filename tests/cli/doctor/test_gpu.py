"""`doctor --gpu` and the runner of GPU checks: each verdict can fail, and no failure ends the others. No GPU is needed."""

import json
import sys
from pathlib import Path

import pytest
from programs import has_ended, wait_until
from runs import main_in_process

from fsdp_helpers.cli.doctor import gpu, gpu_checks
from fsdp_helpers.cli.doctor.gpu import Finding
from fsdp_helpers.cli.doctor.rows import FAIL, NOTE, PASS, SKIP
from fsdp_helpers.cli.doctor.workers import train_in_three_ways
from fsdp_helpers.gpus import NONE, VISIBLE
from fsdp_helpers.ranks.launch import launch

TESTS = Path(__file__).resolve().parents[2]


# ---------------------------------------------------------------- the runner


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """What the rehearsal's checks leave: results by title, the lines that were said, and the folder."""
    folder, lines = tmp_path_factory.mktemp("record"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{TESTS.parent}:{TESTS}")
        patch.setattr(gpu, "count", lambda: 1)
        patch.setattr(gpu, "SHORTEST_S", 1.0)
        results = gpu.run_checks(["on_gpu.rehearsal"], folder, say=lines.append)
    return {result.title: result for result in results}, lines, folder


def only(result: gpu.Result) -> Finding:
    (finding,) = result.findings
    return finding


def test_a_check_that_is_right_passes_before_and_after_others_fail(rehearsed):
    results, _, _ = rehearsed
    for title in ("right", "right, after all"):
        assert only(results[title]) == Finding("one and one", "2", "2", PASS) and results[title].failure == ""


def test_what_was_measured_before_a_failure_is_kept_and_judged(rehearsed):
    failed = rehearsed[0]["fails"]
    assert failed.numbers == {"sum": 3}
    assert [finding.result for finding in failed.findings] == [FAIL, FAIL]
    assert "ValueError: no second part" in failed.findings[1].measured and "Traceback" in failed.failure


def test_a_part_that_fails_leaves_the_others(rehearsed):
    good, bad = rehearsed[0]["fails in part"].findings
    assert (good.result, bad.result) == (PASS, FAIL)
    assert bad.what == "fails in part: quotient" and bad.measured.startswith("ZeroDivisionError")


def test_a_crash_is_a_finding_with_the_last_line(rehearsed):
    crashed = rehearsed[0]["crashes"]
    assert only(crashed).result == FAIL and "exit status -6" in only(crashed).measured
    assert "about to crash" in crashed.failure


def test_a_hang_ends_after_its_time_with_all_that_it_started(rehearsed):
    hung = rehearsed[0]["hangs"]
    assert [finding.result for finding in hung.findings] == [PASS, FAIL]
    assert "no result within 8 s" in hung.findings[1].measured and 'rehearsal.py", line' in hung.failure
    assert wait_until(lambda: has_ended(hung.numbers["pid"]), 5.0)


def test_missing_numbers_are_no_verdict(rehearsed):
    found = only(rehearsed[0]["measures nothing"])
    assert found.result == FAIL and found.measured == "no verdict: KeyError: 'sum'"


def test_what_this_machine_lacks_is_left_out(rehearsed):
    results, _, _ = rehearsed
    assert only(results["lacks a package"]).measured == "left out: no_such_package isn't installed"
    assert only(results["needs GPUs"]).measured == "left out: it needs 4 GPUs"
    assert {only(results[title]).result for title in ("lacks a package", "needs GPUs")} == {SKIP}


def test_the_record_has_all_that_was_said(rehearsed):
    results, lines, folder = rehearsed
    record = json.loads((folder / "record.json").read_text())
    assert [check["title"] for check in record["checks"]] == [*results]
    table = (folder / "record.md").read_text().splitlines()
    assert sorted(table) == sorted(lines) and table[:2] == list(gpu.HEADER)
    assert len(table) == 2 + sum(len(result.findings) for result in results.values())


def test_checks_that_are_named_run_alone_and_none_when_the_time_is_up(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "count", lambda: 1)
    results = gpu.run_checks(["on_gpu.rehearsal"], tmp_path, limit_s=0.0, only=("hangs", "measures nothing"))
    assert [result.title for result in results] == ["hangs", "measures nothing"]
    assert all("the time is up" in only(result).measured for result in results)


def test_a_module_that_lacks_a_package_is_left_out_and_a_broken_one_fails(monkeypatch, tmp_path):
    (tmp_path / "lacking.py").write_text("import tqdm")
    (tmp_path / "broken.py").write_text("from torch import no_such_name")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert gpu.load("lacking")[0].needs == ["tqdm"]
    (finding,) = gpu.load("broken")[0].judge({})
    assert finding.result == FAIL and "no_such_name" in finding.measured


def test_the_last_line_counts():
    results = [
        gpu.Result(title="", numbers={}, findings=tuple(Finding(what, "", "", what) for what in (PASS, NOTE, SKIP)))
    ]
    assert gpu.verdict(results) == "2 of 3 passed, 1 left out."
    wrong = gpu.Result(title="", numbers={}, findings=(Finding("bf16", "", "", FAIL),))
    assert gpu.verdict([*results, wrong]).startswith("1 of 4 wrong: bf16.")


# ---------------------------------------------------------------- doctor --gpu


def test_without_a_gpu_one_line_and_status_2(monkeypatch, capsys):
    monkeypatch.setenv(VISIBLE, NONE)
    assert main_in_process("doctor", "--gpu") == 2
    assert capsys.readouterr().err == f"fsdp_helpers: no GPU: {VISIBLE} hides them\n"


@pytest.mark.parametrize("result, status", [(PASS, 0), (NOTE, 0), (SKIP, 0), (FAIL, 1)])
def test_a_finding_decides_the_exit_status(result, status, monkeypatch, capsys):
    found = gpu.Result(title="", numbers={}, findings=(Finding("bf16", "", "", result),))
    monkeypatch.setattr(gpu, "count", lambda: 1)
    monkeypatch.setattr(gpu, "run_checks", lambda *_, **__: [found])
    assert main_in_process("doctor", "--gpu") == status
    assert capsys.readouterr().out.startswith("psutil ")


# ---------------------------------------------------------------- its verdicts

GOOD = {
    "machine": {
        "versions": {"torch": "2.15.0"},
        "gpus": [["NVIDIA A", 60_000_000_000, 80_000_000_000]] * 2,
        "difference": 1e-6,
        "links": [True, True],
    },
    "collectives": {"found": [[f"cuda:{rank}", 3.0, [1.0, 2.0], [2.0 * (rank + 1)]] for rank in range(2)]},
    "losses": {"ddp": [1.0, 0.5], "fsdp2": [1.0, 0.5], "bf16": [1.001, 0.5001]},
}
CHECKS = {check.title: check for check in gpu_checks.CHECKS}
BAD = [
    ("machine", {"gpus": [["NVIDIA A", 1_000_000_000, 80_000_000_000]]}, NOTE, "1.00 GB of 80.0 GB; something"),
    ("machine", {"difference": 0.5}, FAIL, "5.0e-01"),
    ("machine", {"links": [False, True]}, NOTE, "1 of 2 pairs"),
    ("collectives", {"found": [["cuda:0", 2.0, [1.0], [1.0]]]}, FAIL, "2.0"),
    ("losses", {"fsdp2": [1.0, 0.5001]}, FAIL, "2.0e-04"),
    ("losses", {"bf16": [1.0, 0.5]}, FAIL, "0.0e+00"),
    ("losses", {"bf16": [1.0, 0.7]}, FAIL, "4.0e-01"),
]


@pytest.mark.parametrize("title", CHECKS)
def test_where_all_is_well(title):
    assert {finding.result for finding in CHECKS[title].judge(GOOD[title])} == {PASS}


@pytest.mark.parametrize("title, changes, result, said", BAD)
def test_each_verdict_can_fail(title, changes, result, said):
    found = [finding for finding in CHECKS[title].judge(GOOD[title] | changes) if finding.result != PASS]
    assert found[0].result == result and said in found[0].measured


def test_the_three_ways_on_cpu_ranks():
    """What the GPUs would train, on two CPU ranks."""
    found = launch(train_in_three_ways, world_size=2, device="cpu", progress=False)[0]
    assert {finding.result for finding in gpu_checks.judge_losses(found)} == {PASS}, found
