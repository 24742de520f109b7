"""The package: subpackages whose imports run downwards only, and a light front door."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import fsdp_helpers

PACKAGE = Path(fsdp_helpers.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
# From the highest floor down: a room imports from its own floor and those below it.
FLOORS = (
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
    },  # what all rooms share
)
WITHOUT_TORCH = ("planning", "config", "records", "quantities", "field_guide", "card_search", "models.shapes")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


MODULES = [module_name(path) for path in FILES if path.name != "__init__.py"]


def floor_of(name: str) -> int:
    room = name.split(".")[0]
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


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
    assert [pair for pair in pairs if floor_of(pair[1]) < floor_of(pair[0])] == []
    assert list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError for a circle


def loaded_by(modules: list[str]) -> set[str]:
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_planning_and_records_need_no_torch_and_the_front_door_needs_nothing():
    planning = [name for name in MODULES if f"{name}.".startswith(tuple(f"{room}." for room in WITHOUT_TORCH))]
    assert len(planning) > 20 and "torch" not in loaded_by([f"fsdp_helpers.{name}" for name in planning])
    loaded = loaded_by(["fsdp_helpers"])
    assert not {"torch", "numpy", "tqdm", "multiprocessing"} & loaded
    assert [name for name in loaded if name.startswith("fsdp_helpers.")] == []


def test_the_package_hands_out_what_it_names():
    assert all(callable(getattr(fsdp_helpers, name)) for name in fsdp_helpers.__all__)
    assert set(fsdp_helpers.__all__) <= set(dir(fsdp_helpers))
    with pytest.raises(AttributeError, match="it has .*launch.*train"):
        _ = fsdp_helpers.lunch
