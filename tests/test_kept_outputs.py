"""Kept outputs are tied to the code that they come from, and only a run of the whole notebook ties them."""

import json

import nbformat
import pytest

from fsdp_helpers.lab import run_notebooks, sources

MODULES = {
    "__init__": '"""A package."""\n_HOMES = {"launch": "ranks.launching.launch"}',
    "__main__": "print('the command line')",
    "ranks/launching/launch": "from fsdp_helpers.quantities import MB\n\n\ndef launch():\n    '''Start ranks.'''\n    return MB  # bytes",
    "quantities": "MB = 10**6",
    "planning": "MB = 2**20",
}
CELLS = [
    "from fsdp_helpers import launch\nimport torch",
    'print(launch())\nopen("take_home/ddp.py")',
    "%%writefile x.py\n# x",
]


@pytest.fixture
def project(tmp_path):
    for name, text in MODULES.items():
        path = tmp_path / "fsdp_helpers" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "notebooks" / "take_home").mkdir(parents=True)
    (tmp_path / "notebooks" / "take_home" / "ddp.py").write_text("import torch")
    yield tmp_path
    clear_caches()


def clear_caches() -> None:
    for function in (sources.imports_of, sources.handed_out, sources.module_tree, sources.module_alone):
        function.cache_clear()


def notebook_of(*cells: str):
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])


def change(project, name: str, before: str, after: str) -> None:
    path = project / name
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    clear_caches()


def kept(project, *cells: str):
    """A notebook that was just run."""
    notebook = notebook_of(*cells)
    notebook.metadata[sources.KEY] = sources.digests(notebook, project)
    return notebook


@pytest.mark.parametrize(
    "name, before, after, is_outdated",
    [
        ("fsdp_helpers/ranks/launching/launch.py", "return MB", "return 2 * MB", True),
        ("fsdp_helpers/quantities.py", "10**6", "2**20", True),  # behind it
        ("fsdp_helpers/planning.py", "2**20", "10**6", False),  # neither imports it
        ("fsdp_helpers/__main__.py", "the", "a", False),  # nor runs it
        ("notebooks/take_home/ddp.py", "import torch", "import numpy", True),  # the cells name it
        ("fsdp_helpers/ranks/launching/launch.py", "# bytes", "# of a rank", False),
        ("fsdp_helpers/ranks/launching/launch.py", "Start ranks.", "Start the ranks.", False),
        ("fsdp_helpers/ranks/launching/launch.py", "\n\n\ndef", "\n\n\n\ndef", False),
    ],
)
def test_what_outdates_kept_outputs(project, name, before, after, is_outdated):
    notebook = kept(project, *CELLS)
    assert sources.outdated(notebook, project) == []
    change(project, name, before, after)
    assert sources.outdated(notebook, project) == ["the code that they call"] * is_outdated


@pytest.mark.parametrize(
    "cell, is_outdated",
    [
        ('print(launch(), 2)\nopen("take_home/ddp.py")', True),
        ('print(launch())  # one per rank\n\nopen("take_home/ddp.py")', False),
    ],
)
def test_a_changed_cell(project, cell, is_outdated):
    notebook = kept(project, *CELLS)
    notebook.cells[1].source = cell
    assert sources.outdated(notebook, project) == ["its code cells"] * is_outdated


def test_a_file_that_a_cell_writes_counts_word_for_word(project):
    notebook = kept(project, *CELLS)
    notebook.cells[2].source += "y"
    assert sources.outdated(notebook, project) == ["its code cells"]


@pytest.mark.parametrize(
    "before, after", [("Start ranks.", "Start the ranks."), ("# bytes", "# of a rank"), ("\n\n\ndef", "\n\n\n\ndef")]
)
def test_what_is_shown_counts_word_for_word(project, before, after):
    """The page shows the docstring, the comment, and the number of the line."""
    notebook = kept(project, *CELLS, "show.source(launch)")
    change(project, "fsdp_helpers/ranks/launching/launch.py", before, after)
    assert sources.outdated(notebook, project) == ["the code that they call"]


def test_the_command_line_counts_where_a_cell_runs_it(project):
    notebook = kept(project, 'run([sys.executable, "-m", "fsdp_helpers", "train"])')
    change(project, "fsdp_helpers/__main__.py", "the", "a")
    assert sources.outdated(notebook, project) == ["the code that they call"]


def test_a_notebook_that_was_never_run_is_outdated(project):
    assert sources.outdated(notebook_of(*CELLS), project) == ["its code cells", "the code that they call"]


# ---------------------------------------------------------------- the run that keeps them


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A notebook beside which its cells find a file."""
    (tmp_path / "beside.txt").write_text("beside")
    monkeypatch.setattr(run_notebooks, "FOLDER", tmp_path)
    notebook = notebook_of("print(open('beside.txt').read())", "1 + 1")
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.cells[0].metadata["execution"] = {"iopub.status.busy": "2026-01-01T00:00:00.000000Z"}
    nbformat.write(notebook, tmp_path / "03_small.ipynb")
    return tmp_path / "03_small.ipynb"


def test_a_run_keeps_outputs_and_ties_them(path):
    run_notebooks.run(path)
    notebook = nbformat.read(path, as_version=4)
    assert [cell.execution_count for cell in notebook.cells] == [1, 2]
    assert [cell.metadata for cell in notebook.cells] == [{}, {}], "no times, which change with every run"
    assert notebook.cells[0].outputs[0].text == "beside\n"
    assert sources.outdated(notebook) == []
    text = path.read_text()
    assert text == json.dumps(json.loads(text), indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def test_a_run_that_fails_leaves_the_file_alone(path, capsys, monkeypatch):
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[1].source = "1 / 0"
    nbformat.write(notebook, path)
    before = path.read_bytes()
    monkeypatch.setattr("sys.argv", ["run_notebooks.py", "03"])
    assert run_notebooks.main() == 1
    assert path.read_bytes() == before
    assert "03_small.ipynb is left as it was" in capsys.readouterr().err


def test_a_notebook_that_is_not_there(path):
    with pytest.raises(SystemExit, match="no notebook '04'; there are 03_small"):
        run_notebooks.chosen(["03", "04"])
    assert run_notebooks.chosen(["03"]) == run_notebooks.chosen([]) == [path]
