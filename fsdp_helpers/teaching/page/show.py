"""Everything that notebooks show besides figures: source code, tables, and a description of the machine."""

import ast
import difflib
import inspect
import platform
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from IPython.display import Markdown, display

from fsdp_helpers.quantities import format_count
from fsdp_helpers.teaching.page.listings import Listing
from fsdp_helpers.teaching.page.this_machine import describe_memory

NUMBER = re.compile(r"[-−+~<≤]?\s?\d[\d,]*(\.\d+)?(e[-+]?\d+)?(\s?(%|x|×|[kMGT]?B|[mµn]?s|min|h))?")
EMPTY = ("", "-", "–", "—", "None")  # cells without a number, in a column of numbers


def source(*objects: Callable | type) -> Listing:
    """Show the source of functions or classes, below the imports they need, so that readers can copy the code."""
    parts = [textwrap.dedent(inspect.getsource(shown)) for shown in objects]
    imports = needed_imports(*objects)
    return Listing("\n\n".join([imports, *parts] if imports else parts), _places(objects))


def _places(objects: Sequence[Callable | type]) -> str:
    """Return where `objects` are defined: "fsdp_helpers/training/loop.py, lines 44, 78"."""
    lines: dict[str, list[str]] = {}
    for shown in map(inspect.unwrap, objects):  # the function inside a decorator is the one shown
        lines.setdefault(_short_path(shown), []).append(str(inspect.getsourcelines(shown)[1]))
    return "; ".join(f"{path}, line{'s' * (len(at) > 1)} {', '.join(at)}" for path, at in lines.items())


def _short_path(shown: Callable | type) -> str:
    """Return the file's path, starting at its package folder; for a module without a package, just the file name."""
    path, module = Path(inspect.getsourcefile(shown)), inspect.getmodule(shown)
    return "/".join(path.parts[-1 - module.__name__.count(".") :]) if module.__package__ else path.name


def needed_imports(*objects: Callable | type) -> str:
    """Return the import statements that `objects` need, for names that their modules import or define."""
    shown = {thing.__name__ for thing in objects}
    by_module: dict[ModuleType, set[str]] = {}
    for thing in objects:
        tree = ast.parse(textwrap.dedent(inspect.getsource(thing)))
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        by_module.setdefault(inspect.getmodule(thing), set()).update(used - shown)
    found = [statement for module, used in by_module.items() for statement in _imports_from(module, used)]
    return "".join(f"{statement}\n" for statement in dict.fromkeys(found))


def _imports_from(module: ModuleType, used: set[str]) -> Iterator[str]:
    """Yield the module's imports of the names in `used`, then an import of the names that the module itself defines."""
    own = []
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [alias for alias in node.names if (alias.asname or alias.name.split(".")[0]) in used]
            if node.names:
                yield ast.unparse(node)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            own += [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    if names := sorted(used.intersection(own)):
        yield f"from {module.__name__} import {', '.join(names)}"


def difference(before: Callable, after: Callable) -> Listing:
    """Show the lines that differ between two functions, and how many there are.

    Only the bodies are compared, not the names or docstrings.
    """
    return _changes(_body(before), _body(after), f"From {before.__name__} to {after.__name__}")


def script_difference(before: str, after: str) -> Listing:
    """Show the lines that differ between two scripts, and how many there are."""
    old, new = Path(before), Path(after)
    return _changes(old.read_text().splitlines(), new.read_text().splitlines(), f"From {old.name} to {new.name}")


def _changes(before: list[str], after: list[str], title: str) -> Listing:
    changes = list(difflib.unified_diff(before, after, n=1, lineterm=""))[2:]
    added, removed = (sum(line.startswith(sign) for line in changes) for sign in "+-")
    shown = ["..." if line.startswith("@@") else line for line in changes]
    lines = "line" if added == 1 else "lines"
    return Listing("\n".join(shown), f"{title}: {added} {lines} added, {removed} removed.", "diff")


def _body(function: Callable) -> list[str]:
    """Return a function's lines below its signature and docstring, without indentation."""
    code = textwrap.dedent(inspect.getsource(function))
    definition: Any = ast.parse(code).body[0]
    first = definition.body[1 if ast.get_docstring(definition) else 0]
    return textwrap.dedent("\n".join(code.splitlines()[first.lineno - 1 :])).splitlines()


def predictions(
    rows: Sequence[tuple[str, str, float, float]],
    *,
    what: str = "what",
    formula: str = "formula",
    unit: str = "bytes",
) -> Markdown:
    """Show a table of formulas, their predictions, the measurements, and the ratio of measured to predicted values.

    Each row has a label, the formula as text, and the predicted and measured numbers, both in `unit`. `what` and
    `formula` are the headings of the first two columns.
    """
    headers = [what, formula, f"predicted {unit}", f"measured {unit}", "measured / predicted"]
    return table(
        headers,
        [
            [name, formula, f"{predicted:,.0f}", f"{measured:,.0f}", f"{measured / predicted:.5f}"]
            for name, formula, predicted, measured in rows
        ],
    )


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> Markdown:
    """Show a table. Columns of numbers, with or without units, are right-aligned, except for the first column."""
    cells = [[str(cell) for cell in row] for row in rows]
    alignment = ["--:" if _is_numeric([row[column] for row in cells]) else ":--" for column in range(len(headers))]
    lines = [headers, [":--", *alignment[1:]], *cells]  # the first column names the row, even if it's a number
    return Markdown("\n".join("| " + " | ".join(line) + " |" for line in lines))


def _is_numeric(column: list[str]) -> bool:
    filled = [text for cell in column if (text := cell.strip("*` ")) not in EMPTY]
    return bool(filled) and all(NUMBER.fullmatch(text) for text in filled)


def machine(
    device: str, num_ranks: int, *, data: str | None = None, needs_bytes: int | None = None, fixed: bool = False
) -> str:
    """Set up a notebook on `device` and describe the machine; return the device, "cpu" or "cuda".

    Unless `fixed` is true, the environment variable FSDP_DEVICE overrides `device`. On the CPU, GPUs are hidden from
    this kernel and from every process it starts. The data is prepared unless `data` explains why none is needed. The
    description lists versions, device, ranks, data, free memory, the memory that the notebook needs (`needs_bytes`),
    and idle GPUs. Raises ValueError for "cuda" if there are too few GPUs or torch can't use them.
    """
    import torch

    from fsdp_helpers.data.source import describe_source, prepare_data
    from fsdp_helpers.gpus import device_name
    from fsdp_helpers.notebook import shown_by_message
    from fsdp_helpers.teaching.page.this_machine import settle_device

    with shown_by_message(ValueError):
        device, about_gpus = settle_device(device, num_ranks, fixed=fixed)
    versions = f"Python {platform.python_version()}, torch {torch.__version__}."
    ranks = f"{format_count(num_ranks, 'rank')} on {device_name(torch.device(device))}."
    data = data or describe_source(prepare_data())
    display(Markdown(" ".join(filter(None, [versions, ranks, data, describe_memory(needs_bytes), about_gpus]))))
    return device


def script(path: str) -> Listing:
    """Show all of a script, exactly as it is in its file."""
    return Listing(Path(path).read_text(), path)
