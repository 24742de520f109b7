"""A module that the reader wrote with %%writefile: found by name, and as its file is now."""

import ast
import importlib
import importlib.util
import re
import runpy
import sys
from pathlib import Path
from typing import Any

from fsdp_helpers.ranks.server import loading_worker
from fsdp_helpers.teaching.exercises.answers import NotYet, error_line, expect

PACKAGE = __name__.partition(".")[0]


def read_module(module: str, name: str, *, with_package: bool = False) -> Any:
    """Run the module's file and return its `name`. Raises NotYet if the file is missing, broken, or lacks that name.

    Unless `with_package`, it also refuses a module that imports this package, which has many of the answers.
    """
    expect(isinstance(module, str), f"the answer is {module!r}; it should be the name of your module, as a string")
    sys.modules.pop(module, None)
    importlib.invalidate_caches()
    found = importlib.util.find_spec(module)
    expect(found is not None, f"there is no {module}.py here; run the cell that writes it")
    try:
        names = runpy.run_path(found.origin, run_name=module)  # from the source, never from a cache
    except Exception as error:
        raise NotYet(f"{module}.py can't be imported: {error_line(error)}") from None
    expect(name in names, f"{module}.py has no {name}")
    is_own = with_package or PACKAGE not in _imported(Path(found.origin).read_text())
    expect(is_own, f"{module}.py imports {PACKAGE}; write it yourself, with torch only")
    return names[name]


def _imported(source: str) -> set[str]:
    """Return the packages that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def import_own(module: str, name: str) -> Any:
    """Import `name` from the reader's module, in a rank."""
    with loading_worker():  # a module that launches is refused, else ranks would launch ranks
        return getattr(importlib.import_module(module), name)


def last_line_in(module: str, details: str) -> str:
    """Return the traceback's last place in the reader's file, such as " in line 12"; "" if there is none."""
    lines = re.findall(rf'{re.escape(module)}\.py", line (\d+)', details)
    return f" in line {lines[-1]}" if lines else ""
