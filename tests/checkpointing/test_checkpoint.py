"""`save` and `load` for anybody's loop: any model, any optimizer, any strategy, and plain state besides."""

import json
import os
import re
import warnings
from dataclasses import replace

import checkpoint_workers as workers
import pytest
import torch
from leftovers import PROJECT
from runs import mostly_long
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR

from fsdp_helpers import load, save
from fsdp_helpers.checkpointing import checkpoint
from fsdp_helpers.checkpointing.consolidate import consolidate
from fsdp_helpers.checkpointing.folder import CheckpointError, begin, checkpoint_name, read_checkpoint
from fsdp_helpers.checkpointing.shard_index import read_index
from fsdp_helpers.checkpointing.training_state import random_state, read_state, save_full
from fsdp_helpers.ranks.launch import launch

OPTIMIZERS = {
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    "two groups": lambda model: torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1:].parameters(), "weight_decay": 0.5}]
    ),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    "a rate that is a tensor": lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01)),
    "counting in Python": lambda model: workers.CountingSGD(model.parameters(), lr=0.01),
}


def built(seed, optimizer="adam"):
    """A model, its optimizer, and a schedule whose state has a Counter with keys of int."""
    torch.manual_seed(seed)
    model = workers.small_model()
    optimizer = OPTIMIZERS[optimizer](model)
    return model, optimizer, MultiStepLR(optimizer, milestones=[1, 3], gamma=0.1)


def step(model, optimizer, schedule, count=1):
    for _ in range(count):
        workers.noise_step(model, optimizer)
        schedule.step()


def content(model, optimizer, schedule):
    """Everything that has to be equal, to the last bit, dropout masks to come included."""
    groups = [{key: kept for key, kept in group.items() if key != "params"} for group in optimizer.param_groups]
    state = optimizer.state_dict()["state"], groups, schedule.state_dict()
    return [*model.state_dict().values()], state, torch.get_rng_state()


def equal(found, expected) -> bool:
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(equal(found[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return type(found) is type(expected) and len(found) == len(expected) and all(map(equal, found, expected))
    return found == expected


# ---------------------------------------------------------------- a loop of one process


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_scheduled_run_goes_on_as_it_was(optimizer, tmp_path):
    run = built(1, optimizer)
    step(*run, count=2)
    save(tmp_path / "two", *run[:2], extra={"schedule": run[2].state_dict(), "step": 2})
    at_two = [float(group["lr"]) for group in run[1].param_groups]
    step(*run, count=3)

    again = built(2, optimizer)
    assert not equal(content(*again), content(*run))
    extra = load(tmp_path / "two", *again[:2])
    assert [float(group["lr"]) for group in again[1].param_groups] == at_two
    assert extra["step"] == 2
    again[2].load_state_dict(extra["schedule"])
    step(*again, count=3)
    assert equal(content(*again), content(*run))


def test_saving_changes_nothing_even_before_the_first_step(tmp_path):
    run, saved = built(1), built(1)
    save(tmp_path / "none", *saved[:2])
    assert not saved[1].state
    torch.manual_seed(5)
    step(*run, count=2)
    torch.manual_seed(5)
    step(*saved, count=2)
    assert equal(content(*saved), content(*run))

    resumed = built(2)
    load(tmp_path / "none", *resumed[:2])
    torch.manual_seed(5)
    step(*resumed, count=2)
    assert equal(content(*resumed), content(*run))


def test_a_new_optimizer_stays_new_whatever_is_read_and_whatever_fails(tmp_path):
    """torch makes Adam's moments with a step that it counts: who trained on would be one bias correction ahead."""
    model, optimizer, _ = built(1)
    assert read_state(model, optimizer).optimizer == {} == dict(optimizer.state)
    save_full(tmp_path / "new.pt", model, optimizer)
    assert torch.load(tmp_path / "new.pt")["optimizer"]["state"] == {} == dict(optimizer.state)
    save(tmp_path / "two groups", *built(1, "two groups")[:2])
    with pytest.raises(CheckpointError, match="parameter group"):
        load(tmp_path / "two groups", model, optimizer)
    assert dict(optimizer.state) == {}
    workers.noise_step(model, optimizer)
    with pytest.raises(CheckpointError, match="parameter group"):
        load(tmp_path / "two groups", model, optimizer)
    assert len(optimizer.state) == len([*model.parameters()])  # nor does a failed load take moments away


def test_parameters_that_never_had_a_gradient(tmp_path):
    run = built(1)
    for frozen in (run[0][0].weight, run[0][0].bias):
        frozen.requires_grad_(False)
    step(*run, count=2)
    for frozen in (run[0][0].weight, run[0][0].bias):
        frozen.requires_grad_(True)  # from here on they are trained
    save(tmp_path / "two", *run[:2])
    again = built(2)
    load(tmp_path / "two", *again[:2])
    assert again[1].state.keys() == set(list(again[0].parameters())[2:])
    for number, state in run[1].state_dict()["state"].items():
        assert equal(again[1].state_dict()["state"][number], state)


def test_a_model_alone(tmp_path):
    run = built(1)
    save(tmp_path / "model", run[0])
    other = built(2)[0]
    assert load(tmp_path / "model", other) is None
    assert equal([*other.state_dict().values()], [*run[0].state_dict().values()])
    with pytest.raises(CheckpointError, match="was saved without an optimizer; load it without one"):
        load(tmp_path / "model", *built(2)[:2])


def test_the_device_decides_how_an_optimizer_computes(tmp_path):
    model = workers.small_model()
    save(tmp_path / "one", model, torch.optim.Adam(model.parameters(), lr=0.5, fused=True))
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    load(tmp_path / "one", model, optimizer)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["fused"], group["foreach"]) == (0.5, None, True)


def test_the_folder_of_several_means_the_newest(tmp_path):
    run = built(1)
    for number in (9, 10):
        save(tmp_path / checkpoint_name(number), *run[:2], extra=number, settings={"why": "a test"})
    assert load(tmp_path, *run[:2]) == 10
    assert load(tmp_path / checkpoint_name(9), *run[:2]) == 9
    described = read_checkpoint(tmp_path / checkpoint_name(9))
    assert (described.step, described.world_size, described.settings) == (9, 1, {"why": "a test"})


def test_nothing_is_said(tmp_path, capfd):
    run = built(1)
    with warnings.catch_warnings(action="error"):
        save(tmp_path / "one", *run[:2])
        load(tmp_path / "one", *run[:2])
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def a_gpu(monkeypatch):
    """This process seems to use a GPU, whose random state is these 16 bytes; returns what it is set to."""
    calls = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.arange(16, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: calls.append(state.tolist()))
    return calls


def test_a_checkpoint_of_the_cpu_goes_on_on_a_gpu(tmp_path, request):
    """A random state of the GPU was never saved, so none is asked for."""
    run = built(1)
    step(*run)
    save(tmp_path / "of-the-cpu", *run[:2])
    state = torch.get_rng_state()
    calls = request.getfixturevalue("a_gpu")
    load(tmp_path / "of-the-cpu", *built(2)[:2])
    assert calls == [] and torch.equal(torch.get_rng_state(), state)
    save(tmp_path / "of-a-gpu", *run[:2])
    load(tmp_path / "of-a-gpu", *built(2)[:2])
    assert calls == [[*range(16)]]


def test_a_checkpoint_of_a_gpu_goes_on_on_the_cpu(tmp_path, a_gpu, monkeypatch):
    save(tmp_path / "of-a-gpu", *built(1)[:2])
    state = torch.get_rng_state()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    load(tmp_path / "of-a-gpu", *built(2)[:2])
    assert a_gpu == [] and torch.equal(torch.get_rng_state(), state)


# ---------------------------------------------------------------- plain values

VALUES = {
    "text": "Σ\n",
    "numbers": [1, -2.5, float("inf"), 10**30, True, None],
    "tuples": ((), (1, [2, (3,)])),
    "keys": {1: "one", (2, 3): {"four": 4.0}, None: []},
    "tensors": [torch.arange(3), {"half": torch.tensor(0.5).half()}],
    "empty": {},
}


def test_plain_values_come_back_as_they_were(tmp_path):
    model = workers.small_model()
    save(tmp_path / "one", model, extra=VALUES)
    assert equal(load(tmp_path / "one", model), VALUES)


def test_an_earlier_version_wrote_json(tmp_path, monkeypatch):
    """Of {"step": 2, "base": (0.5, tensor), 1: "one"}, with the tensor among those of the model."""
    saved, base = tmp_path / "one", {"extra.base": torch.arange(3)}
    monkeypatch.setattr(checkpoint, "random_state", lambda rank: random_state(rank) | base)
    save(saved, *built(1)[:1])
    monkeypatch.undo()
    content = json.loads((saved / "checkpoint.json").read_text())
    older = {
        "optimizer": None,
        "values": {},
        "extra": {"!dict": [["step", 2], ["base", {"!tuple": [0.5, {"!tensor": "extra.base"}]}], [1, "one"]]},
    }
    (saved / "state.json").write_text(json.dumps(older))
    (saved / "state.pt").unlink()
    del content["files"]["state.pt"]
    (saved / "checkpoint.json").write_text(json.dumps(content | {"format": 1}))
    extra = load(saved, built(2)[0])
    assert (extra["step"], extra["base"][0], extra[1]) == (2, 0.5, "one")
    assert extra["base"][1].tolist() == [0, 1, 2]
    (saved / "state.json").write_text(json.dumps(older | {"color": "red"}))
    with pytest.raises(CheckpointError, match=r"state\.json is damaged: .* the keys optimizer, values, extra, color"):
        load(saved, built(2)[0])


def test_an_extra_that_is_not_plain_is_refused(tmp_path):
    model = workers.small_model()
    optimizer = torch.optim.Adam(model.parameters())
    schedule = MultiStepLR(optimizer, [1])
    for extra in ({"schedule": schedule}, [{1: (schedule,)}], {"rule": lambda: 1}):
        with pytest.raises(
            ValueError, match=r"can hold numbers, text, lists, dicts and full .*pass an object's state_dict"
        ):
            save(tmp_path / "one", model, optimizer, extra=extra)
    assert os.listdir(tmp_path) == []


def test_settings_that_are_not_json_are_refused_before_anything_is_written(tmp_path):
    message = (
        r"^settings\['deep'\] is \[\{'sizes': \{3\}\}\], which can't be written as JSON.* pass str\(\.\.\.\) of it"
    )
    with pytest.raises(ValueError, match=message):
        save(tmp_path / "one", workers.small_model(), settings={"seed": 1, "deep": [{"sizes": {3}}]})
    assert os.listdir(tmp_path) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_settings_are_those_of_the_moment_of_the_save(tmp_path):
    settings = {"rate": 0.5, "stages": [1]}
    writing = save(tmp_path / "one", workers.small_model(), settings=settings, wait=False)
    settings["stages"].append(torch.float32)
    writing.result()
    assert read_checkpoint(tmp_path / "one").settings == {"rate": 0.5, "stages": [1]}


# ---------------------------------------------------------------- refused


@pytest.fixture
def saved(tmp_path):
    run = built(1)
    step(*run)
    save(tmp_path / "run" / "one", *run[:2], extra={"step": 1})
    return tmp_path / "run" / "one"


def test_a_checkpoint_is_not_written_over(saved):
    before = sorted(os.listdir(saved.parent))
    with pytest.raises(CheckpointError, match=f"{saved} already exists; choose another name, such as step-0"):
        save(saved, *built(2)[:2])
    assert sorted(os.listdir(saved.parent)) == before == ["one"]
    assert load(saved, *built(2)[:2]) == {"step": 1}


def test_what_does_not_fit_is_refused_and_loads_nothing(saved):
    for model, message in [
        (nn.Linear(4, 3), r"belongs to a different model: model\.0\.bias has shape \(6,\) in the checkpoint, but none"),
        (workers.small_model(hidden=7), r"model\.0\.bias has shape \(6,\) in the checkpoint, but \(7,\) here"),
        (nn.Sequential(*workers.small_model(), nn.Linear(3, 3)), r"model\.5\.bias has shape none in the checkpoint"),
    ]:
        before = [tensor.clone() for tensor in model.state_dict().values()]
        with pytest.raises(CheckpointError, match=message):
            load(saved, model)
        assert equal([*model.state_dict().values()], before)
    model = workers.small_model()
    with pytest.raises(CheckpointError, match=r"1 parameter group of \[6\] parameters; this optimizer has 2"):
        load(saved, model, OPTIMIZERS["two groups"](model))
    with pytest.raises(CheckpointError, match=r"has optimizer\.\d\.\w+\.\w+, but this optimizer doesn't"):
        load(saved, model, OPTIMIZERS["momentum"](model))


def test_groups_of_other_parameters_are_refused(tmp_path):
    """Else a rate would come back to parameters that had another one."""
    model = nn.Linear(2, 2)
    groups = [
        {"params": [parameter], "lr": rate} for parameter, rate in zip(model.parameters(), (0.1, 0.2), strict=True)
    ]
    save(tmp_path / "one", model, torch.optim.Adam(groups))
    with pytest.raises(CheckpointError, match=r"2 parameter groups of \[1, 1\].*or different parameters"):
        load(tmp_path / "one", model, torch.optim.Adam(groups[::-1]))


class Command:
    def __reduce__(self):
        return os.system, ("touch owned",)


@pytest.mark.parametrize("content", [[], {}, b"{", {"optimizer": None, "values": {}, "extra": Command()}])
def test_damaged_or_dangerous_state_is_refused_and_runs_nothing(content, saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    description = json.loads((saved / "checkpoint.json").read_text())
    if isinstance(content, bytes):
        (saved / "state.pt").write_bytes(content)
    else:
        torch.save(content, saved / "state.pt")
    description["files"]["state.pt"] = (saved / "state.pt").stat().st_size
    (saved / "checkpoint.json").write_text(json.dumps(description))
    with pytest.raises(CheckpointError, match=r"one/state\.pt is damaged"):
        load(saved, *built(2)[:2])
    assert not (tmp_path / "owned").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_an_error_while_writing_leaves_nothing(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError("no space left")

    run = built(1)
    monkeypatch.setattr("fsdp_helpers.checkpointing.checkpoint.commit", full)
    for wait in (True, False):
        with pytest.raises(CheckpointError, match="nothing was saved: no space left"):
            done = save(tmp_path / "run" / "one", *run[:2], wait=wait)
            done.result()
        assert os.listdir(tmp_path / "run") == []
    monkeypatch.setattr(checkpoint, "this_rank", lambda: 1)  # all is well here, and rank 0's disk is full
    monkeypatch.setattr(checkpoint, "num_ranks", lambda: 2)
    monkeypatch.setattr(
        "torch.distributed.all_gather_object", lambda told, own, group: told.__setitem__(0, "disk full")
    )
    with pytest.raises(CheckpointError, match="nothing was saved: disk full"):
        checkpoint._finish(lambda: None, tmp_path / "unfinished", b"", {})


# ---------------------------------------------------------------- on several ranks

ON_FOUR = ("fsdp1 hybrid", "fsdp2 hybrid")  # two groups of two ranks
STRATEGIES = ("ddp", "fsdp1", "fsdp1 without a mesh", "fsdp1 flat", "fsdp2", "fsdp2 offload")


@pytest.fixture(scope="module")
def saved_by_four(tmp_path_factory):
    """What four ranks saved under each strategy, and what they had. The head has fewer rows, 3, than there are ranks."""
    folder, names = tmp_path_factory.mktemp("four"), (*ON_FOUR, *STRATEGIES)
    return folder, launch(workers.save_and_go_on, folder, names, world_size=4, device="cpu", timeout_s=240)


@pytest.mark.parametrize("name", [*ON_FOUR, *STRATEGIES])
def test_on_as_many_ranks_it_is_the_same_run(name, saved_by_four):
    """Losses and learning rates of the two steps after the save, and of those after a load; buffers are saved too."""
    for undisturbed, resumed in (answers[name] for answers in saved_by_four[1]):
        assert len(undisturbed) == 2
        if name == "ddp":  # whose first backward adds up in another order than those after it
            undisturbed, resumed = [*sum(undisturbed, ())], pytest.approx([*sum(resumed, ())], rel=1e-5)
        assert resumed == undisturbed


@pytest.mark.parametrize(
    "world_size, loaders",
    mostly_long([(2, STRATEGIES), (4, ON_FOUR), (1, STRATEGIES), (3, STRATEGIES)], telling=(0, 1)),
)
def test_on_other_ranks_and_under_another_strategy(world_size, loaders, saved_by_four):
    """To the last bit: parameters, moments, step counters and buffers."""
    folder, _ = saved_by_four
    savers = (*ON_FOUR, *STRATEGIES)
    found = launch(workers.load_crosswise, folder, savers, loaders, world_size=world_size, device="cpu", timeout_s=240)[
        0
    ]
    assert found.keys() == {(saver, loader) for saver in savers for loader in loaders}
    for pair, (differing, rate, step) in found.items():
        assert differing == [], pair
        assert (rate, step) == (0.25, 2), pair  # 1 halved twice


@pytest.mark.parametrize("name", [*ON_FOUR, *STRATEGIES])
def test_one_process_loads_it_and_the_one_file_and_buffers_are_rank_0s(name, saved_by_four):
    folder, _ = saved_by_four
    expected = torch.load(folder / f"{name}.expected", weights_only=True)
    model, optimizer, _ = built(2)
    load(folder / name, model, optimizer)
    assert workers.differences(workers.whole_state(model, optimizer), expected) == []
    assert all(tensor.any() for key, tensor in expected.items() if key.startswith("optimizer."))  # worth comparing
    content = torch.load(folder / f"{name}.pt", weights_only=True)
    assert equal(content["model"], dict(model.state_dict()))
    for number, (parameter, _) in enumerate(model.named_parameters()):
        assert equal(content["optimizer"]["state"][parameter], optimizer.state_dict()["state"][number])
    entries = {entry.name: entry for entry in read_index(folder / name)}
    for buffer in ("model.1.running_mean", "model.1.running_var", "model.1.num_batches_tracked"):
        (part,) = entries[buffer].shards
        assert part.rank == 0


def test_what_ranks_cannot_save_is_refused(saved_by_four):
    for answers in saved_by_four[1]:
        assert "needs its own process group" in answers["without a group"]
        assert "full tensors, but no other objects (it contains a DTensor)" in answers["a shard as extra"]


def test_saving_in_the_background_saves_the_state_at_the_call(tmp_path):
    """Of each kind of tensor: plain, as FSDP1 cuts it, a DTensor."""
    names = ("ddp", "fsdp1", "fsdp2")
    found = launch(workers.save_while_training, tmp_path, names, world_size=2, device="cpu", timeout_s=240)[0]
    assert found == dict.fromkeys(names, (True, []))  # by the time of the writing, all of it had changed


def test_everything_in_the_background_is_said_in_its_group(tmp_path):
    """In the training's group it could meet a step's collective."""
    found = launch(workers.groups_of_a_background_save, tmp_path / "one", world_size=2, device="cpu")
    assert found == [[True, True]] * 2


def test_no_rank_writes_before_leftovers_are_gone(tmp_path):
    """Torch makes the folder on every rank; one that is removed at that moment is an error, now and then."""
    leftover = begin(tmp_path / "run")
    leftover.mkdir()
    (leftover / "left").touch()
    found = launch(workers.save_beside_leftovers, tmp_path / "run", world_size=2, device="cpu", timeout_s=240)
    assert found == [[False], [False]]


def test_the_loop_in_commands_starts_and_goes_on(tmp_path):
    """On two ranks, with public names alone: an interruption changes nothing."""
    (code,) = re.findall(r"```python\n(.*?)```", (PROJECT / "COMMANDS.md").read_text(), re.DOTALL)
    imports = [line for line in code.splitlines() if "import" in line]
    assert imports == ["from fsdp_helpers import load, newest_checkpoint, save"]
    ends = []
    for name, last_steps in {"whole": [50], "interrupted": [30, 50]}.items():
        (tmp_path / name).mkdir()
        ends.append(launch(workers.run_a_loop, tmp_path / name, code, last_steps, world_size=2, device="cpu")[0])
    (whole,), (first, second) = ends
    assert (first[0], second[0]) == (30, 20) and whole[:2] == (50, 50) and second[1] == 50
    assert workers.differences(second[2], whole[2]) == []


def test_every_rank_is_told_the_checkpoint_that_rank_0_sees(tmp_path):
    """Another machine may see a shared folder as it was a minute ago."""
    for number in (1, 2):
        save(tmp_path / checkpoint_name(number), workers.small_model(), extra=number)
    found = launch(workers.load_with_a_late_folder, tmp_path, world_size=2, device="cpu")
    assert found == [(2, tmp_path / checkpoint_name(2), None)] * 2


# ---------------------------------------------------------------- wrappers in any order, and tied parameters


def test_names_are_plain_whatever_the_order_of_wrappers(tmp_path):
    names = {f"{number}.{name}" for number in (0, 1) for name in ("0.weight", "0.bias", "kept")}
    found = launch(workers.save_and_load_wrapped, tmp_path, world_size=2, device="cpu", timeout_s=240)[0]
    assert len(found) == 8
    for order, (stored, whole, differing, plain) in found.items():
        assert {name for name in stored if name.startswith("model.")} == {f"model.{name}" for name in names}, order
        assert whole["model"].keys() == names and whole["optimizer"]["state"].keys() == names - {"0.kept", "1.kept"}
        assert sorted(whole["optimizer"]["param_groups"][0]["params"]) == sorted(names - {"0.kept", "1.kept"})
        assert differing == [] and equal(plain, {name: whole["model"][name] for name in plain}), order


def test_a_checkpoint_of_an_earlier_version_with_names_of_wrappers_loads_and_consolidates(tmp_path, monkeypatch):
    """They were left by recomputing around compiling: two blocks of them, as they were written."""
    run, again = built(1), built(2)
    step(*run)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "read_state", lambda *built: as_if_compiled(read_state(*built)))
        save(tmp_path / "old", *run[:2])
    assert b"_orig_mod" in (tmp_path / "old" / ".metadata").read_bytes()
    load(tmp_path / "old", *again[:2])
    assert equal(content(*again)[:2][1][0], content(*run)[1][0]) and equal(content(*again)[0], content(*run)[0])
    consolidate(tmp_path / "old", tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt").keys() == run[0].state_dict().keys()


def as_if_compiled(state):
    """The state with names as of a compiled module inside each layer."""

    def compiled(name):
        return name.replace(".", "._orig_mod.", 1)

    groups = [group | {"params": [*map(compiled, group["params"])]} for group in state.groups]
    model, optimizer = ({compiled(n): kept for n, kept in tree.items()} for tree in (state.model, state.optimizer))
    return replace(
        state, model=model, optimizer=optimizer, groups=groups, buffers=frozenset(map(compiled, state.buffers))
    )


def test_ends_that_differ_in_a_checkpoint_are_not_loaded_into_tied_ones(tmp_path):
    """One would overwrite the other. A tied checkpoint gives an untied model two equal ends."""
    found = launch(workers.load_ties, tmp_path, world_size=2, device="cpu", timeout_s=240)
    for rank in found:
        assert len(rank) == 16
        for (strategy, saved, loading), ends in rank.items():
            if loading and not saved:
                told = "embedding.weight and head.weight differ there, but are one tensor here"
                assert isinstance(ends, str) and told in ends, strategy
            elif ends is not None:  # rank 0's
                assert ends == (saved or loading), strategy
