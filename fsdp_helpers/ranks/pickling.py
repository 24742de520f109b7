"""Pickling the data that's sent to a rank and back, with errors that name the value that can't be pickled."""

import inspect
import io
import os
import pickle
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

A_MODULE = "a module (a .py file, or a cell that begins with '%%writefile my_worker.py')"


def check_worker(worker: Callable) -> None:
    """Raise ValueError for a worker that another process can't import."""
    if not inspect.isfunction(worker):
        raise ValueError(f"a worker must be a function, but this is {type(worker).__name__!r}: {worker!r}")
    if "<" in worker.__qualname__:
        raise ValueError(
            f"{worker.__qualname__!r} is a lambda or is defined inside another function, so a new process can't import "
            f"it by name. Define it with 'def' at the top level of {A_MODULE}"
        )
    _check_not_in_a_cell(worker)


def _check_not_in_a_cell(value: Any) -> None:
    """Raise ValueError for a function or class that's defined in a cell, or typed in at a prompt."""
    if value.__module__ == "__main__" and not _can_import_main():
        raise ValueError(
            f"{value.__qualname__!r} is defined in a notebook cell or an interactive session. A new process starts empty "
            f"and imports it by name, and it can't import a cell. Put it into {A_MODULE}, and import it from there"
        )


def pickle_job(worker: Callable, args: tuple) -> bytes:
    """Return the worker's name and its arguments as bytes. Raises ValueError for an argument that can't be sent.

    The worker is sent by name because its module may have been edited since; a rank runs the file's current code.
    """
    names = [repr(name) for name in inspect.signature(worker).parameters][2:]
    names += [f"number {position + 1}" for position in range(len(names), len(args))]
    pickled = [
        dumps_named(value, f"argument {name} of {worker.__name__!r}") for name, value in zip(names, args, strict=False)
    ]
    return pickle.dumps((f"{worker.__module__}:{worker.__qualname__}", pickled))


def read_job(job: bytes) -> tuple[Callable, tuple]:
    """Import the worker of `pickle_job`; return it and its arguments."""
    name, args = pickle.loads(job)
    return pkgutil.resolve_name(name), tuple(map(pickle.loads, args))


def dumps_named(value: Any, name: str) -> bytes:
    """Return `value` pickled. Raises ValueError if it can't be sent; the message calls it `name` and says why."""
    try:
        return dumps(value)
    except Exception as error:
        raise ValueError(
            f"{name} is of type {type(value).__module__}.{type(value).__qualname__} and can't be sent to another "
            f"process: {error}. Pass plain values instead (numbers, text, lists, CPU tensors, a dataclass from a module), "
            "or whatever the rank needs to make it itself, such as the path of a file."
        ) from None


def dumps(value: Any) -> bytes:
    """Return `value` pickled; also raise for a value that can be pickled here but not unpickled in another process."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """A pickler that refuses functions and classes that are defined in a cell."""

    def reducer_override(self, value: Any) -> Any:
        if inspect.isclass(value) or inspect.isfunction(value):
            _check_not_in_a_cell(value)
        return NotImplemented


def _can_import_main() -> bool:
    """Return True if a new process can import this program's main module: a script, or that of `python -m module`."""
    main = sys.modules["__main__"]
    if main.__spec__ is not None:
        return not main.__spec__.name.endswith("__main__")
    return os.path.exists(getattr(main, "__file__", None) or "")
