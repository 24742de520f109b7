"""Notebook 12: what its saved runs show, beside the runs of its own environment."""

import pytest
from chapters import Chapter

CELLS = ["parameters", "imports", "set-up", "plain", "runs", "train", "train-two", "train-four", "train-table"]
CELLS += ["fsdp2-ops", "step", "ckpt", "ckpt-table", "spmd"]


@pytest.fixture(scope="module")
def chapter(tmp_path_factory):
    with Chapter("12", tmp_path_factory.mktemp("chapter") / "12") as chapter:
        chapter.run_all(CELLS)
        yield chapter


@pytest.mark.long
def test_fsdp2_gathers_a_units_tensors_together(chapter):
    assert chapter.value("fsdp2['ops']") == {"all_gather": 6, "reduce_scatter": 3}


@pytest.mark.long
def test_checkpointing_computes_matrix_products_again(chapter):
    plain, checkpointed = chapter.value("dots")
    assert checkpointed > plain


@pytest.mark.long
def test_xms_step_is_right_once_and_wrong_from_then_on(chapter):
    wrong, plain = chapter.value("[wrong, plain['simple']]")
    assert abs(wrong[0] - plain[0]) < 1e-5 < abs(wrong[1] - plain[1])


@pytest.mark.long
def test_the_consolidated_file_is_the_trained_network(chapter):
    assert max(chapter.value("saved['differences']").values()) < 1e-6


@pytest.mark.long
def test_resumed_and_in_spmd_it_is_the_same_training(chapter):
    assert chapter.value("beside.largest_difference(spmd['losses'], plain['simple'])") < 1e-5
    assert chapter.value("pieces") < 1e-5
