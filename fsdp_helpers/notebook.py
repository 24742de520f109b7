"""Working in a notebook: outputs that are replaced in place, and modules that the reader edits."""

import importlib
import sys
from pathlib import Path

_seen: dict[str, tuple[int, int]] = {}  # module name -> its file's time of change and its size, when last checked


def is_notebook() -> bool:
    """Return True in a Jupyter kernel, whatever shows its output: JupyterLab, nbconvert, an editor."""
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
        """Show `data`, which is a text or a dict of the output's contents by MIME type."""
        from IPython.display import display

        data = {"text/plain": data} if isinstance(data, str) else data
        if self._handle is None:
            self._handle = display(data, metadata=metadata, raw=True, display_id=True)
        else:
            self._handle.update(data, metadata=metadata, raw=True)


def follow_edits() -> None:
    """In a notebook, before each cell from now on, forget edited modules next to it, so that imports read them again.

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
    """Forget every module in the working folder whose file has changed since the last check."""
    for name, module in list(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "/")
        if path.absolute().parent == Path.cwd() and path.exists():
            state = path.stat().st_mtime_ns, path.stat().st_size
            if _seen.setdefault(name, state) != state:
                del sys.modules[name], _seen[name]
                importlib.invalidate_caches()
