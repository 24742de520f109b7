"""Plain values as JSON, with their tensors separate: the content of schedules, counters and optimizer settings.

Numbers, text, lists and dicts with text keys are JSON as they are. Anything that JSON cannot express is an object with
one key that begins with "!": {"!tuple": [...]}, {"!dict": [[key, value], ...]} for other keys, {"!tensor": name}.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor


def take_apart(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return `value` as JSON; put each tensor in it into `tensors`, under its path: "extra.schedule.base".

    Raises ValueError, naming the path, for a value that's neither plain data nor a tensor.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor) and not isinstance(value, DTensor):
        return _put_away(value, name, tensors)
    if isinstance(value, Mapping):
        items = [(key, take_apart(kept, f"{name}.{key}", tensors)) for key, kept in value.items()]
        if all(isinstance(key, str) and not key.startswith("!") for key, _ in items):
            return dict(items)
        return {"!dict": [[take_apart(key, name, tensors), kept] for key, kept in items]}
    if isinstance(value, list | tuple):
        content = [take_apart(kept, f"{name}.{number}", tensors) for number, kept in enumerate(value)]
        return {"!tuple": content} if isinstance(value, tuple) else content
    raise ValueError(
        f"{name} is a {type(value).__name__}; a checkpoint can hold numbers, text, lists, dicts and full tensors. "
        f"Pass its state_dict(), a number, or a tensor"
    )


def put_together(content: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `take_apart` took apart."""
    if isinstance(content, list):
        return [put_together(kept, tensors) for kept in content]
    if not isinstance(content, dict):
        return content
    match [*content.items()]:
        case [("!tensor", name)]:
            return tensors[name]
        case [("!tuple", kept)]:
            return tuple(put_together(kept, tensors))
        case [("!dict", items)]:
            return {put_together(key, tensors): put_together(kept, tensors) for key, kept in items}
    return {key: put_together(kept, tensors) for key, kept in content.items()}


def tensor_names(content: Any) -> list[str]:
    """Return the names of all tensors that `take_apart` took out of a value."""
    if isinstance(content, dict) and content.keys() == {"!tensor"}:
        return [content["!tensor"]]
    branches = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    return [name for branch in branches for name in tensor_names(branch)]


def _put_away(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> dict[str, str]:
    if name in tensors:
        raise ValueError(f"two tensors would be called {name}; give one of them another key")
    tensors[name] = tensor.detach()
    return {"!tensor": name}
