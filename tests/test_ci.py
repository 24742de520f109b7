"""Which stages .ci/run runs on a push, in what order, and what it says about the others."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from leftovers import PROJECT

from fsdp_helpers.cli.lab import book


def load_stages():
    """Import .ci/stages.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("ci_stages", PROJECT / ".ci" / "stages.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


ci = load_stages()
STAGES = [*ci.ALWAYS, *ci.in_turn(0)]
A, B, C = ci.Stage("a", 10), ci.Stage("b", 40), ci.Stage("c", 20)


# ---------------------------------------------------------------- whose turn it is


def test_the_first_group_moves_on_with_each_commit(monkeypatch):
    monkeypatch.setattr(ci, "GROUPS", ((A,), (B,), (C,)))
    assert [[stage.target for stage in ci.in_turn(num_commits)] for num_commits in (6, 7, 8)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
    ]


def test_a_short_stage_passes_a_long_one_that_does_not_fit():
    # 10 + 40 do not fit into 45 minutes, 10 + 20 do
    assert ci.fitting((A, B, C), 45) == [A, C]
    assert ci.fitting((B, C, A), 45) == [B]


LEFT_MIN = ci.LIMIT_MIN - sum(stage.minutes for stage in ci.ALWAYS)


def test_a_group_fits_when_it_is_first():
    # After what always runs; else a part of it would never run, as the browser's stage did
    assert [
        sum(stage.minutes for stage in group) for group in ci.GROUPS if sum(s.minutes for s in group) > LEFT_MIN
    ] == []


@pytest.mark.parametrize("stride", [1, 2, 3, 4, 6, 7, 8, 9, 41])
def test_five_pushes_reach_every_stage(stride):
    """Each `stride` commits after the one before; pushes of five, ten or fifteen would each have the same group."""
    ran = {stage for push in range(5) for stage in ci.fitting(ci.in_turn(push * stride), LEFT_MIN)}
    assert ran == {stage for group in ci.GROUPS for stage in group}


def test_two_parts_of_a_target_have_two_names():
    assert len({stage.name for stage in STAGES}) == len(STAGES)
    assert ci.told(ci.Outcome(ci.Stage("a", 10, part="half"), left_out="no time")) == [
        "  not run            a (half): no time"
    ]


def test_the_next_turn_hand_worked(monkeypatch):
    monkeypatch.setattr(ci, "GROUPS", ((A,), (B,), (C,)))
    # In 45 minutes: at 6 commits a and c; at 7 only b; at 8 c and a
    assert ci.next_turn(B, (A, B, C), 6, 45) == 1
    assert ci.next_turn(A, (A, B, C), 6, 45) == 2
    # A stage that this machine cannot run takes no time: at 7, c comes right away
    assert ci.next_turn(C, (A, C), 6, 45) == 1
    # Little time was left this once: when its group is first, it will fit again
    assert ci.next_turn(B, (A, B, C), 7, 5) == 3


# ---------------------------------------------------------------- what it runs


def test_every_stage_is_a_target_that_says_whether_it_can_run():
    makefile = (PROJECT / "Makefile").read_text()
    for stage in STAGES:
        assert re.search(rf"^{stage.target}:", makefile, re.MULTILINE), stage.target
    assert re.search("^can-%:", makefile, re.MULTILINE)


def test_every_marker_and_every_target_of_tests_has_a_stage():
    makefile = (PROJECT / "Makefile").read_text()
    targets = set(re.findall(r"^(test[\w-]*|lint|xla):", makefile, re.MULTILINE))
    parts = {"test-notebooks", "test-tools", "test-all", "test-cluster"}  # made of others, or a part of one
    assert targets - parts == {stage.target for stage in STAGES}


@pytest.mark.parametrize("index, tools, says", [("", 0, "no package index"), ("yes", 0, ""), ("yes", 1, "Error 1")])
def test_make_test_ends_with_the_tools_or_says_why_not(index, tools, says, tmp_path):
    """An index that does not answer is told in one line; a test of the tools that fails is a failure."""
    (tmp_path / "python").write_text(
        '#!/bin/sh\n[ "$1 $2" = "-m pip" ] && { [ -z "$INDEX" ] || echo $VERSIONS; exit; }\necho "$@"; exit $TOOLS\n'
    )
    (tmp_path / "python").chmod(0o755)
    for name in ("installed", "tools-installed"):
        (tmp_path / name).touch()
    own = [f"BIN={tmp_path}", f"TOOLS_BIN={tmp_path}", "PYTEST=true", f"CACHE={tmp_path}"]
    own += [f"INSTALLED={tmp_path / 'installed'}", f"TOOLS_INSTALLED={tmp_path / 'tools-installed'}"]
    known = re.search("^TOOLS_PACKAGES := (.*)$", (PROJECT / "Makefile").read_text(), re.MULTILINE)[1]
    # As within `make test`, from which make inherits that it prints each folder that it enters
    within = {"MAKELEVEL": "1", "MAKEFLAGS": "w"}
    environment = os.environ | within | {"INDEX": index, "TOOLS": str(tools), "VERSIONS": known}
    command = ["make", "test", *own]
    done = subprocess.run(
        command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    output = done.stdout + done.stderr
    assert (done.returncode == 0) == (tools == 0) and says in output, output
    assert ("test-tools is left out: no package index is at hand that has transformers" in output) == (not index)
    assert ("-m pytest -m tools tests" in output) == bool(index and not tools)


@pytest.mark.parametrize("target", ["test-network", "test-slurm"])
def test_what_a_machine_lacks_is_said_by_name(target, tmp_path):
    """Nothing, or what to install; not the error of a check that is itself broken."""
    (tmp_path / "installed").touch()  # newer than the lock: this environment is used, and no other is made
    own = [f"BIN={Path(sys.executable).parent}", f"INSTALLED={tmp_path / 'installed'}"]
    command = ["make", "--silent", f"can-{target}", *own]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False, timeout=240)
    said = done.stdout + done.stderr
    assert done.returncode == 0 or re.search("root|apt-get", said), said
    assert "Error:" not in said


MAKEFILE = """
good:
	@echo "SKIPPED [2] tests/test_x.py:3: no CUDA device here"
	@echo "SKIPPED [1] tests/test_y.py:7: no CUDA device here"
	@echo "======= 3 passed, 3 skipped in 1.25s (0:00:01) ======="
	@echo "offline: $$FSDP_OFFLINE"
shorter:
	@echo "test-more is left out: no index"
bad:
	@echo "=== 1 failed, 2 passed in 3.00s ===" && false
slow:
	@sleep 600
lacking:
	@echo never
can-lacking:
	@echo "no root here" && false
can-%:
	@true
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A project whose stages are lines of a Makefile."""
    (tmp_path / "Makefile").write_text(MAKEFILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_stages(*targets: str, minutes: float = 1, used: float = 0):
    return ci.run_all([ci.Stage(target, minutes) for target in targets], [], lambda: used)


def lines_of(outcomes) -> list[str]:
    return [" ".join(line.split()) for outcome in outcomes for line in ci.told(outcome)]


def test_what_ran_and_what_was_skipped_in_it_is_listed(folder):
    outcomes = run_stages("good", "lacking", "shorter", "good")
    assert lines_of(outcomes) == [
        "ran good, 0 min: 3 passed, 3 skipped",
        "3 skipped: no CUDA device here",
        "not possible here lacking: no root here",
        "ran shorter, 0 min: no tests",
        "test-more is left out: no index",
        "ran good, 0 min: 3 passed, 3 skipped",
        "3 skipped: no CUDA device here",
    ]


def test_nothing_follows_a_failure(folder):
    outcomes = run_stages("bad", "good")
    assert lines_of(outcomes) == ["FAILED bad, 0 min: 1 failed, 2 passed", "not run good: an earlier one failed"]


def test_what_does_not_fit_is_left_for_its_turn(folder, monkeypatch):
    assert lines_of(run_stages("good", minutes=20, used=70)) == ["not run good: takes 20 min, 5 were left"]
    monkeypatch.setattr(ci, "GROUPS", ((A,), (B,), (C,)))
    waiting = ci.Outcome(B, left_out="takes 40 min, 5 were left")
    (line,) = ci.told_turns([ci.Outcome(A), waiting, ci.Outcome(C, left_out="no root", is_possible=False)], 6, 45)
    assert line.split() == "next turn b: at 7 commits, 1 from here".split()


def test_a_stage_that_does_not_end_is_ended(folder):
    outcome = ci.run_stage(ci.Stage("slow", 1), minutes_left=0.01)
    assert outcome.failed and outcome.minutes < 5


@pytest.mark.parametrize("offline", [True, False])
def test_a_newcomer_without_a_network(folder, capfd, offline):
    ci.run_stage(ci.Stage("good", 1, offline=offline), minutes_left=1)
    assert ("offline: 1" in capfd.readouterr().out) == offline


def test_the_entry_starts_the_stages():
    entry = (PROJECT / ".ci" / "run").read_text()
    assert "exec" in entry and entry.rstrip().endswith(".ci/stages.py")
    subprocess.run(["bash", "-n", str(PROJECT / ".ci" / "run")], check=True, timeout=240)


# ---------------------------------------------------------------- the workflows

WORKFLOWS = sorted((PROJECT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_targets_that_exist(path):
    text = path.read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", (PROJECT / "Makefile").read_text(), flags=re.MULTILINE))
    called = set(re.findall(r"run: make ([a-z-]+)", text))
    for listed in re.findall(r"target: \[(.*)\]", text):
        called |= set(listed.split(", "))
    assert called and called <= targets
    assert "\npermissions:\n  contents: read\n" in text, "a job that needs more asks for it itself"


def test_what_is_published_is_what_make_book_writes():
    (published,) = re.findall(
        r"^ +path: (\S+)$", (PROJECT / ".github" / "workflows" / "book.yml").read_text(), re.MULTILINE
    )
    assert PROJECT / published == book.DEFAULT_FOLDER
