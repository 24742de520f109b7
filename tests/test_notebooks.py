"""Hygiene of the notebooks as they are kept. Quick: nothing is run here, `pytest --nbmake notebooks` does that."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
MACHINE_PATH = re.compile(r"(?:^|[\s\"'(=:\[])(?:/home/|/root/|/work/|/tmp/|/Users/|/usr/|[A-Z]:\\)|site-packages")
WARNING = re.compile(r"\b\w*Warning\b: |^\[?W\d{3,}|\[W\d", re.MULTILINE)
FENCE = re.compile(r"^\s*(?:```|~~~)", re.MULTILINE)
NOT_PROSE = (
    re.compile(  # folds of code, code, links (they name other chapters), and the line that announces the next one
        r"```.*?```|<code>.*?</code>|`[^`\n]*`|\[[^\]]*\]\([^)]*\)|^\*\*Next:\*\*.*?$", re.DOTALL | re.MULTILINE
    )
)
BOLD = re.compile(r"\*\*([^*]+)\*\*")
OWN_ENVIRONMENT = ("12_xla",)  # no GPU is asked for there
START_RANKS = ("Ranks", "launch", "train", "compare")  # each of them takes a device
MAX_FILE_BYTES = 1_500_000


def problems(notebook) -> list[str]:
    """What is wrong with a notebook, one line each."""
    found = []
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code]
    if counts != list(range(1, len(code) + 1)):
        found.append(f"not one run from top to bottom: execution counts {counts}")
    num_parameters = sum("parameters" in cell.metadata.get("tags", []) for cell in notebook.cells)
    if num_parameters != 1:
        found.append(f"{num_parameters} cells are tagged 'parameters' instead of 1")
    for number, cell in enumerate(notebook.cells):
        where = f"cell {number}"
        if cell.cell_type == "markdown":
            found += [f"{where}: {problem}" for problem in unbalanced(cell.source)]
        if cell.cell_type == "code":
            found += [
                f"{where}: {call} stands before its last line, so nothing shows it" for call in unseen(cell.source)
            ]
            found += [f"{where}: {problem}" for problem in output_problems(cell)]
        if MACHINE_PATH.search(cell.source):
            found.append(f"{where}: its text names a path of one machine")
    return found


def unbalanced(text: str) -> list[str]:
    """Code fences and folds of a Markdown cell that are opened and not closed, or the other way round."""
    found = []
    if (fences := len(FENCE.findall(text))) % 2:
        found.append(f"{fences} code fences, one of them alone")
    for tag in ("details", "summary"):
        if (opened := text.count(f"<{tag}>")) != (closed := text.count(f"</{tag}>")):
            found.append(f"{opened} <{tag}> and {closed} </{tag}>")
    return found


def unseen(source: str) -> list[str]:
    """Return the tables and listings that Jupyter would not show: it shows the value of a cell's last line only."""
    if re.search(r"^[!%]", source, re.MULTILINE):
        return []
    earlier = [line.value for line in ast.parse(source).body[:-1] if isinstance(line, ast.Expr)]
    called = [ast.unparse(value.func) for value in earlier if isinstance(value, ast.Call)]
    return [name for name in called if name.startswith("show.") and name != "show.machine"]


def output_problems(cell) -> list[str]:
    may_fail = "raises-exception" in cell.metadata.get("tags", [])
    found = []
    for output in cell.outputs:
        if output.output_type == "error" and not may_fail:
            found.append(f"an error is kept: {output.ename}")
        if output.get("name") == "stderr" and not may_fail:
            found.append(f"standard error is kept: {output.text[:60]!r}")
        text = output_text(output)
        if path := MACHINE_PATH.search(text):
            found.append(f"an output names a path of one machine: {text[path.start() : path.end() + 30]!r}")
        if WARNING.search(text):
            found.append(f"a warning is kept: {WARNING.search(text).group()!r}")
    return found


def output_text(output) -> str:
    """All that a reader sees of an output as text."""
    if output.output_type == "stream":
        return output.text
    if output.output_type == "error":
        return re.sub(r"\x1b\[[\d;]*m", "", "\n".join([output.evalue, *output.traceback]))
    return "\n".join(str(content) for kind, content in output.data.items() if kind.startswith("text/"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_notebook(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert problems(notebook) == []
    assert path.stat().st_size < MAX_FILE_BYTES


def calls(notebook) -> Iterator[ast.Call]:
    """Yield all calls in code cells that are Python throughout."""
    for cell in notebook.cells:
        if cell.cell_type == "code" and not re.search(r"^[!%]", cell.source, re.MULTILINE):
            yield from (node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Call))


def device_problems(notebook) -> list[str]:
    """Say where the reader does not choose the device: no setting, a different set-up, a call that ignores it."""
    settings = [cell.source for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    found = [] if re.search(r'^DEVICE = "cpu"  # "cuda"', settings[0], re.MULTILINE) else ["no DEVICE in its settings"]
    called = {ast.unparse(call.func) for call in calls(notebook)}
    found += [
        f"{name} is called, show.machine does that" for name in ("prepare_data", "describe_source") if name in called
    ]
    if not any(ast.unparse(call).startswith("show.machine(DEVICE, ") for call in calls(notebook)):
        found.append("show.machine is not told the DEVICE")
    for call in calls(notebook):
        if ast.unparse(call.func) in START_RANKS:
            devices = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "device"]
            if len(devices) != 1 or devices == ["'cuda'"]:
                found.append(f"{ast.unparse(call)} does not pass the device on")
    return found


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_reader_chooses_the_device(path):
    if path.stem in OWN_ENVIRONMENT:
        pytest.skip("it has an environment of its own")
    assert device_problems(nbformat.read(path, as_version=4)) == []


def read_glossary(text: str) -> dict[str, str]:
    """Each word of the first column, and the number of the notebook that explains it."""
    words = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if explained_in := re.match(r"\[(\d\d)\]\(", cells[-1]):
            words |= dict.fromkeys(cells[0].split(", "), explained_in.group(1))
    return words


def as_pattern(word: str) -> re.Pattern:
    """The whole word, also in the plural; one in small letters may begin a sentence."""
    flags = re.IGNORECASE if word.islower() else 0
    return re.compile(rf"(?<![\w-]){re.escape(word)}(?:s|es)?(?![\w-])", flags)


def glossary_problems(notebook, number: str, words: dict[str, str]) -> list[str]:
    """Words that a later notebook explains, and words that this one should explain and never has in **bold**."""
    text = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    prose, bold = NOT_PROSE.sub(" ", text), BOLD.findall(text)
    found = []
    for word, explained_in in words.items():
        pattern = as_pattern(word)
        if explained_in > number and (use := pattern.search(prose)):
            around = prose[max(0, use.start() - 30) : use.end() + 30]
            found.append(f"{word!r} is explained in {explained_in} and used before, in {around!r}")
        if explained_in == number and not any(pattern.fullmatch(span) for span in bold):
            found.append(f"{word!r} is explained here, says the glossary, and is nowhere in bold")
    return found


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_word_is_explained_before_it_is_used(path):
    notebook = nbformat.read(path, as_version=4)
    words = read_glossary((FOLDER / "GLOSSARY.md").read_text())
    assert glossary_problems(notebook, path.stem[:2], words) == []
    assert "(GLOSSARY.md)" in notebook.cells[0].source, "the glossary is linked in the first cell"


def test_every_word_of_the_glossary_is_explained_by_a_notebook():
    words = read_glossary((FOLDER / "GLOSSARY.md").read_text())
    assert len(words) > 40
    assert set(words.values()) <= {path.stem[:2] for path in PATHS}


GLOSSARY = """
| word | also called | what it means | explained in |
| :-- | :-- | :-- | :-- |
| unit | FSDP unit | gathered together | [03](03_fsdp.ipynb) |
"""


@pytest.mark.parametrize(
    "number, text, problems",
    [
        ("02", "Units are gathered.", ["'unit' is explained in 03 and used before, in 'Units are gathered.'"]),
        ("02", "A sub-unit, `unit` in code, [the unit](03_fsdp.ipynb) in a link.\n\n```\nunit = 1\n```", []),
        ("03", "A unit is gathered.", ["'unit' is explained here, says the glossary, and is nowhere in bold"]),
        ("03", "A **unit** is what is gathered together.", []),
    ],
)
def test_a_word_used_too_early_or_not_explained_is_found(number, text, problems):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text)])
    assert glossary_problems(notebook, number, read_glossary(GLOSSARY)) == problems
