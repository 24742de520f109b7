"""After Run All, every cell can be run again, or says which cell to run first."""

import re
import time

import pytest
from chapters import NOTEBOOKS, CellError, Chapter, calls, code_cells, makes, read_chapter

SERIES = sorted(path.name[:2] for path in NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
SAYS_WHAT_TO_RUN = re.compile(r"\brun the .*(cell|above)")
SLOW_S, NUM_CELLS = 6.0, 12
# Cells of 06 that go wrong if others have closed ranks or taken their names, in the order of the chapter.
BEFORE = [
    "cell-02",
    "cell-03",
    "cell-04",
    "live-ranks",
    "live-model",
    "live-loop",
    "live-save",
    "live-load",
    "hasty-ranks",
]


def run_again(chapter: Chapter, cell_ids: list[str]) -> dict[str, str]:
    """What goes wrong, by cell."""
    wrong = {}
    for cell_id in cell_ids:
        try:
            chapter.run(cell_id)
        except CellError as error:
            if not SAYS_WHAT_TO_RUN.search(f"{error.message}\n{error.traceback}"):
                wrong[cell_id] = f"{error.kind}: {error.message[-500:]}"
    return wrong


@pytest.mark.parametrize("number", SERIES)
def test_no_check_closes_or_deletes_what_cells_above_it_need(number):
    cells = code_cells([cell for cell in read_chapter(number).cells if "\nassert " in f"\n{cell.source}"])
    assert [call.func.value.id for call in calls(cells) if makes(call, "close") or makes(call, "cleanup")] == []


def test_cells_of_06_run_again_after_other_ranks_are_closed(tmp_path_factory):
    with Chapter("06", tmp_path_factory.mktemp("06") / "notebooks") as chapter:
        chapter.run_all(BEFORE)
        chapter.execute("hasty.close()")
        assert run_again(chapter, ["live-load", "live-save", "live-load", "accident-1", "live-ranks"]) == {}
        assert run_again(chapter, ["live-load"]) == {}
        with pytest.raises(CellError, match="These ranks are new: run the `%%ranks` cells above this one again"):
            chapter.run("live-load")
        assert run_again(chapter, ["live-model", "live-loop", "live-save", "live-load"]) == {}


@pytest.mark.long
@pytest.mark.parametrize("number", SERIES)
def test_a_dozen_cells_run_again_after_a_whole_run_from_the_last_to_the_first(number, tmp_path_factory):
    with Chapter(number, tmp_path_factory.mktemp(number) / "notebooks") as chapter:
        quick, failed = [], {}
        for cell_id, cell in chapter.cells.items():
            tags, began_s = cell.metadata.get("tags", []), time.monotonic()
            failed |= {} if "raises-exception" in tags else run_again(chapter, [cell_id])
            if "exercise" not in tags and time.monotonic() - began_s < SLOW_S:
                quick.append(cell_id)
        assert failed == {}
        step = max(1, len(quick) // NUM_CELLS)
        expected = [
            cell_id for cell_id in quick if "raises-exception" not in chapter.cells[cell_id].metadata.get("tags", [])
        ]
        assert run_again(chapter, expected[::-step][:NUM_CELLS]) == {}
