"""Listings in notebooks can be copied: they use no private name that the reader has not seen.

Nor do they call `fully_shard` without its mesh, which would turn to a GPU if there happens to be one.
Quick: notebooks are read, not run.
"""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

PROJECT = Path(__file__).resolve().parents[2]
PATHS = sorted((PROJECT / "notebooks").glob("*.ipynb"))
SCRIPTS = sorted([*(PROJECT / "fsdp_helpers").rglob("*.py"), *(PROJECT / "notebooks" / "take_home").glob("*.py")])
SHARDING = [path for path in [*PATHS, *SCRIPTS] if "fully_shard(" in path.read_text()]
FENCED = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
MAGIC = re.compile(r"^[%!].*$", re.MULTILINE)
LISTS = ("show.source", "show.difference")


def listing_problems(notebook) -> list[str]:
    """One line for each private name that a listing uses and neither it nor an earlier cell of the notebook shows."""
    found, shown = [], set()
    for number, things in listings(notebook):
        shown |= {thing.__name__ for thing in things}
        for thing in things:
            unknown = private_names(textwrap.dedent(inspect.getsource(thing))) - shown
            found += [f"cell {number}: {thing.__name__} uses {name}, which is not shown" for name in sorted(unknown)]
    return found


def listings(notebook) -> Iterator[tuple[int, list[object]]]:
    """Each cell that shows sources, and the functions and classes that it shows."""
    imported = {}
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type != "code" or cell.source.startswith("%%"):  # a cell for another program, or a file
            continue
        nodes = list(ast.walk(ast.parse(MAGIC.sub("", cell.source))))
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "fsdp_helpers":
                imported |= {alias.asname or alias.name: look_up(node.module, alias.name) for alias in node.names}
        for node in nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func) in LISTS:
                yield number, [eval(ast.unparse(argument), imported) for argument in node.args]


def look_up(module: str, name: str) -> object:
    """What `from module import name` brings."""
    found = getattr(importlib.import_module(module), name, None)
    return importlib.import_module(f"{module}.{name}") if found is None else found


def private_names(code: str) -> set[str]:
    """Names with a leading underscore, attributes too, that `code` uses and does not define; `_` alone is no name."""
    nodes = list(ast.walk(ast.parse(code)))
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    used |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    defined |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    defined |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return {name for name in used - defined if re.match(r"_[^_]", name)}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_listings_use_what_the_reader_has_seen(path):
    assert listing_problems(nbformat.read(path, as_version=4)) == []


def test_a_private_helper_that_is_not_shown_is_found():
    imports = "from fsdp_helpers.measuring import memory\nfrom fsdp_helpers.measuring.memory import _local_bytes"
    sources = (imports, "show.source(memory.state_bytes)")
    problem = "cell 1: state_bytes uses _local_bytes, which is not shown"
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    assert listing_problems(nbformat.v4.new_notebook(cells=cells)) == [problem]
    cells.append(nbformat.v4.new_code_cell("show.source(_local_bytes)"))
    assert listing_problems(nbformat.v4.new_notebook(cells=cells)) == [problem]  # too late


def without_mesh(code: str) -> list[str]:
    """Return the calls of `fully_shard` in `code` that are not told the mesh, or might not be."""
    called = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    sharding = [node for node in called if ast.unparse(node.func).split(".")[-1] == "fully_shard"]
    return [ast.unparse(node) for node in sharding if not {"mesh", None} & {given.arg for given in node.keywords}]


@pytest.mark.parametrize("path", SHARDING, ids=lambda path: path.stem)
def test_each_fully_shard_is_told_its_mesh(path):
    if path in PATHS:
        cells = nbformat.read(path, as_version=4).cells
        code = [
            MAGIC.sub("", cell.source) for cell in cells if cell.cell_type == "code" and "fully_shard" in cell.source
        ]
        code += [shown for cell in cells if cell.cell_type == "markdown" for shown in FENCED.findall(cell.source)]
    else:
        code = [path.read_text()]
    assert [call for part in code for call in without_mesh(part)] == []


def test_a_missing_mesh_is_found():
    assert without_mesh("fully_shard(model, mesh=mesh)\nfsdp.fully_shard(block, **settings)") == []
    assert without_mesh("fully_shard(block, reshard_after_forward=False)") == [
        "fully_shard(block, reshard_after_forward=False)"
    ]
