"""What notebook 10 starts and shows: torchruns from a cell, variables side by side, figures of the saved record."""

import json
import sys

import pytest
from leftovers import PROJECT
from programs import wait_until

from fsdp_helpers.teaching.lessons import torchruns

REFERENCE = PROJECT / "notebooks" / "reference"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_variables_are_compared():
    """A row for each variable that some home sets, a dash where another does not."""
    shown = torchruns.compare_environments({"launch": {"RANK": "1"}, "Slurm": {"RANK": "1", "SLURM_JOB_ID": "7"}}).data
    assert shown.splitlines()[2:] == ["| `RANK` | 1 | 1 |", "| `SLURM_JOB_ID` | – | 7 |"]


def test_a_rank_writes_what_it_finds(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    torchruns.write_launcher_variables(tmp_path / "found")
    assert json.loads((tmp_path / "found" / "rank-1.json").read_text())["RANK"] == "1"


def test_commands_run_side_by_side_and_have_to_end_well():
    assert torchruns.run_together(python("print(1)"), python("print(2)")) == ["1\n", "2\n"]
    with pytest.raises(RuntimeError, match="exited with status 3:\nwhy"):
        torchruns.run_together(python("print('why'); raise SystemExit(3)"))


def test_the_variables_of_a_rank_are_read_while_it_runs():
    child = "import os, subprocess, sys; e = dict(os.environ, RANK='{}', LOCAL_RANK='0', OTHER='x')"
    waits = "subprocess.run([sys.executable, '-c', 'import time; time.sleep(1)'], env=e); print('ended')"
    outputs, given = torchruns.run_and_read_environment(*(python(f"{child.format(rank)}; {waits}") for rank in (0, 1)))
    assert outputs == ["ended\n"] * 2 and (given["RANK"], given["LOCAL_RANK"]) == ("1", "0") and "OTHER" not in given
    with pytest.raises(RuntimeError, match="torchrun didn't start rank 1:\nbroken"):
        torchruns.run_and_read_environment(python("print('broken')"))


def test_nothing_runs_after_the_block():
    with torchruns.started(python("import time; print('here', flush=True); time.sleep(600)")) as (process,):
        torchruns.wait_for_line(process, "here")
    assert process.returncode is not None


def test_a_run_that_ends_before_what_is_waited_for(tmp_path):
    with torchruns.started(python("print('broken')")) as (process,):
        process.wait(timeout=240)
        with pytest.raises(RuntimeError, match="didn't reach step-4:\nbroken"):
            torchruns.kill_rank(process, 1, after=tmp_path / "step-4")
    with (
        torchruns.started(python("print('broken')")) as (process,),
        pytest.raises(RuntimeError, match="begins with 'step'"),
    ):
        torchruns.wait_for_line(process, "step")


def test_a_rank_is_found_and_killed(tmp_path):
    child = "import os, subprocess, sys; e = dict(os.environ, RANK='1')"
    waits = "subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'], env=e)"
    with torchruns.started(python(f"{child}; print({waits}.returncode)")) as (process,):
        children = torchruns.psutil.Process(process.pid).children
        # between fork and exec the child still has its parent's environment
        assert wait_until(lambda: any(child.environ().get("RANK") == "1" for child in children()))
        (tmp_path / "now").touch()
        assert torchruns.kill_rank(process, 1, after=tmp_path / "now") == "-9\n"


# ---------------------------------------------------------------- the saved records


def test_the_kept_job_says_nothing_of_its_machine():
    text = (REFERENCE / "slurm.json").read_text()
    assert "/tmp/" not in text and "/root" not in text and "/work" not in text
    record = json.loads(text)
    assert len(record["step_losses"]) == 20 and [home["RANK"] for home in record["homes"]] == ["0", "1"]
