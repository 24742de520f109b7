"""A module that a reader has edited is imported again, in the kernel as in the ranks.

Python imports a module once. A rank is a new process and sees every edit, but the kernel would keep the old module, and
`from my_worker import second` would fail if %%writefile has added `second` since.
"""

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

_seen: dict[str, tuple[int, int]] = {}  # a module's name: its file's time of change and size when last looked at


def follow_edits() -> None:
    """Forget edited modules beside the notebook before each cell, from now on.

    The next import reads the file again. It may be called repeatedly; outside a notebook it does nothing.
    """
    if "IPython" not in sys.modules:
        return
    from IPython import get_ipython

    shell = get_ipython()
    if shell is not None and forget_edited not in shell.events.callbacks["pre_run_cell"]:
        shell.events.register("pre_run_cell", forget_edited)
        forget_edited()


def forget_edited(*_: object) -> None:
    """Drop every module of the working folder that has changed since the last look."""
    for name, module in list(sys.modules.items()):
        state = _file_state(module)
        if state is not None and _seen.setdefault(name, state) != state:
            del sys.modules[name], _seen[name]
            importlib.invalidate_caches()


def _file_state(module: ModuleType) -> tuple[int, int] | None:
    """Return the time of change and size of a module's file in the working folder; None for all other modules."""
    path = getattr(module, "__file__", None)
    if not path or os.path.dirname(os.path.abspath(path)) != os.getcwd():
        return None
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
