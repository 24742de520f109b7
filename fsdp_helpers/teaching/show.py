"""What notebooks show besides figures: source code, tables, the machine they run on."""

import inspect
import platform
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from IPython.display import Markdown


def source(*objects: Callable | type) -> Markdown:
    """The source of functions or classes, as a worker runs it, highlighted."""
    code = "\n\n".join(textwrap.dedent(inspect.getsource(shown)) for shown in objects)
    return Markdown(f"```python\n{code}```")


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> Markdown:
    """A table: the first column to the left, the others to the right, where numbers belong."""
    alignment = [":--", *["--:"] * (len(headers) - 1)]
    lines = [headers, alignment, *rows]
    return Markdown("\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines))


def machine(device: str, num_ranks: int, source_text: str) -> Markdown:
    """Versions, device, ranks and data source: what the numbers below were measured with."""
    import torch

    from fsdp_helpers.ranks.group import device_name

    return Markdown(
        f"Python {platform.python_version()}, torch {torch.__version__}. "
        f"{num_ranks} rank(s) on {device_name(torch.device(device))}. {source_text}"
    )


def script(path: str) -> Markdown:
    """A whole script as it stands in its file, highlighted."""
    return Markdown(f"```python\n{Path(path).read_text()}```")
