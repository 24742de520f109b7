"""The code behind a notebook's kept outputs, as two digests: of its code cells, and of all that they call.

The second covers every module of the package that the cells import, and the modules behind those; the text of what the
notebook shows (`show.source`); and each file of the project that a cell names. Comments and docstrings count only if
they are shown, and layout never counts, so editing a sentence makes no output outdated.
"""

import ast
import hashlib
import io
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
PACKAGE = "fsdp_helpers"
SHOWS = ("source", "side_by_side", "difference")  # functions of `show` that put source code on the page
KEY = "kept_outputs"  # in a notebook's metadata


def digests(notebook, project: Path = PROJECT) -> dict[str, str]:
    """Return what `run_notebooks` writes into the metadata of the notebook that it has run."""
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return {"cells": _digest(map(code_alone, cells)), "sources": _digest(called_by(cells, project))}


def outdated(notebook, project: Path = PROJECT) -> list[str]:
    """Return the parts that have changed since the kept outputs were made."""
    kept = notebook.metadata.get(KEY, {})
    now = digests(notebook, project)
    names = {"cells": "its code cells", "sources": "the code that they call"}
    return [told for part, told in names.items() if kept.get(part) != now[part]]


def called_by(cells: Iterable[str], project: Path) -> Iterator[str]:
    """Yield the code that the cells call, then what they show, then the files that they name."""
    trees = [tree for cell in cells if (tree := parsed(cell))]
    modules = sorted(modules_behind(trees, project))
    yield from (module_alone(path) for path in modules)
    shown = {name for tree in trees for name in shown_names(tree)}
    yield from (text for path in modules for text in definitions(path, shown))
    files = {path for tree in trees for path in named_files(tree, project)}
    yield from (path.read_text() for path in sorted(files))


def parsed(code: str) -> ast.Module | None:
    """Return the syntax tree, or None for a cell that is more than Python, such as one that begins with %%writefile."""
    try:
        return ast.parse(code)
    except SyntaxError:
        return None


def _digest(texts: Iterable[str]) -> str:
    whole = hashlib.sha256()
    for text in texts:
        whole.update(text.encode() + b"\0")
    return whole.hexdigest()[:16]


# ---------------------------------------------------------------- which code


def modules_behind(cells: Iterable[ast.Module], project: Path) -> set[Path]:
    """Return the files of the package that the cells import or run, and those behind them."""
    waiting = {path for tree in cells for path in imported(tree, project)}
    if any(runs_package(tree) for tree in cells):
        waiting.add(project / PACKAGE / "__main__.py")
    found: set[Path] = set()
    while waiting:
        path = waiting.pop()
        found.add(path)
        waiting |= imports_of(path, project) - found
    return found


@cache
def imports_of(path: Path, project: Path) -> set[Path]:
    return imported(module_tree(path), project)


def imported(tree: ast.Module, project: Path) -> set[Path]:
    """Return the files of the package that are imported anywhere in the tree."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            homes = handed_out(project) if node.module == PACKAGE else {}
            names |= {node.module, *(f"{node.module}.{homes.get(alias.name, alias.name)}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    ours = (name.split(".") for name in names if name.startswith(f"{PACKAGE}."))
    paths = (project.joinpath(*parts).with_suffix(".py") for parts in ours)
    return {path for path in paths if path.is_file()}


def runs_package(tree: ast.Module) -> bool:
    """Return whether a string is a command line of the package, or the name after `-m` in one."""
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return any(text == PACKAGE or f"-m {PACKAGE}" in text for text in texts)


@cache
def handed_out(project: Path) -> dict[str, str]:
    """Return the modules behind the names that the package itself exports."""
    for node in ast.parse((project / PACKAGE / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES":
            return ast.literal_eval(node.value)
    raise LookupError(f"{PACKAGE}/__init__.py has no _HOMES")


def shown_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names of functions and classes whose source is put on the page."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SHOWS:
            for argument in node.args:
                yield ast.unparse(argument).split(".")[-1]


def definitions(path: Path, names: set[str]) -> Iterator[str]:
    """Yield the source of the functions and classes of these names, with the line number that the page names."""
    lines = path.read_text().splitlines()
    for node in module_tree(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names:
            first = min(part.lineno for part in (node, *node.decorator_list))
            yield "\n".join([f"line {first}", *lines[first - 1 : node.end_lineno]])


def named_files(tree: ast.Module, project: Path) -> Iterator[Path]:
    """Yield the files beside the notebooks that a string names, such as "take_home/ddp.py"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "/" in node.value:
            path = project / "notebooks" / node.value
            if len(node.value) < 100 and path.is_file():
                yield path


# ---------------------------------------------------------------- without words


@cache
def module_tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def module_alone(path: Path) -> str:
    return code_alone(path.read_text())


def code_alone(text: str) -> str:
    """Return the code without comments, docstrings and empty lines; the same for every version of Python."""
    tree = parsed(text)
    if tree is None:
        return text
    without = blank_comments(text, docstring_lines(tree))
    return "\n".join(line for line in map(str.rstrip, without) if line)


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the numbers of the lines that docstrings take."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            lines |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def blank_comments(text: str, left_out: set[int]) -> list[str]:
    """Return the lines, cut off where a comment begins; those that are left out are empty."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return ["" if number in left_out else line for number, line in enumerate(lines, 1)]
