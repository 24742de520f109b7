"""Cards of the gallery: five parts, from a live or a kept run; and the notebook has one heading for each."""

import json
from pathlib import Path

import nbformat
import pytest

from fsdp_helpers.teaching.failures import gallery
from fsdp_helpers.teaching.failures.entry import SYMPTOMS
from fsdp_helpers.teaching.failures.gallery import GALLERY, RUN, Seen
from fsdp_helpers.teaching.page import cards

NOTEBOOKS = Path(__file__).parents[3] / "notebooks"
KEPT = json.loads((NOTEBOOKS / "reference/failures.json").read_text())
CELLS = nbformat.read(NOTEBOOKS / "11_when_it_breaks.ipynb", as_version=4).cells
MARKDOWN = [cell.source for cell in CELLS if cell.cell_type == "markdown"]
CODE = "\n".join(cell.source for cell in CELLS if cell.cell_type == "code")
LIVE = [failure.name for failure in RUN if f' = cards.card("{failure.name}")' in CODE]


def test_every_failure_has_its_card_in_the_notebook():
    assert len(LIVE) >= 12
    for failure in GALLERY.values():
        (heading,) = [text for text in MARKDOWN if text.startswith(f"### {failure.name}\n")]
        assert f"**{failure.title}.**" in heading
        if not failure.is_run:
            assert heading == cards.documented(failure)
        elif failure.name not in LIVE:
            assert f'cards.kept_card("{failure.name}")' in CODE and "*A saved run.*" in heading


@pytest.mark.parametrize("name", [failure.name for failure in RUN if failure.name not in LIVE])
def test_a_kept_run_shows_what_its_test_asks_for(name):
    failure, record = gallery.find(name), KEPT[name]
    assert gallery.shows_symptom(failure, cards.seen_from(record["broken"]))
    assert gallery.is_fixed(failure, cards.seen_from(record["fixed"]))


def test_each_symptom_was_there_within_half_a_minute():
    """As kept by `keep_cards` from one run of each on a busy machine; one starts torchrun twice. Nothing here measures."""
    seconds = KEPT["seconds"]
    assert seconds.keys() == {failure.name for failure in RUN}
    assert max(seconds.values()) < 30


def test_the_index_leads_from_what_is_seen_to_every_card():
    text = cards.index().data
    assert all(f"[{name}](#{name})" in text for name in GALLERY)
    assert "| `EADDRINUSE` | [crash-port-in-use](#crash-port-in-use) |" in text
    assert "| `` `FlatParameter` requires uniform `requires_grad` `` | [crash-frozen-flat]" in text
    assert text.index("**By message**") < text.index("**By behavior**") < text.index("**By number**")


def test_each_piece_is_on_the_page_that_a_reader_searches():
    """11 as it is kept, which is also the book's page: the index that its cell shows is that of the tables."""
    (cell,) = [cell for cell in CELLS if cell.id == "index"]
    assert cell.outputs[0].data["text/markdown"] == cards.index().data


def test_what_torchrun_shows_stands_next_to_what_launch_shows(monkeypatch):
    saved = {
        "status": 1,
        "errors": ["[rank0]: RuntimeError: gone"],
        "report": ["Child", "  exitcode  : 1", "  exitcode  : 1"],
    }
    monkeypatch.setattr(cards, "plain_runs", lambda: {"hang-order": saved})
    text = cards.what_you_see(gallery.find("hang-order"), Seen(error="rank 0 was waiting"))
    assert "rank 0 was waiting\n```" in text and "Under plain torchrun (a saved run)" in text
    assert "[rank0]: RuntimeError: gone\nChild\nexitcode  : 1\nexit status 1\n" in text
    assert "torchrun" not in cards.what_you_see(gallery.find("hang-new-group"), Seen(error="rank 0 was waiting"))


def test_the_proof_shows_the_fixed_run_and_not_the_right_numbers():
    text = cards.proof(Seen(numbers=({"images": 5}, {"images": 4})), {"images": 6})
    assert "| fixed, rank 0 | 5 |" in text and "| fixed, rank 1 | 4 |" in text and "| right | 6 |" in text


def test_one_rank_right_of_two_is_not_fixed():
    failure = gallery.find("wrong-sampler-padding")
    right = failure.right()
    assert gallery.is_fixed(failure, Seen(numbers=(right, right)))
    assert not gallery.is_fixed(failure, Seen(numbers=(right, {"images evaluated": 6})))


def test_the_symptoms_in_words():
    assert SYMPTOMS["hang"] == "it hangs" and SYMPTOMS["crash"] == "it crashes"
    assert all(failure.symptom == name.partition("-")[0] for name, failure in GALLERY.items())


def test_a_card_has_the_texts_of_its_own_failure(shown):
    cards.kept_card("slow-many-units")
    failure, text = gallery.find("slow-many-units"), "\n".join(shown)
    assert f"**Why.** {failure.why}" in text and f"**How to tell.** {failure.tell}" in text
    assert f"**The fix.** {failure.fix}" in text


@pytest.fixture
def shown(monkeypatch):
    """What would be displayed, as text."""
    parts = []
    monkeypatch.setattr(cards, "KEPT", NOTEBOOKS / "reference/failures.json")
    monkeypatch.setattr(cards, "display", lambda part: parts.append(getattr(part, "data", repr(part))))
    return parts


@pytest.mark.parametrize(
    "broken, fixed, verdict",
    [
        (Seen(numbers=({"images evaluated": 6},)), Seen(numbers=({"images evaluated": 5},)), True),
        (Seen(numbers=({"images evaluated": 5},)), Seen(numbers=({"images evaluated": 5},)), False),
        (Seen(numbers=({"images evaluated": 6},)), Seen(error="rank 0 of 2 failed"), False),
    ],
)
def test_a_card_has_five_parts_and_says_whether_it_holds(broken, fixed, verdict, shown, monkeypatch):
    monkeypatch.setattr(gallery, "run_broken", lambda failure: broken)
    monkeypatch.setattr(gallery, "run_fixed", lambda failure: fixed)
    assert cards.card("wrong-sampler-padding") is verdict
    text = "\n".join(shown)
    for part in ("**What you see**", "**Why.**", "**How to tell.**", "**The fix.**", "**The proof**"):
        assert part in text
    assert "def count_padded_images" in text and "+mine = range(5)[rank::world_size]" in text


def test_a_kept_card_says_so(shown):
    cards.kept_card("crash-frozen-flat")
    assert "saved run" in shown[0] and "uniform `requires_grad`" in "".join(shown)


def test_words():
    assert cards.as_text(Seen(error="it failed", last_words="what(): no")) == "it failed\nwhat(): no"
    assert cards.as_text(Seen(error="x" * 5000)).endswith("x ...")


def test_the_last_whole_stack_of_the_main_thread():
    other = '(most recent call first):\n  File "/a/threading.py", line 1 in wait\n\nThread 0x1 '
    frames = ["torch/c10d.py", "a/wrap.py", "a/b.py", "a/c.py", "a/process.py"]
    names = ["all_reduce", "wrapper", "f", "g", "run_rank"]
    whole = "(most recent call first):\n" + "".join(
        f'  File "/{path}", line {number} in {name}\n'
        for number, (path, name) in enumerate(zip(frames, names, strict=True))
    )
    cut = whole[: whole.index("line 2")]  # the rank was ended meanwhile
    expected = "all_reduce (c10d.py, line 0), called from f (b.py, line 2), called from g (c.py, line 3)"
    assert cards.shorten_stack(f"{other}{whole}Timeout!\n{other}{cut}") == expected
    with pytest.raises(ValueError, match="no complete stack of a rank's main thread"):
        cards.shorten_stack(other)
