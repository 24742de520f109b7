"""What tests ask of a chapter: which calls its cells make, as syntax trees, and what a changed line does when it runs.

A chapter's *body* is everything above its exercises. Cells are named by their ids.
"""

import ast
import difflib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from queue import Empty

import nbformat
from jupyter_client.manager import KernelManager
from leftovers import PROJECT, SESSION_VARIABLE
from nbformat import NotebookNode

NOTEBOOKS = PROJECT / "notebooks"
FOLDERS = ("cluster", "failures", "images", "reference", "take_home")  # what a cell may open
PATIENCE_S = 180.0  # for one cell, on a busy machine
RANKS = "%%ranks"
FILE = re.compile(r"%%writefile\s+(?:-a\s+)?(\S+\.py)\s*$")
LINE_MAGIC = re.compile(r"^\s*[%!].*$", re.MULTILINE)
COLORS = re.compile(r"\x1b\[[\d;]*m")
LAUNCHERS = ("launch", "mp.spawn", "start_processes")
WRAPPERS = ("each", "traced")  # rank functions that run another one, their first argument

Changes = Mapping[str, tuple[str, str]]  # for a cell's id, a line of it (or a part of one), and what is there instead


# ---------------------------------------------------------------- cells, and what they call


def read_chapter(number: str) -> NotebookNode:
    """The notebook whose name begins with `number`, such as "03"."""
    (path,) = NOTEBOOKS.glob(f"{number}_*.ipynb")
    return nbformat.read(path, as_version=4)


def headings(path: Path) -> set[str]:
    """Return the anchors of a notebook's headings, as JupyterLab makes them."""
    cells = nbformat.read(path, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    unfolded = re.sub(r"<details>.*?</details>|```.*?```", "", text, flags=re.DOTALL)
    return {
        name.strip().replace("`", "").replace(" ", "-")
        for name in re.findall(r"^#{1,4} (.+)$", unfolded, flags=re.MULTILINE)
    }


def body(notebook: NotebookNode) -> list[NotebookNode]:
    """All cells above the exercises."""
    cells = notebook.cells
    ends = [place for place, cell in enumerate(cells) if re.search(r"^## Exercises?\b", cell.source, re.MULTILINE)]
    return cells[: ends[0]] if ends else cells


def code_cells(cells: list[NotebookNode]) -> list[NotebookNode]:
    return [cell for cell in cells if cell.cell_type == "code"]


def is_for_ranks(cell: NotebookNode) -> bool:
    return cell.cell_type == "code" and cell.source.startswith(RANKS)


def tree_of(cell: NotebookNode) -> ast.Module:
    """A code cell as Python, with the body of `%%ranks` or of a written module; empty for other languages."""
    first, _, rest = cell.source.partition("\n")
    if first.startswith("%%"):
        return ast.parse(rest if first.startswith(RANKS) or FILE.match(first) else "")
    return ast.parse(LINE_MAGIC.sub("", cell.source))


def calls(cells: list[NotebookNode]) -> Iterator[ast.Call]:
    for cell in code_cells(cells):
        yield from (node for node in ast.walk(tree_of(cell)) if isinstance(node, ast.Call))


def makes(call: ast.Call, wanted: str) -> bool:
    """Whether `call` is one of `wanted`: "fully_shard" or "dcp.save", or with a keyword, "auto_wrap_policy="."""
    if wanted.endswith("="):
        return any(keyword.arg == wanted[:-1] for keyword in call.keywords)
    name = ast.unparse(call.func)
    return name == wanted or name.endswith(f".{wanted}")


def not_called(cells: list[NotebookNode], wanted: tuple[str, ...]) -> list[str]:
    """Those of `wanted` that no cell calls; of "checkpoint_wrapper|checkpoint" either will do."""
    found = list(calls(cells))
    return [names for names in wanted if not any(makes(call, name) for call in found for name in names.split("|"))]


def launched(cells: list[NotebookNode]) -> set[str]:
    """The names of the rank functions that `launch` or `mp.spawn` is given."""
    names = set()
    for call in calls(cells):
        if ast.unparse(call.func) in LAUNCHERS and call.args:
            worker = call.args[1] if ast.unparse(call.args[0]).split(".")[-1] in WRAPPERS else call.args[0]
            names.add(ast.unparse(worker).split(".")[-1])
    return names


def written(cells: list[NotebookNode]) -> set[str]:
    """The names of all functions and classes that the cells define."""
    kinds = ast.FunctionDef | ast.ClassDef
    return {node.name for cell in code_cells(cells) for node in ast.walk(tree_of(cell)) if isinstance(node, kinds)}


def listed(cells: list[NotebookNode]) -> set[str]:
    """The names of all functions and classes whose source the cells show."""
    shown = [call for call in calls(cells) if ast.unparse(call.func) in ("show.source", "show.difference")]
    return {ast.unparse(argument).split(".")[-1] for call in shown for argument in call.args}


def defined(cells: list[NotebookNode], name: str) -> ast.FunctionDef | ast.ClassDef:
    """The function or class `name` that a cell defines."""
    nodes = [node for cell in code_cells(cells) for node in ast.walk(tree_of(cell))]
    return next(node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name)


def statements(nodes: list[ast.stmt] | ast.Module) -> list[str]:
    """Statements as text, without comments, blank lines and docstrings, so that two places can be compared."""
    nodes = nodes.body if isinstance(nodes, ast.Module) else nodes
    text = [without_docstrings(node) for node in nodes]
    return [line for line in text if not line.startswith(("'", '"'))]


def difference(before: NotebookNode, after: NotebookNode, start: str) -> list[str]:
    """The lines that differ between two cells from their line `start` on, each with a line around it."""
    one, other = (cell.source[cell.source.index(start) :].splitlines() for cell in (before, after))
    changes = list(difflib.unified_diff(one, other, n=1, lineterm=""))[2:]
    return ["..." if line.startswith("@@") else line for line in changes]


def fenced(cell: NotebookNode, language: str) -> list[str]:
    """The lines of the block of code in a Markdown cell."""
    (block,) = re.findall(rf"```{language}\n(.*?)\n```", cell.source, re.DOTALL)
    return block.splitlines()


def without_docstrings(node: ast.stmt) -> str:
    node = ast.parse(ast.unparse(node)).body[0]  # a copy
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(inner) is not None:
            inner.body = inner.body[1:] or [ast.Pass()]
    return ast.unparse(node)


# ---------------------------------------------------------------- cells that run


class CellError(Exception):
    """A cell ended in an error: its kind, its message, and the traceback as a reader sees it."""

    def __init__(self, kind: str, message: str, traceback: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind, self.message, self.traceback = kind, message, traceback


class Chapter:
    """A chapter's notebook in a kernel of its own, on the bundled digits, in a folder of its own.

    with Chapter("03", tmp_path) as chapter:
        chapter.run_all(["settings", "by-hand"])
        chapter.run("by-hand", {"by-hand": ("unit.reshard()", "")})     # a copy of the cell, with one line changed
        chapter.value("ranks['losses']")
    """

    def __init__(self, number: str, folder: Path) -> None:
        self.notebook = read_chapter(number)
        self.cells = {cell.id: cell for cell in code_cells(self.notebook.cells)}
        folder.mkdir(parents=True, exist_ok=True)
        for name in FOLDERS:
            (folder / name).symlink_to(NOTEBOOKS / name)
        own = folder / "own"
        own.mkdir()
        places = {name: str(own) for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR", "TMPDIR")}
        python_path = os.pathsep.join([str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, **places, "PYTHONPATH": python_path, "FSDP_OFFLINE": "1"}
        environment.pop(SESSION_VARIABLE, None)  # the kernel lives for several tests, each of which may leave nothing
        self.manager = KernelManager(connection_file=str(folder / "connection.json"))
        self.manager.start_kernel(cwd=str(folder), env=environment)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE_S)

    def __enter__(self) -> "Chapter":
        return self

    def __exit__(self, *error: object) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel()

    def source(self, cell_id: str, changes: Changes | None = None) -> str:
        """The cell's text, with its change if there is one; the line to change has to be there exactly once."""
        source = self.cells[cell_id].source
        before, after = (changes or {}).get(cell_id, ("", ""))
        if before:
            assert source.count(before) == 1, f"{before!r} is in {cell_id} {source.count(before)} times, not once"
            source = source.replace(before, after)
        return source

    def shrink(self, cell_id: str, *changes: tuple[str, str]) -> None:
        """Let a cell be smaller in all runs to come: each `before` in its text is `after` from now on."""
        cell = self.cells[cell_id]
        for before, after in changes:
            assert before in cell.source, f"{before!r} isn't in {cell_id}"
            cell.source = cell.source.replace(before, after)

    def run(self, cell_id: str, changes: Changes | None = None) -> str:
        """Run one cell, and return what it shows as text. Raises CellError if it fails."""
        return self.execute(self.source(cell_id, changes))

    def run_all(self, cell_ids: list[str], changes: Changes | None = None) -> list[str]:
        """Run cells in this order; return what each of them shows."""
        return [self.run(cell_id, changes) for cell_id in cell_ids]

    def value(self, expression: str) -> object:
        """The value of an expression in the notebook's own process: numbers, text, and lists and dicts of them."""
        return ast.literal_eval(self.execute(f"print(repr({expression}))"))

    def execute(self, source: str) -> str:
        """Run any code, and return what it shows; a line that is replaced in place counts as its last state."""
        request = self.client.execute(source)
        shown: list[tuple[str | None, str]] = []
        failure = None
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=PATIENCE_S)
            except Empty:
                self.manager.interrupt_kernel()
                raise TimeoutError(f"a cell did not end in {PATIENCE_S:.0f} s:\n{source}") from None
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                break
            if kind == "error":
                traceback = COLORS.sub("", "\n".join(content["traceback"]))
                failure = CellError(content["ename"], content["evalue"], traceback)
            elif kind == "stream":
                shown.append((None, content["text"]))
            elif "data" in content:
                display = content.get("transient", {}).get("display_id")
                shown = [part for part in shown if display is None or part[0] != display]
                shown.append((display, content["data"].get("text/plain", "") + "\n"))
        if failure is not None:
            raise failure
        return "".join(text for _, text in shown)

    def set_up_cells(self) -> list[str]:
        """The ids of all code cells above the first one for ranks."""
        ids = []
        for cell_id, cell in self.cells.items():
            if is_for_ranks(cell):
                break
            ids.append(cell_id)
        return ids

    def run_twice(self, cell_ids: list[str]) -> None:
        """Run each cell twice in a row, and keep what both runs show in `twice`."""
        self.twice = {cell_id: (self.run(cell_id), self.run(cell_id)) for cell_id in cell_ids}

    def others(self) -> list[str]:
        """The ids of the cells that showed something else the second time."""
        return [cell_id for cell_id, (first, second) in self.twice.items() if first != second]

    def ranks_cells(self) -> list[str]:
        return [cell.id for cell in code_cells(body(self.notebook)) if is_for_ranks(cell)]
