"""Sharded training, learned by running it. The notebooks call these functions; your own scripts can, too.

    from fsdp_helpers import TrainConfig, train
    train(TrainConfig(model="shallow"), strategy="fsdp", world_size=2)

Importing the package is instant, because each function is loaded only when you first use it.
"""

import importlib
from typing import Any

__version__ = "2.2.0"
_MODULES = {
    "Ranks": "ranks.live",
    "TrainConfig": "config",
    "consolidate": "checkpointing.consolidate",
    "launch": "ranks.launch",
    "load": "checkpointing.checkpoint",
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
    """Register the `%%ranks` cell magic; IPython calls this for `%load_ext fsdp_helpers`."""
    run_cell = importlib.import_module(f"{__name__}.ranks.live").run_cell
    shell.register_magic_function(run_cell, magic_kind="cell", magic_name="ranks")
