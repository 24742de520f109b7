"""Notebook 06: a changed line of its cells changes what the text says."""

import pytest
from chapters import CellError, Chapter

LIVE = ["live-ranks", "live-model", "live-loop", "live-save", "live-load"]


@pytest.fixture(scope="module")
def chapter(tmp_path_factory):
    with Chapter("06", tmp_path_factory.mktemp("06") / "notebooks") as chapter:
        chapter.run_all(["cell-02", "cell-03", "cell-04", *LIVE])
        yield chapter


def failure(chapter, cell_id, changes) -> str:
    with pytest.raises(CellError) as failed:
        chapter.run(cell_id, changes)
    return failed.value.message


def test_loading_is_exact_only_with_every_line(chapter):
    assert chapter.value("ranks['resumed_losses'] == ranks['undisturbed']") is True
    put_back = (
        'set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])\n'
    )
    for line in ('dcp.load(state, checkpoint_id=f"{live_folder}/first")\n', put_back):
        chapter.run("live-load", {"live-load": (line, "")})
        assert chapter.value("ranks['resumed_losses'] == ranks['undisturbed']") is False
    chapter.run("live-load")
    assert chapter.value("ranks['resumed_losses'] == ranks['undisturbed']") is True


def test_what_was_not_saved_does_not_load(chapter):
    everything = '{"model": model_state, "optimizer": optimizer_state}'
    chapter.run("live-save", {"live-save": (everything, '{"model": model_state}')})
    assert "Missing key in checkpoint state_dict: optimizer." in failure(chapter, "live-load", {})
    chapter.run_all(["live-save", "live-load"])


def test_gathering_gives_rank_0_everything(chapter):
    total = "[len(shards) for shards in ranks['full']]"
    chapter.run("live-full")
    assert chapter.value(total) == [8, 0]
    chapter.run("live-full", {"live-full": ("full_state_dict=True, cpu_offload=True", "cpu_offload=True")})
    assert chapter.value(total) == [8, 8]  # each rank its shards
    chapter.run("live-full")


def test_a_background_save_has_the_state_of_the_call(chapter):
    chapter.run("app-state")
    chapter.run("live-async")
    assert chapter.value("ranks['in_background']") == [True, True]
    line = 'dcp.load({"training": AppState(model, optimizer)}, checkpoint_id=f"{live_folder}/background")\n'
    chapter.run("live-async", {"live-async": (line, "")})  # two steps later
    assert chapter.value("ranks['in_background']") == [False, False]


def test_a_parameter_without_a_gradient_so_far_needs_the_index(chapter):
    """Five lines refuse its checkpoint; the listing below them, which asks the index, loads it."""
    no_gradient = ("optimizer.step()\n", "model.fc2.bias.grad = None\n        optimizer.step()\n")
    chapter.run_all(["live-loop", "live-save"], {"live-loop": no_gradient})
    assert "Missing key in checkpoint state_dict: optimizer." in failure(chapter, "live-load", {})
    chapter.execute(
        "%%ranks\nfrom fsdp_helpers.teaching.lessons.saving_and_resuming import load_shards\n"
        'model, optimizer = build(seed=1)\nload_shards(f"{live_folder}/first", model, optimizer)\n'
        "resumed_losses = train_steps(model, optimizer, range(3, 6))"
    )
    assert chapter.value("ranks['resumed_losses'] == ranks['undisturbed']") is True
    chapter.run_all(["live-loop", "live-save", "live-load"])


def test_a_step_that_nobody_took_changes_the_losses(chapter):
    chapter.run("accident-4")
    as_it_is, ahead, cleared = chapter.value("list(ranks['counted'][0].values())")
    assert as_it_is == cleared and as_it_is[0] == ahead[0] and all(map(float.__ne__, as_it_is[1:], ahead[1:]))
    chapter.run("accident-4", {"accident-4": ("        optimizer.state.clear()\n", "        pass\n")})
    as_it_is, ahead, kept = chapter.value("list(ranks['counted'][0].values())")
    assert kept == ahead != as_it_is


def test_a_plain_state_dict_loses_the_moments(chapter):
    chapter.run("live-load")
    chapter.run("accident-3")
    assert chapter.value("[ranks['saved_for'], ranks['loaded_for']]") == [[8, 8], [0, 0]]
    chapter.run("live-load")


@pytest.mark.long
def test_cells_run_twice_show_the_same(chapter):
    ids = [cell_id for cell_id in chapter.ranks_cells() if cell_id != "accident-1"]
    shown = {cell_id: (chapter.run(cell_id), chapter.run(cell_id)) for cell_id in ids}
    assert {cell_id: both for cell_id, both in shown.items() if both[0] != both[1]} == {}
    assert len(shown) == 9


@pytest.mark.long
def test_the_accident_is_the_same_again_and_says_that_its_ranks_are_new(chapter):
    try:
        for _ in range(2):
            chapter.run("hasty-ranks")
            told = failure(chapter, "accident-1", {})
            assert "Timed out waiting 3000ms" in told or "Connection closed by peer" in told
            assert "The ranks were restarted, and their variables are gone: run the `%%ranks` cells above" in told
    finally:
        chapter.execute("hasty.close()")


def test_without_a_save_there_is_nothing_to_load(chapter):
    everything = '{"model": model_state, "optimizer": optimizer_state}'
    line = f'dcp.save({everything}, checkpoint_id=emptied("first"))\n'
    chapter.run("live-save", {"live-save": (line, 'emptied("first")\n')})
    failure(chapter, "live-load", {})
    chapter.run_all(["live-save", "live-load", "app-state"])
    line = 'saving = dcp.async_save(app, checkpoint_id=emptied("background"), process_group=writers)\n'
    source = chapter.source("live-async", {"live-async": (line, 'emptied("background")\n')})
    without = source.replace("saving.result()", "")
    assert without != source
    with pytest.raises(CellError):
        chapter.execute(without)
    chapter.run("live-async")
    assert chapter.value("ranks['in_background']") == [True, True]
