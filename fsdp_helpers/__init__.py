"""Sharded training, learned by running it. The notebooks call these functions; your own scripts can, too.

    from fsdp_helpers import TrainConfig, train
    train(TrainConfig(model="shallow"), strategy="fsdp", world_size=2)

Importing the package is instant, because each function is loaded only when you first use it.
"""

import importlib
from typing import Any

__version__ = "2.3.0"
_MODULES = {
    "Ranks": "ranks.live",
    "TrainConfig": "config",
    "consolidate": "checkpointing.consolidate",
    "launch": "ranks.launch",
    "load": "checkpointing.checkpoint",
    "newest_checkpoint": "checkpointing.checkpoint",
    "save": "checkpointing.checkpoint",
    "train": "training.run",
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def load_ipython_extension(shell: Any) -> None:
    """Register the `%%ranks` cell magic, and what links a failed cell to its card; `%load_ext fsdp_helpers` calls this.

    It also starts the server that ranks are forked from, so that the server loads torch while the notebook does.
    """
    importlib.import_module(f"{__name__}.ranks.server").ensure_running()
    shell.events.register("post_run_cell", _point_to_card)
    shell.register_magic_function(_run_on_ranks, magic_kind="cell", magic_name="ranks")


def _run_on_ranks(line: str, cell: str) -> None:
    """Run this cell on the ranks opened last: `%%ranks` on all of them, `%%ranks 0` or `%%ranks 1,2` on some.

    With `--trace`, also show their collectives in order, and the bytes that they allocate.
    """
    traced_cell = f"{__name__}.teaching.page.traced_cell"
    tracer = importlib.import_module(traced_cell).TRACER if "--trace" in line.split() else None
    importlib.import_module(f"{__name__}.ranks.live").run_cell(line, cell, tracer)


def _point_to_card(result: Any) -> None:
    if result.error_in_exec is not None:
        importlib.import_module(f"{__name__}.card_search").point_to_card(result)
