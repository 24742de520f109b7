"""Read `state.json`, in which versions before 2.2 kept everything that isn't a tensor.

A value that JSON can't express is stored as an object with one key: {"!tuple": [...]}, {"!dict": [[key, value], ...]},
{"!tensor": name}.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fsdp_helpers.checkpointing.folder import CheckpointError

STATE = "state.json"


def read_state_json(path: Path, tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """Return the contents of `path`/state.json, with tensors from `tensors` in place of their names.

    Raises CheckpointError if the file is damaged, or names a tensor that isn't in `tensors`.
    """
    try:
        content = json.loads((path / STATE).read_text())
        if content.keys() != {"optimizer", "values", "extra"}:
            raise ValueError(f"it has the keys {', '.join(content)}")
        return decoded(content, tensors)
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / STATE} is damaged: {error!r}") from error


def decoded(content: Any, tensors: Mapping[str, Tensor | None]) -> Any:
    """Return the value that the decoded JSON in `content` represents."""
    if isinstance(content, list):
        return [decoded(kept, tensors) for kept in content]
    if not isinstance(content, dict):
        return content
    match [*content.items()]:
        case [("!tensor", name)]:
            return tensors[name]
        case [("!tuple", kept)]:
            return tuple(decoded(kept, tensors))
        case [("!dict", items)]:
            return {decoded(key, tensors): decoded(kept, tensors) for key, kept in items}
    return {key: decoded(kept, tensors) for key, kept in content.items()}
