import pickle
import sys
import threading
import types
from dataclasses import dataclass
from typing import Any

import launch_workers as workers
import pytest

from fsdp_helpers.ranks.pickling import check_worker, pickle_job, pickle_result


@dataclass
class Settings:
    name: str
    helper: Any


def worker(rank, world_size, config, *more):
    """Stands for any worker with arguments."""


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
    "refused, reason",
    [
        (notebook_function(), r"(?s)'train' is defined in a notebook cell.*module.*%%writefile my_worker.py"),
        (lambda rank, world_size: rank, "is a lambda or is defined inside another function"),
        (nested_function(), "is a lambda or is defined inside another function"),
        (print, "a worker must be a function"),
        ("train", "a worker must be a function, this is 'str'"),
    ],
)
def test_workers_that_cannot_be_imported(refused, reason):
    with pytest.raises(ValueError, match=reason):
        check_worker(refused)


def test_a_module_function_is_accepted():
    check_worker(workers.return_rank)


def test_what_can_travel_arrives():
    args = (Settings("a", [1, 2.0]), {"x": None})
    assert pickle.loads(pickle_job(worker, args)) == (worker, args)


@pytest.mark.parametrize(
    "args, name, kind",
    [
        ((threading.Lock(),), "argument 'config' of 'worker'", "_thread.lock"),
        ((1, 2, threading.Lock()), "argument number 3 of 'worker'", "_thread.lock"),
        (([0, {"lock": threading.Lock()}],), "argument 'config' of 'worker', at 1, under 'lock'", "_thread.lock"),
        ((Settings("a", lambda: 0),), "argument 'config' of 'worker', in its field 'helper'", "builtins.function"),
        ((n for n in [1]), "argument 'config' of 'worker'", "builtins.generator"),
    ],
)
def test_an_argument_that_cannot_travel_is_named(args, name, kind):
    args = args if isinstance(args, tuple) else (args,)
    with pytest.raises(ValueError) as caught:
        pickle_job(worker, args)
    assert str(caught.value).startswith(f"{name} is of type {kind} and cannot be sent to another process: ")
    assert "Pass plain values instead" in str(caught.value)


def test_a_class_of_a_notebook_cell_is_refused_before_it_cannot_be_read(monkeypatch):
    notebook = types.ModuleType("__main__")  # without __file__, as in a kernel
    exec("class Config:\n    pass\n\ndef helper():\n    pass", notebook.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    for value in (notebook.Config(), [notebook.Config], {"f": notebook.helper}):
        with pytest.raises(ValueError, match="(?s)argument 'config'.* is defined in a notebook cell.*%%writefile"):
            pickle_job(worker, (value,))


def test_a_class_of_a_script_may_travel(monkeypatch, tmp_path):
    script = types.ModuleType("__main__")
    script.__file__ = str(tmp_path / "script.py")
    (tmp_path / "script.py").write_text("class Config: pass")
    exec("class Config:\n    pass", script.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", script)
    assert pickle_job(worker, (script.Config(),))


def test_a_result_that_cannot_travel_is_named():
    with pytest.raises(ValueError, match="the result of 'worker', at 1 is of type _thread.lock and cannot be sent"):
        pickle_result(worker, (0, threading.Lock()))
