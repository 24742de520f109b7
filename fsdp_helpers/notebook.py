"""Notebook support: show errors without tracebacks, update outputs in place, and reload modules that a reader edits."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_seen: dict[str, tuple[int, int]] = {}  # module name -> its file's modification time (ns) and size when last checked


def is_notebook() -> bool:
    """Return True in a Jupyter kernel, no matter what shows its output: JupyterLab, nbconvert or an editor."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    shell = get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


@contextmanager
def shown_by_message(*kinds: type[Exception]) -> Iterator[None]:
    """Within the block, make a notebook show errors of these `kinds` as a message, without a traceback."""
    try:
        yield
    except kinds as error:
        lines = [f"{type(error).__name__}: {error}"]
        error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]  # IPython looks for it
        raise


class InPlace:
    """An output that's displayed once and then updated in place; a saved notebook keeps the output's last state."""

    def __init__(self) -> None:
        self._handle = None

    def show(self, data: dict[str, str] | str, metadata: dict | None = None) -> None:
        """Show `data`: plain text, or a dict that maps MIME types to contents."""
        from IPython.display import display

        data = {"text/plain": data} if isinstance(data, str) else data
        if self._handle is None:
            self._handle = display(data, metadata=metadata, raw=True, display_id=True)
        else:
            self._handle.update(data, metadata=metadata, raw=True)


def follow_edits() -> None:
    """Before each cell from now on, forget edited modules in the notebook's folder so that imports reload them.

    Python imports a module only once. A rank is a new process and sees every edit, but the kernel keeps the old module,
    and `from my_worker import second` would fail if a later %%writefile had added `second`.
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
