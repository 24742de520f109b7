"""Notebook 12: what its saved runs show, beside the runs of its own environment."""

import pytest
from chapters import Chapter

CELLS = ["parameters", "imports", "set-up", "plain", "runs", "train", "train-two", "train-four", "train-table"]
CELLS += ["fsdp2-ops", "step", "ckpt", "ckpt-table", "spmd"]


@pytest.mark.long
def test_what_its_text_says_beside_its_check(tmp_path_factory):
    with Chapter("12", tmp_path_factory.mktemp("chapter") / "12") as chapter:
        chapter.run_all(CELLS)
        assert chapter.value("fsdp2['ops']") == {"all_gather": 6, "reduce_scatter": 3}, "a unit's tensors together"
        plain, checkpointed = chapter.value("dots")
        assert checkpointed > plain, "matrix products are computed again"
        wrong, plain = chapter.value("[wrong, plain['simple']]")
        assert abs(wrong[0] - plain[0]) < 1e-5 < abs(wrong[1] - plain[1]), "xm's step is right once"
        assert max(chapter.value("saved['differences']").values()) < 1e-6, "the file is the trained network"
        assert chapter.value("beside.largest_difference(spmd['losses'], plain['simple'])") < 1e-5
        assert chapter.value("pieces") < 1e-5, "resumed"
