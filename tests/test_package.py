import ast
import graphlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import fsdp_helpers

PACKAGE = Path(fsdp_helpers.__file__).parent
MODULES = sorted(module.name for module in pkgutil.iter_modules([str(PACKAGE)]))
WITHOUT_TORCH = [name for name in ("units", "config", "records", "planner", "levers") if name in MODULES]


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_module_imports():
    imports = "; ".join(f"import fsdp_helpers.{name}" for name in MODULES if name != "__main__")
    assert run_python(imports) == ""  # and none prints


def test_importing_the_package_imports_nothing_else():
    code = (
        "import sys; import fsdp_helpers; "
        "print([name for name in ('torch', 'numpy', 'tqdm', 'multiprocessing') if name in sys.modules], "
        "[name for name in sys.modules if name.startswith('fsdp_helpers.')])"
    )
    assert run_python(code) == "[] []"


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_these_import_no_torch(name):
    assert run_python(f"import sys, fsdp_helpers.{name}; print('torch' in sys.modules)") == "False"


def imported_modules(name: str) -> set[str]:
    """The modules of this package that module `name` imports, anywhere in its text."""
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / f"{name}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "fsdp_helpers":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fsdp_helpers."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("fsdp_helpers.")}
    return found


def test_imports_go_in_one_direction():
    graph = {name: imported_modules(name) for name in MODULES}
    assert set().union(*graph.values()) <= set(MODULES)
    assert list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError for a circle


def test_the_launcher_knows_nothing_of_models_and_the_loop_nothing_of_strategies():
    assert not imported_modules("launch") & {"models", "strategies", "training", "data", "workers"}
    assert not imported_modules("training") & {"strategies", "launch", "comms", "models"}
