"""Pickling of what travels to a rank and back; an error names the part that cannot be pickled."""

import importlib
import inspect
import io
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from types import FunctionType
from typing import Any

ADVICE = (
    "Pass plain values instead (numbers, text, lists, CPU tensors, a dataclass from a module), or what it takes to "
    "make it on the other side, such as the path of a file."
)


OR_A_CELL = " (a .py file, or a cell that begins with '%%writefile my_worker.py')"


def check_worker(worker: Callable) -> None:
    """Raise ValueError for a worker that another process cannot import."""
    if not inspect.isfunction(worker):
        raise ValueError(f"a worker must be a function, this is {type(worker).__name__!r}: {worker!r}")
    if "<" in worker.__qualname__:
        raise ValueError(
            f"{worker.__qualname__!r} is a lambda or is defined inside another function, so a new process cannot "
            f"import it by name. Define it with 'def' at the top level of a module{OR_A_CELL}."
        )
    if worker.__module__ == "__main__" and not _can_import_main():
        raise ValueError(
            f"{worker.__name__!r} is defined in a notebook cell or an interactive session. A new process starts empty "
            "and imports its worker by name, and it cannot import a cell. Two ways out: put the function into a module "
            f"(a .py file), or begin its cell with '%%writefile my_worker.py' and then 'from my_worker import "
            f"{worker.__name__}'."
        )


def pickle_job(worker: Callable, args: tuple) -> bytes:
    """Return the worker and its arguments as bytes; the ValueError names an argument that cannot be sent."""
    try:
        return _dumps((worker, args))
    except Exception:
        names = list(inspect.signature(worker).parameters)[2:]
        for position, value in enumerate(args):
            name = repr(names[position]) if position < len(names) else f"number {position + 1}"
            _check(value, f"argument {name} of {worker.__name__!r}")
        raise


def pickle_result(worker: Callable, result: Any) -> bytes:
    """Return a rank's result as bytes; the ValueError names the part of it that cannot be sent."""
    try:
        return _dumps(result)
    except Exception:
        _check(result, f"the result of {worker.__name__!r}")
        raise


def _check(value: Any, name: str) -> None:
    """Raise ValueError for the innermost part of `value` that cannot be sent, if there is one."""
    try:
        _dumps(value)
    except Exception as error:
        for part_name, part in _parts(value, name):
            _check(part, part_name)
        raise ValueError(
            f"{name} is of type {type(value).__module__}.{type(value).__qualname__} and cannot be sent to another "
            f"process: {error}. {ADVICE}"
        ) from None


def _parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the items of a container, each with the expression that leads to it."""
    if isinstance(value, dict):
        yield from ((f"{name}, under {key!r}", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{name}, at {position}", part) for position, part in enumerate(value))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from ((f"{name}, in its field {field.name!r}", getattr(value, field.name)) for field in fields(value))


def _dumps(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """A pickler that refuses what could be pickled here but not read there: names defined in a notebook cell."""

    def reducer_override(self, value: Any) -> Any:
        if inspect.isclass(value) or inspect.isfunction(value):
            if value.__module__ == "__main__" and not _can_import_main():
                raise pickle.PicklingError(
                    f"{value.__qualname__!r} is defined in a notebook cell or an interactive session, and another "
                    f"process cannot import it from there; put it into a module{OR_A_CELL}"
                )
            if _was_read_anew(value):
                return _import_by_name, (value.__module__, value.__qualname__)
        return NotImplemented


def _was_read_anew(value: type | FunctionType) -> bool:
    """Return True if an older import of its module defined `value`; a rank imports what the file defines now."""
    now = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        now = getattr(now, name, None)
    if now is None or now is value or type(now) is not type(value):
        return False
    if inspect.isclass(value):
        return now.__qualname__ == value.__qualname__
    # Not so a decorated function, which stands under the name of the one that it wraps.
    return now.__code__.co_qualname == value.__code__.co_qualname == value.__qualname__


def _import_by_name(module: str, qualname: str) -> Any:
    found = importlib.import_module(module)
    for name in qualname.split("."):
        found = getattr(found, name)
    return found


def _can_import_main() -> bool:
    """Return True if a new process can import this program's main module, as it can a script or `python -m module`."""
    main = sys.modules["__main__"]
    name = getattr(main.__spec__, "name", None)
    if name is not None:
        return not name.endswith("__main__")
    return os.path.exists(getattr(main, "__file__", None) or "")
