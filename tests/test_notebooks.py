"""The notebooks as they are saved. Quick: nothing is run here, `pytest --nbmake notebooks` does that."""

import ast
import re
from collections.abc import Iterator

import nbformat
import pytest
from leftovers import PROJECT

FOLDER = PROJECT / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
MACHINE_PATH = re.compile(r"(?:^|[\s\"'(=:\[])(?:/home/|/root/|/work/|/tmp/|/Users/|/usr/|[A-Z]:\\)|site-packages")
WARNING = re.compile(r"\b\w*Warning\b: |^\[?W\d{3,}|\[W\d", re.MULTILINE)
FENCED = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
MAGIC = re.compile(r"^[%!].*$", re.MULTILINE)
NOT_PROSE = (
    re.compile(  # folds of code, code, links (they name other chapters), and the line that announces the next one
        r"```.*?```|<code>.*?</code>|`[^`\n]*`|\[[^\]]*\]\([^)]*\)|^\*\*Next:\*\*.*?$", re.DOTALL | re.MULTILINE
    )
)
BOLD = re.compile(r"\*\*([^*]+)\*\*")
OWN_ENVIRONMENT = "12_xla"  # no GPU is asked for there
START_RANKS = ("Ranks", "launch", "train", "compare")  # each of them takes a device
MAX_FILE_BYTES = 1_500_000


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def notebook(request) -> nbformat.NotebookNode:
    found = nbformat.read(request.param, as_version=4)
    found.metadata["name"] = request.param.stem
    return found


def text_of(output) -> str:
    """All that a reader sees of an output as text."""
    if output.output_type == "stream":
        return output.text
    if output.output_type == "error":
        return re.sub(r"\x1b\[[\d;]*m", "", "\n".join([output.evalue, *output.traceback]))
    return "\n".join(str(content) for kind, content in output.data.items() if kind.startswith("text/"))


def test_what_is_kept_is_one_run_without_errors_warnings_or_paths_of_a_machine(notebook):
    nbformat.validate(notebook)
    assert (FOLDER / f"{notebook.metadata.name}.ipynb").stat().st_size < MAX_FILE_BYTES
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "from top to bottom"
    for cell in code:
        told = [output for output in cell.outputs if output.output_type == "error" or output.get("name") == "stderr"]
        assert told == [] or "raises-exception" in cell.metadata.get("tags", []), cell.source
        outputs = "\n".join(map(text_of, cell.outputs))
        assert not WARNING.search(outputs) and not MACHINE_PATH.search(outputs), outputs
    for cell in notebook.cells:
        assert not MACHINE_PATH.search(cell.source), cell.source


def test_every_fold_and_code_fence_is_closed(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            assert len(re.findall(r"^\s*(?:```|~~~)", cell.source, re.MULTILINE)) % 2 == 0, cell.source
            for tag in ("details", "summary"):
                assert cell.source.count(f"<{tag}>") == cell.source.count(f"</{tag}>"), cell.source


def calls(code: str) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(MAGIC.sub("", code))) if isinstance(node, ast.Call))


def test_each_table_and_listing_is_shown(notebook):
    """Jupyter shows nothing but the value of a cell's last line."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code" and not cell.source.startswith("%%")]
    earlier = [
        line.value
        for source in code
        for line in ast.parse(MAGIC.sub("", source)).body[:-1]
        if isinstance(line, ast.Expr)
    ]
    called = [ast.unparse(value.func) for value in earlier if isinstance(value, ast.Call)]
    assert [name for name in called if name.startswith("show.") and name != "show.machine"] == []


def test_the_reader_chooses_the_device(notebook):
    """With a setting; the set-up and each start of ranks are given it."""
    if notebook.metadata.name == OWN_ENVIRONMENT:
        pytest.skip("it has an environment of its own")
    (settings,) = [cell.source for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    assert re.search(r'^DEVICE = "cpu"  # "cuda"', settings, re.MULTILINE)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code" and not cell.source.startswith("%%")]
    called = [call for source in code for call in calls(source)]
    assert any(ast.unparse(call).startswith("show.machine(DEVICE, ") for call in called)
    for call in called:
        if ast.unparse(call.func) in START_RANKS:
            devices = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "device"]
            assert len(devices) == 1 and devices != ["'cuda'"], ast.unparse(call)


def sharding_code() -> Iterator:
    """Every cell, block and script that calls `fully_shard`."""
    for path in sorted([*(PROJECT / "fsdp_helpers").rglob("*.py"), *(FOLDER / "take_home").glob("*.py")]):
        if "fully_shard(" in path.read_text():
            yield pytest.param([path.read_text()], id=path.stem)
    for path in PATHS:
        cells = nbformat.read(path, as_version=4).cells
        code = [cell.source for cell in cells if cell.cell_type == "code"]
        code += [shown for cell in cells if cell.cell_type == "markdown" for shown in FENCED.findall(cell.source)]
        if sharding := [source for source in code if "fully_shard(" in source]:
            yield pytest.param(sharding, id=path.stem)


@pytest.mark.parametrize("code", list(sharding_code()))
def test_each_fully_shard_is_told_its_mesh(code):
    """Without one it turns to a GPU if there happens to be one, also on CPU ranks."""
    for call in (call for source in code for call in calls(source)):
        if ast.unparse(call.func).split(".")[-1] == "fully_shard":
            assert {"mesh", None} & {given.arg for given in call.keywords}, ast.unparse(call)


def glossary() -> dict[str, str]:
    """Each word of the first column, and the number of the notebook that explains it."""
    words = {}
    for line in (FOLDER / "GLOSSARY.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if explained_in := re.match(r"\[(\d\d)\]\(", cells[-1]):
            words |= dict.fromkeys(cells[0].split(", "), explained_in.group(1))
    return words


def as_pattern(word: str) -> re.Pattern:
    """The whole word, also in the plural; one in small letters may begin a sentence."""
    flags = re.IGNORECASE if word.islower() else 0
    return re.compile(rf"(?<![\w-]){re.escape(word)}(?:s|es)?(?![\w-])", flags)


def test_a_word_is_explained_before_it_is_used(notebook):
    """In no chapter before the one that the glossary names, and there in bold."""
    text = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    prose, bold = NOT_PROSE.sub(" ", text), BOLD.findall(text)
    words, number = glossary(), notebook.metadata.name[:2]
    assert len(words) > 40 and set(words.values()) <= {path.stem[:2] for path in PATHS}
    assert "(GLOSSARY.md)" in notebook.cells[0].source, "the glossary is linked in the first cell"
    for word, explained_in in words.items():
        use = as_pattern(word).search(prose) if explained_in > number else None
        assert not use, (
            f"{word!r} in {prose[max(0, use.start() - 30) : use.end() + 30]!r} is explained in {explained_in}"
        )
        assert explained_in != number or any(as_pattern(word).fullmatch(span) for span in bold), f"{word!r} in bold"
