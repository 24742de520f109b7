"""Scripts of another interpreter: found or missed in one sentence, ended in time, told in words. Needs no torch_xla."""

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from leftovers import PROJECT

from fsdp_helpers.teaching.lessons import xla


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """A machine on which nothing of PyTorch/XLA is installed."""
    monkeypatch.delenv(xla.VARIABLE, raising=False)
    monkeypatch.setattr(xla, "BUILT_BY_MAKE", tmp_path / "none" / "python")


@pytest.fixture
def script(monkeypatch, tmp_path):
    """Write a script that this interpreter runs, as if it were that of the other environment."""
    monkeypatch.setenv(xla.VARIABLE, sys.executable)
    monkeypatch.setattr(xla, "SCRIPTS", tmp_path)
    return lambda code: (tmp_path / "lesson.py").write_text(code)


def test_a_missing_environment_is_one_sentence(nowhere, tmp_path):
    with pytest.raises(xla.XlaMissing, match="run `make xla`") as caught:
        xla.run_script("train", tmp_path, {})
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_the_interpreter_is_the_one_that_the_variable_names_or_that_make_built(nowhere, monkeypatch):
    monkeypatch.setattr(xla, "BUILT_BY_MAKE", Path(sys.executable))
    assert xla.find_python() == Path(sys.executable)
    monkeypatch.setenv(xla.VARIABLE, "/nowhere/python")  # a wish that cannot be met is no missing environment
    with pytest.raises(ValueError, match="names /nowhere/python, but there is no such file"):
        xla.find_python()


def test_settings_go_in_and_a_result_comes_out(script, tmp_path):
    script(
        "import json, sys, pathlib\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "settings = json.loads((folder / 'settings.json').read_text())\n"
        "(folder / 'result.json').write_text(json.dumps(settings['steps'] + 1))\n"
    )
    assert xla.run_script("lesson", tmp_path, {"steps": 20}) == 21
    script("")
    assert xla.run_script("lesson", tmp_path, {}) is None  # the old result is not taken for a new one


def test_a_failed_script_is_its_last_line_and_leaves_nothing_outside_of_its_folder(script, tmp_path):
    script("import tempfile\ntempfile.mkstemp()\nraise KeyError('no such layer')")
    with pytest.raises(xla.XlaError, match=r"lesson.py ended with status 1: (?s:.*)KeyError: 'no such layer'"):
        xla.run_script("lesson", tmp_path, {})
    assert len(os.listdir(tmp_path / "tmp")) == 1  # conftest.py fails this test if one is left elsewhere


def test_a_script_that_hangs_is_ended_with_all_that_it_started(script, tmp_path):
    sleeper = "import time; time.sleep(600)"
    script(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {sleeper!r}])")
    with pytest.raises(xla.XlaTimeout, match="still running after 2 s and was stopped"):
        xla.run_script("lesson", tmp_path, {}, timeout_s=2)  # conftest.py fails this test if a process is left


@pytest.mark.long
def test_a_script_ends_with_what_started_it(script, tmp_path):
    """A kernel that is killed has no time to tidy up; its scripts hear that it is gone."""
    scripts = PROJECT / "notebooks" / "xla"
    script(
        f"import sys, time\nsys.path.insert(0, {str(scripts)!r})\nimport replicas\n"
        "def wait(folder, settings):\n    (folder / 'began').touch()\n    time.sleep(600)\n"
        "replicas.main(wait, sys.argv)\n"
    )
    code = (
        "from pathlib import Path\nfrom fsdp_helpers.teaching.lessons import xla\n"
        f"xla.SCRIPTS = Path({str(tmp_path)!r})\nxla.run_script('lesson', xla.SCRIPTS, {{}})"
    )
    starter = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(PROJECT)})
    while not (tmp_path / "began").exists():
        time.sleep(0.1)  # the time limit of all tests is that of this loop
        assert starter.poll() is None
    starter.kill()
    starter.wait()  # conftest.py fails this test if the script lives on


def test_a_stuck_collective_is_explained():
    said = (
        "F rendezvous.cc:127] Termination timeout for `all gather RendezvousKey{op_id=0}` of 10 seconds exceeded. "
        "Exiting to ensure a consistent program state. Expected 2 threads to join the rendezvous, but only 1 of them "
        "arrived on time.\n"
    )
    advice = xla.explain(said)
    assert "1 replica(s) reached it within 10 s" in advice
    assert all(part in advice for part in ("lock", "PARAM_ALIASING", "pin_layout", "run the script again"))


@pytest.mark.long
def test_an_interpreter_without_torch_xla_is_named_as_the_cause(tmp_path, monkeypatch):
    monkeypatch.setenv(xla.VARIABLE, sys.executable)  # this environment has none
    with pytest.raises(xla.XlaError, match="this Python lacks torch_xla; run `make xla` to get one that has it"):
        xla.run_script("train", tmp_path, {})


# ---------------------------------------------------------------- saved outputs


def test_a_record_is_kept_and_recalled(nowhere, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(xla, "RECORDS", tmp_path)
    assert xla.run_or_show_saved("lesson", lambda: 1) == 1
    assert os.listdir(tmp_path) == []  # nothing is kept unless asked
    assert xla.run_or_show_saved("lesson", lambda: {"losses": (1.0, 0.5)}, save=True) == {"losses": [1.0, 0.5]}
    assert capsys.readouterr().out == ""
    assert xla.run_or_show_saved("lesson", xla.find_python) == {"losses": [1.0, 0.5]}
    said = capsys.readouterr().out
    assert said.startswith("PyTorch/XLA isn't installed here") and "Below is the output saved on 20" in said
    with pytest.raises(ZeroDivisionError):  # a failure is not hidden by a record
        xla.run_or_show_saved("lesson", lambda: 1 / 0)


# ---------------------------------------------------------------- two worlds, kept apart


def imported_by(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def test_what_both_environments_import_needs_only_what_both_have():
    allowed = set(sys.stdlib_module_names) | {"torch", "numpy"}
    waiting, found = ["fsdp_helpers.teaching.lessons.xla_inputs"], {}
    while waiting:
        module = waiting.pop()
        found[module] = imported_by(PROJECT / f"{module.replace('.', '/')}.py")
        waiting += [name for name in found[module] if name.startswith("fsdp_helpers.") and name not in found]
    others = {name.split(".")[0] for names in found.values() for name in names} - {"fsdp_helpers"}
    assert others <= allowed, others - allowed
    assert "fsdp_helpers.models.series" in found  # it looks further than the first file


def test_a_listing_is_the_function_as_it_stands():
    shown = xla.listing("train", "my_part").data
    assert shown.startswith("```python\ndef my_part(batch") and shown.rstrip().endswith("```")
