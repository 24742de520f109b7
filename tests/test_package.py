"""The package: subpackages whose imports run downwards only, a first import that loads little, shapes in docstrings."""

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fsdp_helpers

PACKAGE = Path(fsdp_helpers.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
# From the highest level down: a subpackage imports from its own level and those below it.
LEVELS = (
    {"__main__"},
    {"cli"},
    {"teaching"},
    {"training"},
    {"measuring", "inspecting"},
    {"sharding", "checkpointing"},
    {"ranks", "planning"},
    {"models", "data"},
    {
        "config",
        "records",
        "quantities",
        "field_guide",
        "card_search",
        "gpus",
        "notebook",
        "progress",
    },  # what all subpackages share
)
SHAPE = re.compile(r"\([\w .·*/+-]+,[\w ,.·*/+-]*\)|\bscalar|\bshape")  # such as (N, length) or (num_steps,)
SHAPED = ("sharding", "models", "training", "measuring", "teaching/exercises", "../notebooks/take_home")
WITHOUT_TORCH = ("planning", "config", "records", "quantities", "field_guide", "card_search", "models.shapes")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


MODULES = [module_name(path) for path in FILES if path.name != "__init__.py"]


def level_of(name: str) -> int:
    subpackage = name.split(".")[0]
    return next(number for number, subpackages in enumerate(LEVELS) if subpackage in subpackages)


def imported_modules(source: str) -> set[str]:
    """The modules of this package that `source` imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            name = node.module or ""
            if name.split(".")[0] == "fsdp_helpers":
                whole = [f"{name}.{alias.name}" for alias in node.names]
                found |= {one if one.removeprefix("fsdp_helpers.") in MODULES else name for one in whole}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("fsdp_helpers.")}
    return {name.removeprefix("fsdp_helpers.") for name in found}


def package_graph() -> dict[str, set[str]]:
    return {module_name(path): imported_modules(path.read_text()) for path in FILES if path.name != "__init__.py"}


def test_imports_run_downwards():
    graph = package_graph()
    assert set().union(*graph.values()) <= set(MODULES), "imported, and not there"
    pairs = [(name, used) for name, names in graph.items() for used in names]
    assert [pair for pair in pairs if level_of(pair[1]) < level_of(pair[0])] == []
    assert list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError for a circle


def loaded_by(modules: list[str]) -> set[str]:
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_planning_and_records_import_no_torch_and_the_package_itself_imports_nothing():
    planning = [name for name in MODULES if f"{name}.".startswith(tuple(f"{light}." for light in WITHOUT_TORCH))]
    assert len(planning) > 20 and "torch" not in loaded_by([f"fsdp_helpers.{name}" for name in planning])
    loaded = loaded_by(["fsdp_helpers"])
    assert not {"torch", "numpy", "tqdm", "multiprocessing"} & loaded
    assert [name for name in loaded if name.startswith("fsdp_helpers.")] == []


def test_the_package_hands_out_what_it_names():
    assert all(callable(getattr(fsdp_helpers, name)) for name in fsdp_helpers.__all__)
    assert set(fsdp_helpers.__all__) <= set(dir(fsdp_helpers))
    with pytest.raises(AttributeError, match="it has .*launch.*train"):
        _ = fsdp_helpers.lunch


def functions_of_tensors(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Public functions that take or return tensors, with the docstrings of each and, for a method, of its class."""
    for owner in (tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))):
        of_class = ast.get_docstring(owner) if owner is not tree else None
        for node in owner.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                arguments = (one for one in ast.walk(node.args) if isinstance(one, ast.arg))
                types = [ast.unparse(one) for one in (node.returns, *(one.annotation for one in arguments)) if one]
                if any(re.search(r"\bTensor\b", one) and "Callable" not in one for one in types):
                    yield node.name, f"{ast.get_docstring(node)} {of_class}"


@pytest.mark.parametrize("folder", SHAPED)
def test_docstrings_say_the_shapes_of_tensors(folder):
    """Else a reader of a function that takes or returns a tensor has to run it to know what to pass."""
    paths = sorted((PACKAGE / folder).glob("*.py"))
    found = [(path.name, *one) for path in paths for one in functions_of_tensors(ast.parse(path.read_text()))]
    assert found and [(file, name) for file, name, docstring in found if not SHAPE.search(docstring)] == []
