"""Notebook 01: a changed line of its loop changes what the text says of losses and bytes."""

import pytest
from chapters import CellError, Chapter

P = 1_199_882
ZERO_GRAD, BACKWARD, STEP = "    optimizer.zero_grad()\n", "    loss.backward()\n", "    optimizer.step()\n"


@pytest.fixture(scope="module")
def chapter(tmp_path_factory):
    with Chapter("01", tmp_path_factory.mktemp("01") / "notebooks") as chapter:
        chapter.shrink("cell-02", ("TRAIN_IMAGES = 5_120", "TRAIN_IMAGES = 384"))
        chapter.shrink("cell-11", ("global_batch_size=256", "global_batch_size=128"))  # three steps
        chapter.run_all(["cell-02", "cell-03", "set-up-device", "cell-06"])
        yield chapter


def losses(chapter, *changes) -> list[float]:
    source = chapter.source("cell-11")
    for before, after in changes:
        assert source.count(before) == 1
        source = source.replace(before, after)
    chapter.execute(source)
    return chapter.value("losses")


def test_each_line_of_the_loop_matters(chapter):
    right = losses(chapter)
    assert right == losses(chapter), "the cell again"
    assert right[0] > 2.2 and right[-1] < right[0] - 0.15
    assert max(abs(one - other) for one, other in zip(right, losses(chapter, (ZERO_GRAD, "")), strict=True)) > 1e-2
    assert all(loss > 2.2 for loss in losses(chapter, (STEP, "")))
    assert all(loss > 2.2 for loss in losses(chapter, (BACKWARD, "")))
    with pytest.raises(CellError, match="'NoneType' object has no attribute 'nbytes'"):
        chapter.run("count-bytes")  # no backward, no gradients


def test_adam_keeps_two_moments_and_sgd_none(chapter):
    losses(chapter)
    chapter.run("count-bytes")
    assert chapter.value("list(kept.values())") == [4 * P] * 4
    adam = "torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)"
    losses(chapter, (adam, "torch.optim.SGD(model.parameters(), lr=0.05)"))
    with pytest.raises(CellError, match="exp_avg"):
        chapter.run("count-bytes")
    losses(chapter)
    chapter.run("profiled")
    assert 16 * P <= chapter.value("curve[-1]") < 16.0016 * P
    chapter.run("profiled", {"profiled": (adam, "torch.optim.SGD(model.parameters(), lr=0.05)")})
    assert 8 * P <= chapter.value("curve[-1]") < 8.0016 * P


def test_the_recorded_run_takes_the_steps_of_the_loop(chapter):
    losses = chapter.value("losses") if chapter.run("cell-11") else []
    settings = "global_batch_size=128, max_steps=3, train_images=TRAIN_IMAGES, test_images=100"
    chapter.execute(f"recorded = train(TrainConfig(model='shallow', {settings}), world_size=1, device=DEVICE)")
    assert chapter.value("recorded.step_losses") == pytest.approx(losses, abs=1e-3), "sums in a different order"


def test_the_batch_sets_the_peak(chapter):
    losses(chapter)
    chapter.run("profiled")
    peak = chapter.value("max(curve)")
    chapter.run(
        "profiled",
        {"profiled": ("F.cross_entropy(model(images), labels)", "F.cross_entropy(model(images[:32]), labels[:32])")},
    )
    assert chapter.value("max(curve)") < 0.7 * peak and chapter.value("curve[-1]") < 16.0016 * P
    with pytest.raises(CellError):
        chapter.run("profiled", {"profiled": ("profile(profile_memory=True)", "profile()")})  # no memory is seen
