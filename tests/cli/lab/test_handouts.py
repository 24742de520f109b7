"""The pages to print: complete without a network, and without the answers."""

import copy

import nbformat
import pytest
from bs4 import BeautifulSoup
from leftovers import PROJECT
from reading_pages import broken_links, loaded_files

from fsdp_helpers.cli.lab import handouts

NOTEBOOKS = PROJECT / "notebooks"
EXERCISE = """## Exercises

### Exercise 1 · Halve it

Write half of `n`.

<details><summary>Hint</summary>What is twice the answer?</details>
<details><summary>Solution</summary>

```python
return n // 2
```

</details>"""
NOT_YET = nbformat.v4.new_output("error", ename="NotYet", evalue="the answer is still ...", traceback=["Not yet"])


@pytest.fixture(scope="module")
def fsdp():
    return nbformat.read(NOTEBOOKS / "03_fsdp.ipynb", as_version=4)


def text_of(page: str) -> str:
    return " ".join(BeautifulSoup(page, "html.parser").body.get_text().split())


def small_notebook() -> nbformat.NotebookNode:
    attempt = nbformat.v4.new_code_cell("answer = ...", metadata={"tags": ["exercise"]}, outputs=[NOT_YET])
    printing = nbformat.v4.new_code_cell("print(n / 2)", outputs=[nbformat.v4.new_output("stream", text="it is 0.5")])
    last = nbformat.v4.new_markdown_cell("## What you can now explain\n\nA half is a half.")
    title = nbformat.v4.new_markdown_cell("# 20 · Halves")
    return nbformat.v4.new_notebook(cells=[title, printing, *exercise(), attempt, last])


def exercise() -> list[nbformat.NotebookNode]:
    return [nbformat.v4.new_markdown_cell(EXERCISE)]


def test_a_handout_has_the_hints_at_its_end_and_no_answer():
    told = text_of(handouts.handout(small_notebook(), solutions=False))
    assert "Write half of n." in told and "answer = ..." in told and "it is 0.5" in told
    assert told.index("A half is a half.") < told.index("Hints") < told.index("What is twice the answer?")
    assert "Exercise 1 · Halve it · Hint." in told
    assert "n // 2" not in told and "Not yet" not in told


def test_solutions_come_after_the_hints():
    told = text_of(handouts.handout(small_notebook(), solutions=True))
    assert told.index("What is twice the answer?") < told.index("Solutions") < told.index("n // 2")


def test_a_chapter_on_paper_asks_no_other_machine_and_shows_every_figure(fsdp):
    page = handouts.handout(copy.deepcopy(fsdp), solutions=False)
    assert loaded_files(page) == []
    pictures = [one for cell in fsdp.cells for one in cell.get("outputs", []) if "image/png" in one.get("data", {})]
    shown = BeautifulSoup(page, "html.parser").find_all("img")
    assert len(shown) >= len(pictures) >= 3  # and the moving ones, which are HTML
    assert all(len(image["alt"]) > 10 for image in shown)


def test_handouts_lead_to_each_other_and_to_the_glossary(tmp_path):
    paths = [NOTEBOOKS / name for name in ("00_start_here.ipynb", "01_local_training.ipynb")]
    written = list(handouts.write_handouts(paths, tmp_path, solutions=False))
    assert [path.name for path in written] == ["00_start_here.html", "01_local_training.html", "GLOSSARY.html"]
    assert 'href="01_local_training.html"' in written[0].read_text()
    assert 'href="GLOSSARY.html"' in written[1].read_text()
    assert broken_links(tmp_path) == []  # 02, which was not printed, is not linked
