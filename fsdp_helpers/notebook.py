"""The notebook that this process may serve: outputs that are replaced in place, and modules that its reader edits."""

import importlib
import sys
from pathlib import Path

_seen: dict[str, tuple[int, int]] = {}  # a module's name: its file's time of change and size when last looked at


def is_notebook() -> bool:
    """Return True in a kernel, whatever front end shows its output: JupyterLab, nbconvert, an editor."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    shell = get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


class InPlace:
    """An output that is shown once and replaced from then on; a saved notebook keeps its last state."""

    def __init__(self) -> None:
        self._handle = None

    def show(self, data: dict[str, str] | str, metadata: dict | None = None) -> None:
        """Show `data`: a text, or the output's contents by MIME type."""
        from IPython.display import display

        data = {"text/plain": data} if isinstance(data, str) else data
        if self._handle is None:
            self._handle = display(data, metadata=metadata, raw=True, display_id=True)
        else:
            self._handle.update(data, metadata=metadata, raw=True)


def follow_edits() -> None:
    """In a notebook, from now on forget edited modules next to it before each cell; the next import reads them again.

    Python imports a module once. A rank is a new process and sees every edit, but the kernel would keep the old module,
    and `from my_worker import second` would fail if %%writefile has added `second` since.
    """
    if is_notebook():
        from IPython import get_ipython

        events = get_ipython().events
        if forget_edited not in events.callbacks["pre_run_cell"]:
            events.register("pre_run_cell", forget_edited)
            forget_edited()


def forget_edited(*_: object) -> None:
    """Drop every module of the working folder whose file has changed since the last look."""
    for name, module in list(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "/")
        if path.absolute().parent == Path.cwd() and path.exists():
            state = path.stat().st_mtime_ns, path.stat().st_size
            if _seen.setdefault(name, state) != state:
                del sys.modules[name], _seen[name]
                importlib.invalidate_caches()
