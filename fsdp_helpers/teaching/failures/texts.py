"""The text of every failure by name, without the code, so that `explain` doesn't need torch."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

from fsdp_helpers.teaching.failures.entry import Failure

FOLDER = Path(__file__).parent
TEXT = ("name", "title", "why", "tell", "fix", "messages", "numbers", "behavior", "quotes")


def documented() -> Iterator[Failure]:
    """Yield the failures that we don't run, from `documented.toml`."""
    for name, card in tomllib.loads((FOLDER / "documented.toml").read_text("utf-8")).items():
        yield Failure(**{"name": name, **card})


def texts_of_those_run() -> Iterator[Failure]:
    """Yield the text of each `Failure(...)` in this folder from the source, since importing it would import torch."""
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == Failure.__name__:
                text = {part.arg: ast.literal_eval(part.value) for part in node.keywords if part.arg in TEXT}
                if text:
                    yield Failure(**text)


TEXTS = {failure.name: failure for failure in (*texts_of_those_run(), *documented())}
