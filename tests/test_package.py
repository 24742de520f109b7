"""The house: rooms whose imports run downwards only, small functions, and a light front door."""

import ast
import graphlib
import importlib
import re
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
    {"measuring"},
    {"sharding", "checkpointing"},
    {"ranks", "planning"},
    {"models", "data"},
    {"config", "records", "quantities", "gpus", "notebook", "progress"},  # what all rooms share
)
WITHOUT_TORCH = ("planning", "config", "records", "quantities", "models.shapes")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


MODULES = [module_name(path) for path in FILES if path.name != "__init__.py"]


def floor_of(name: str) -> int:
    room = name.split(".")[0]
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


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


def upward_imports(graph: dict[str, set[str]]) -> list[str]:
    return [
        f"{name} imports {used}" for name, names in graph.items() for used in names if floor_of(used) < floor_of(name)
    ]


def package_graph() -> dict[str, set[str]]:
    return {module_name(path): imported_modules(path.read_text()) for path in FILES if path.name != "__init__.py"}


@pytest.mark.parametrize("name", [name for name in MODULES if name != "__main__"])
def test_every_module_imports(name):
    importlib.import_module(f"fsdp_helpers.{name}")


def test_imports_run_downwards():
    graph = package_graph()
    assert set().union(*graph.values()) <= set(MODULES), "imported, and not there"
    assert upward_imports(graph) == []
    assert list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError for a circle


def test_contributing_says_which_room_uses_which():
    shared = FLOORS[-1] | {"__main__"}
    uses = {room: set() for rooms in FLOORS for room in rooms - shared}
    for name, used in package_graph().items():
        if (room := name.split(".")[0]) in uses:
            uses[room] |= {one.split(".")[0] for one in used} - shared - {room}
    rows = re.findall(
        r"^\| ((?:`\w+`(?:, )?)+) \| (.*) \|$", (PACKAGE.parent / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    told = {}
    for rooms, text in rows:
        named = set(re.findall(r"`(\w+)`", text))
        told |= {
            room: uses.keys() - named - {room} if text.startswith("all") else named
            for room in re.findall(r"`(\w+)`", rooms)
        }
    assert told == uses


def test_the_loop_knows_no_strategy_and_the_launcher_no_model():
    graph = package_graph()
    assert not {name for name in graph["training.loop"] if name.startswith(("sharding.strategies", "ranks.launch"))}
    assert not graph["ranks.launch"] & {"models.series", "data.images", "config"}


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_these_import_no_torch(room):
    names = [name for name in MODULES if f"{name}.".startswith(f"{room}.")]
    imports = ", ".join(f"fsdp_helpers.{name}" for name in names)
    assert names
    assert run_python(f"import sys, {imports}; print('torch' in sys.modules)") == "False"


def test_rooms_hold_no_code_at_the_door():
    for path in PACKAGE.rglob("*/__init__.py"):
        body = ast.parse(path.read_text()).body
        assert len(body) == 1 and ast.get_docstring(ast.Module(body, [])), f"{path}: a docstring and nothing else"


def test_importing_the_package_imports_nothing_else():
    code = (
        "import sys; import fsdp_helpers; "
        "print([name for name in ('torch', 'numpy', 'tqdm', 'multiprocessing') if name in sys.modules], "
        "[name for name in sys.modules if name.startswith('fsdp_helpers.')])"
    )
    assert run_python(code) == "[] []"


@pytest.mark.parametrize("name", fsdp_helpers.__all__)
def test_what_the_package_hands_out(name):
    assert callable(getattr(fsdp_helpers, name)) and name in dir(fsdp_helpers)


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="it has .*launch.*train"):
        _ = fsdp_helpers.lunch
