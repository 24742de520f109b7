"""Listings: the code and nothing else, unwrapped; and what a notebook lists can be copied into a script."""

import ast
import html
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from leftovers import PROJECT

from fsdp_helpers.teaching.page import show
from fsdp_helpers.teaching.page.listings import Listing

CODE = 'def sum_of(values):  # <b> & "quoted"\n    """Adds."""\n\n    return sum(values) if values else 0\n'
LISTING = sorted(path for path in (PROJECT / "notebooks").glob("*.ipynb") if "show.source(" in path.read_text())
MAGIC = re.compile(r"^[%!].*$", re.MULTILINE)


@pytest.mark.parametrize("language, code", [("python", CODE), ("diff", "...\n-    one\n+    two\n same")])
def test_a_listing_holds_the_code_and_scrolls(language, code):
    page = Listing(code, "a.py, line 1", language)._repr_html_()
    ((style, shown),) = re.findall(r'<pre style="([^"]*)"[^>]*>(.*)</pre>', page, re.DOTALL)
    assert html.unescape(re.sub(r"<[^>]+>", "", shown)) == code.rstrip("\n")
    assert {"white-space:pre", "overflow-x:auto"} <= set(style.split(";"))
    assert "var(" not in page  # JupyterLab's sanitizer drops a theme's colors where the notebook was not run here
    assert repr(Listing(code, "a.py, line 1")) == f"# a.py, line 1\n\n{code}"  # for whatever shows no HTML


def listed(path: Path) -> Iterator[list[object]]:
    """What each cell of a notebook lists: functions and classes, looked up where the notebook imports them from."""
    imported = {}
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code" and not cell.source.startswith("%%"):  # a cell for another program, or a file
            nodes = list(ast.walk(ast.parse(MAGIC.sub("", cell.source))))
            for node in nodes:
                if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "fsdp_helpers":
                    imported |= {alias.asname or alias.name: look_up(node.module, alias.name) for alias in node.names}
            for node in nodes:
                if isinstance(node, ast.Call) and ast.unparse(node.func) in ("show.source", "show.difference"):
                    yield [eval(ast.unparse(argument), imported) for argument in node.args]


def look_up(module: str, name: str) -> object:
    """What `from module import name` brings."""
    found = getattr(importlib.import_module(module), name, None)
    return importlib.import_module(f"{module}.{name}") if found is None else found


@pytest.mark.parametrize("path", LISTING, ids=lambda path: path.stem)
def test_what_a_notebook_lists_can_be_copied(path):
    """It runs where nothing else is defined; no name in it is unknown, imported for nothing, or private and not shown."""
    shown = set()
    for objects in listed(path):
        copied, names = show.source(*objects).code, {"__name__": "copied"}
        exec(copied, names)
        shown |= {thing.__name__ for thing in objects}
        assert {thing.__name__ for thing in objects} <= names.keys()
        assert set(re.findall(r"(?<![\w.'\"])_[a-z]\w*", copied)) <= shown
        ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", "-"]
        done = subprocess.run(ruff, input=copied, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    assert shown
