"""Notebook 11: each failure fails as its cell is and passes with its folded fix; its lines are those of its script."""

import ast
import re

import pytest
from chapters import CellError, Chapter, fenced, read_chapter

from fsdp_helpers.field_guide import cards
from fsdp_helpers.teaching.exercises.notebook_11 import SHOWN

CELLS = {cell.id: cell for cell in read_chapter("11").cells}
FAILURES = [name for name in CELLS if f"{name}-fix" in CELLS]
# How the last line of a cell's set-up begins, and that of its script's; between it and the assertion, both are the same.
SET_UP = {
    "hang-uneven-batches": ("model = shard(build())", "    fully_shard(module"),
    "hang-local-decision": ("losses = ", "right = "),
    "wrong-forgotten-root": ("model, alone = ", "alone, images = "),
    "wrong-summed-loss": ("model, alone = ", "fully_shard(model"),
    "wrong-sampler-padding": ("from torch.utils.data", "rank, world_size = "),
    "hang-order": ("from small_job", "impatient = "),
    "crash-skipped-step": ("model = shard(build())", "    fully_shard(module"),
    "memory-root-only": ("all_bytes = ", "all_bytes, unsharded = "),
    "slow-many-units": ("model = ", "model, images = "),
    "crash-mixed-tensor-dtensor": ("model, right = ", "right = "),
}
DIFFERENT = {  # a chapter has eight images, of which that cell takes five; only a script has a group with a short limit
    "images[:5]": "images",
    ", group=impatient": "",
}


@pytest.fixture(scope="module")
def chapter(tmp_path_factory):
    with Chapter("11", tmp_path_factory.mktemp("11") / "notebooks") as chapter:
        chapter.run_all(chapter.set_up_cells())
        yield chapter


def fix_of(name: str) -> dict[str, tuple[str, str]]:
    """The change that the folded diff below a cell makes to it."""
    lines = fenced(CELLS[f"{name}-fix"], "diff")
    before, after = ("\n".join(line[1:] for line in lines if line[0] != other) for other in "+-")
    return {name: (before, after)}


def fixed(name: str) -> str:
    before, after = fix_of(name)[name]
    return CELLS[name].source.replace(before, after)


def middle(code: str, set_up: str) -> str:
    """A program's statements between its set-up and the assertion at its end."""
    (start,) = re.findall(rf"^{re.escape(set_up)}.*\n", code, re.MULTILINE)
    statements = [ast.unparse(node) for node in ast.parse(code.partition(start)[2]).body]
    is_proof = [text.startswith(("assert", "torch.testing.assert_close")) for text in statements]
    return "\n".join(statements[: is_proof.index(True)])


def test_ten_failures_are_in_cells_and_each_is_one_of_the_guide():
    assert FAILURES == list(SET_UP) and {*FAILURES} <= {*SHOWN} <= cards().keys()


@pytest.mark.parametrize("name", FAILURES)
def test_the_cell_fails_as_it_is(chapter, name):
    with pytest.raises(CellError) as failed:
        chapter.run(name)
    assert failed.value.kind in ("RankError", "RankTimeout"), failed.value.traceback


@pytest.mark.parametrize("name", FAILURES)
def test_the_cell_passes_with_its_fix(chapter, name):
    chapter.run(name, fix_of(name))


@pytest.mark.parametrize("name", FAILURES)
def test_its_lines_are_those_of_its_script(name):
    of_cell, of_script = SET_UP[name]
    for cell, script in (
        (CELLS[name].source, cards()[name].script(broken=True)),
        (fixed(name), cards()[name].script(fixed=True)),
    ):
        assert alike(middle(cell, of_cell)) == alike(middle(script, of_script))


def alike(code: str) -> str:
    """A cell's or a script's code, without what may differ."""
    for words, instead in DIFFERENT.items():
        code = code.replace(words, instead)
    return code
