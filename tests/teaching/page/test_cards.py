"""Cards of the gallery: five parts, from a live or a saved run; and the notebook has one for each."""

import re

import nbformat
import pytest

from fsdp_helpers.teaching.failures import gallery, plain
from fsdp_helpers.teaching.failures.entry import SYMPTOMS
from fsdp_helpers.teaching.failures.gallery import GALLERY, RUN, Seen
from fsdp_helpers.teaching.page import cards, keep_cards

NOTEBOOK = nbformat.read(keep_cards.NOTEBOOK, as_version=4)
CELLS = {cell.id: cell for cell in NOTEBOOK.cells}
LIVE = [failure.name for failure in RUN if keep_cards.is_live(NOTEBOOK, failure)]


@pytest.mark.parametrize("name", GALLERY)
def test_every_failure_has_its_card_in_the_notebook(name):
    """As `python -m fsdp_helpers.teaching.page.keep_cards` writes it, which keeps the saved runs."""
    card = CELLS[name].source
    assert card == keep_cards.written(gallery.find(name), card, runs=False, live=name in LIVE)


@pytest.mark.parametrize("failure", [failure for failure in RUN if failure.name not in LIVE], ids=lambda it: it.name)
def test_a_saved_run_shows_what_its_test_asks_for(failure):
    seen, proven = keep_cards.saved_run(CELLS[failure.name].source)
    (_, *names), _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in proven.splitlines()]
    fixed = [dict(zip(names, map(float, numbers), strict=True)) for _, *numbers in rows[:-1]]
    assert len(fixed) == gallery.NUM_RANKS and gallery.is_fixed(failure, Seen(numbers=fixed))
    ranks = re.findall(r"^rank \d+: (.*)$", seen, re.MULTILINE)
    broken = [{name: float(re.search(rf"{re.escape(name)} ([^,]+)", rank)[1]) for name in names} for rank in ranks]
    assert gallery.shows_symptom(failure, Seen(error=seen) if failure.says else Seen(numbers=broken))


def test_a_live_card_has_torchruns_output_above_it():
    assert len(LIVE) >= 12
    for name in LIVE:
        failure = gallery.find(name)
        assert ("exit status 1" in CELLS[name].source) == bool(failure.says or name in plain.SCRIPTS), name


def test_a_new_card_goes_to_the_end_of_its_section(monkeypatch, tmp_path):
    path, failure = tmp_path / "notebook.ipynb", gallery.find("crash-container")
    cells = [nbformat.v4.new_code_cell("cards.index()", id="index")]
    cells += [nbformat.v4.new_markdown_cell(f"## {words}", id=f"section-{name}") for name, words in SYMPTOMS.items()]
    cells[0].outputs = [nbformat.v4.new_output("display_data", {"text/markdown": "old"})]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    monkeypatch.setattr(gallery, "GALLERY", {failure.name: failure})
    runs = [Seen(error="containers that do not implement forward"), Seen(numbers=(failure.right(),) * 2)]
    monkeypatch.setattr(gallery, "run", lambda *worker: runs.pop(0))
    monkeypatch.setattr(plain, "run_plainly", lambda name: {"status": 1, "errors": ["it failed"], "report": []})
    for _ in range(2):  # the second time, nothing runs
        keep_cards.main([], path)
    written = nbformat.read(path, as_version=4).cells
    ids = [cell.id for cell in written]
    assert ids.index("crash-container") == ids.index("section-memory") - 1 and len(ids) == len(cells) + 1
    assert "[crash-container](#crash-container)" in written[0].outputs[0].data["text/markdown"]
    parts = ["*A saved run.*", "def shard_the_list", "implement forward\n```", "it failed\nexit status 1", "**Why.**"]
    parts += ["**How to tell.**", "**The fix.**", "\n+for block in model.blocks:", "**The proof**", "| right |"]
    card = written[ids.index("crash-container")].source
    assert sorted(parts, key=card.index) == parts


def test_a_run_that_does_not_fit_its_card_is_not_saved(monkeypatch):
    failure = gallery.find("crash-container")
    monkeypatch.setattr(gallery, "run", lambda *worker: Seen(numbers=(failure.right(),) * 2))
    with pytest.raises(ValueError, match="crash-container: its runs don't match its card"):
        keep_cards.new_run(failure)
    runs = [Seen(error="containers that do not implement forward"), Seen(numbers=(failure.right(),) * 2)]
    monkeypatch.setattr(gallery, "run", lambda *worker: runs.pop(0))
    monkeypatch.setattr(keep_cards, "MOST_S", -1.0)
    with pytest.raises(ValueError, match="crash-container: it took 0 s to show its symptom"):
        keep_cards.new_run(failure)


def test_the_index_leads_from_what_is_seen_to_every_card():
    """And the one that is kept in the notebook, which is also the book's page, is that of the tables."""
    text = cards.index().data
    assert all(f"[{name}](#{name})" in text for name in GALLERY)
    assert "| `EADDRINUSE` | [crash-port-in-use](#crash-port-in-use) |" in text
    assert "| `` `FlatParameter` requires uniform `requires_grad` `` | [crash-frozen-flat]" in text
    assert CELLS["index"].outputs[0].data["text/markdown"] == text
    assert SYMPTOMS["hang"] == "it hangs" and SYMPTOMS["crash"] == "it crashes"


def test_the_proof_shows_the_fixed_run_and_not_the_right_numbers():
    text = cards.proof(Seen(numbers=({"images": 5}, {"images": 4})), {"images": 6})
    assert "| fixed, rank 0 | 5 |" in text and "| fixed, rank 1 | 4 |" in text and "| right | 6 |" in text


def evaluated(*images: int) -> tuple[dict[str, int], ...]:
    return tuple({"images evaluated": number} for number in images)


@pytest.mark.parametrize(
    "broken, fixed, verdict",
    [
        ((6, 6), Seen(numbers=evaluated(5, 5)), True),
        ((5, 5), Seen(numbers=evaluated(5, 5)), False),  # the symptom isn't there
        ((6, 6), Seen(error="rank 0 of 2 failed"), False),
        ((6, 6), Seen(numbers=evaluated(5, 6)), False),  # one rank of two is fixed
    ],
)
def test_a_card_has_five_parts_and_says_whether_it_holds(broken, fixed, verdict, monkeypatch):
    shown = []
    monkeypatch.setattr(cards, "display", lambda part: shown.append(getattr(part, "data", repr(part))))
    monkeypatch.setattr(gallery, "run_broken", lambda failure: Seen(numbers=evaluated(*broken)))
    monkeypatch.setattr(gallery, "run_fixed", lambda failure: fixed)
    assert cards.card("wrong-sampler-padding") is verdict
    text = "\n".join(shown)
    for part in ("**What you see**", "**Why.**", "**How to tell.**", "**The fix.**", "**The proof**"):
        assert part in text
    assert "def count_padded_images" in text and "+mine = range(5)[rank::world_size]" in text


def test_the_last_whole_stack_of_the_main_thread():
    other = '(most recent call first):\n  File "/a/threading.py", line 1 in wait\n\nThread 0x1 '
    frames = {"torch/c10d.py": "all_reduce", "a/wrap.py": "wrapper", "a/b.py": "f", "a/process.py": "run_rank"}
    lines = [f'  File "/{path}", line 7 in {name}\n' for path, name in frames.items()]
    whole, cut = ("(most recent call first):\n" + "".join(part) for part in (lines, lines[:2]))
    expected = "all_reduce (c10d.py, line 7), called from f (b.py, line 7), called from run_rank (process.py, line 7)"
    assert cards.shorten_stack(f"{other}{whole}Timeout!\n{other}{cut}") == expected  # the rank was ended meanwhile
    with pytest.raises(ValueError, match="no complete stack of a rank's main thread"):
        cards.shorten_stack(other)
