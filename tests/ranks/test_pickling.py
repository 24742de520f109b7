"""What can be sent to a rank and back, and what is said of the rest; the launches themselves are in test_launch."""

import sys
import threading
import types
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import launch_workers as workers
import pytest

from fsdp_helpers.ranks.launch import check_worker, dumps, launch, pickle_job


@dataclass
class Settings:
    name: str
    helper: Any


def worker(rank, world_size, config, *more):
    """Stands for any worker with arguments."""


@pytest.fixture
def notebook(monkeypatch) -> types.ModuleType:
    """The module of a notebook's cells: __main__, without a file."""
    module = types.ModuleType("__main__")
    exec("class Config:\n    pass\n\ndef train(rank, world_size):\n    pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def test_a_workers_module_is_all_that_it_takes():
    args = (SimpleNamespace(name="a", helper=[1, 2.0]), {"x": None})
    assert launch(workers.return_args, *args, world_size=1, device="cpu") == [args]


@pytest.mark.parametrize(
    "refused, reason",
    [
        (lambda rank, world_size: rank, "is a lambda or is defined inside another function"),
        (print, "a worker must be a function"),
        ("train", "a worker must be a function, but this is 'str'"),
    ],
)
def test_workers_that_cannot_be_imported(refused, reason):
    with pytest.raises(ValueError, match=reason):
        check_worker(refused)


def test_a_notebooks_functions_and_classes_are_refused(notebook):
    with pytest.raises(ValueError, match=r"(?s)'train' is defined in a notebook cell.*module.*%%writefile my_worker"):
        check_worker(notebook.train)
    for value in (notebook.Config(), [notebook.Config], {"f": notebook.train}):
        with pytest.raises(ValueError, match="(?s)argument 'config'.* is defined in a notebook cell.*%%writefile"):
            pickle_job(worker, (value,))


def test_a_class_of_a_script_may_be_sent(notebook, tmp_path):
    notebook.__file__ = str(tmp_path / "script.py")
    (tmp_path / "script.py").touch()
    assert pickle_job(worker, (notebook.Config(),))
    notebook.__spec__ = ModuleSpec(
        "package.__main__", None
    )  # `python -m package`, whose main module isn't imported again
    with pytest.raises(ValueError, match="Config' is defined in a notebook cell or an interactive session"):
        pickle_job(worker, (notebook.Config(),))


@pytest.mark.parametrize(
    "args, name, kind",
    [
        ([threading.Lock()], "argument 'config' of 'worker'", "_thread.lock"),
        ([1, 2, threading.Lock()], "argument number 3 of 'worker'", "_thread.lock"),
        ([[0, {"lock": threading.Lock()}]], "argument 'config' of 'worker'", "builtins.list"),
        ([Settings("a", lambda: 0)], "argument 'config' of 'worker'", f"{Settings.__module__}.Settings"),
    ],
)
def test_an_argument_that_cannot_be_sent_is_named(args, name, kind):
    with pytest.raises(ValueError) as caught:
        pickle_job(worker, tuple(args))
    assert str(caught.value).startswith(f"{name} is of type {kind} and can't be sent to another process: ")
    assert "Pass plain values instead" in str(caught.value)


def test_a_result_that_cannot_be_sent_is_named():
    with pytest.raises(ValueError, match="the result of 'worker' is of type builtins.tuple and can't be sent .*lock"):
        dumps((0, threading.Lock()), "the result of 'worker'")
