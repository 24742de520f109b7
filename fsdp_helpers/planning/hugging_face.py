"""A model's `config.json` as a planner takes it: a file, a name, a shape. No torch, and no transformers."""

import json
from dataclasses import replace
from pathlib import Path

from fsdp_helpers.models.shapes import RELATIVES, LlamaShape, shape_from_config

LONGEST_CONTEXT = 8192  # tokens of a sequence in training, unless the model stops before; --context says otherwise


def read_config(path: str | Path) -> tuple[str, LlamaShape]:
    """Return a name and the shape of the model that a `config.json` describes.

    Raises ValueError, with the path, for a file that is not one, and for a kind of model that is not among RELATIVES.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give a model's config.json, or its folder") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise ValueError(f"{path} has no model_type; give the config.json of a Hugging Face model")
    try:
        shape = shape_from_config(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    title = RELATIVES[config["model_type"]][0]
    return f"{title} of {path.parent.name or path.name}", replace(shape, context=min(shape.context, LONGEST_CONTEXT))
