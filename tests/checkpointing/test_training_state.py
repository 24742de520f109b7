"""What one strategy saved on some ranks, any other loads on any number of ranks, to the last bit."""

import enum
import importlib
import io
import json
import os
import pickle
import shutil
import warnings

import checkpoint_workers as workers
import pytest
import torch
import torch.distributed.checkpoint as dcp
from runs import mostly_long
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from fsdp_helpers.checkpointing.checkpoint import load, save
from fsdp_helpers.checkpointing.consolidate import consolidate
from fsdp_helpers.checkpointing.folder import CheckpointError
from fsdp_helpers.checkpointing.shard_index import SafeReader, read_index, read_index_of_anyone
from fsdp_helpers.checkpointing.training_state import save_full
from fsdp_helpers.config import TrainConfig
from fsdp_helpers.models.series import build_model
from fsdp_helpers.ranks.launch import launch

CONFIGS = {
    f"{strategy} {api}": TrainConfig(model="simple", strategy=strategy, api=api)
    for strategy, api in [
        ("ddp", "fsdp2"),
        ("fsdp", "fsdp1"),
        ("fsdp-auto-wrap", "fsdp1"),
        ("fsdp", "fsdp2"),
        ("fsdp-auto-wrap", "fsdp2"),
    ]
}
HYBRID = {
    f"hybrid {api}": TrainConfig(model="simple", strategy="fsdp", api=api, sharding="hybrid")
    for api in ("fsdp1", "fsdp2")
}
OFFLOAD = {"offload fsdp2": TrainConfig(model="simple", strategy="fsdp-offload", api="fsdp2")}
SAVED = CONFIGS | HYBRID | OFFLOAD
# SimpleCNN has 3 layers with a weight and a bias each: 6 parameters, and for each 2 moments and a step counter
NUM_PARAMETERS, NUM_TENSORS = 6, 6 * 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with what four ranks saved under each strategy, in both ways."""
    folder = tmp_path_factory.mktemp("saved")
    on_ranks(workers.save_under_each, folder, SAVED, world_size=4)
    return folder


def on_ranks(worker, *args, world_size) -> list:
    return launch(worker, *args, world_size=world_size, device="cpu", timeout_s=240)


def read_expected(saved, name):
    return torch.load(saved / f"{name}.expected", weights_only=True)


def check_loaded(found):
    """Before the load every parameter was another, and after it nothing is."""
    for name, (before, after) in found.items():
        assert len(before) == NUM_PARAMETERS, name
        assert after == [], name


# ---------------------------------------------------------------- any strategy, any number of ranks


def test_what_is_saved_is_worth_comparing(saved):
    for name in SAVED:
        expected = read_expected(saved, name)
        assert len(expected) == NUM_TENSORS
        assert all(tensor.any() for tensor in expected.values()), name  # moments and counters are not zero
        assert {tensor.item() for key, tensor in expected.items() if key.endswith(".step")} == {3.0}


@pytest.mark.parametrize(
    "loader, world_size",
    # under FSDP1 on two ranks and under FSDP2 on three, both wrapped
    mostly_long([(loader, world_size) for loader in CONFIGS for world_size in (1, 2, 3)], telling=(7, 14)),
)
def test_shards_of_four_ranks_load_everywhere(loader, world_size, saved):
    found = on_ranks(workers.load_each, saved, [*SAVED], CONFIGS[loader], world_size=world_size)[0]
    assert found.keys() == SAVED.keys()
    check_loaded(found)


@pytest.mark.parametrize(
    "loader, world_size",
    mostly_long([("hybrid fsdp1", 4), ("hybrid fsdp2", 4), ("offload fsdp2", 3)], telling=(1,)),
)
def test_shards_load_under_the_other_strategies(loader, world_size, saved):
    found = on_ranks(workers.load_each, saved, [*CONFIGS], SAVED[loader], world_size=world_size)[0]
    check_loaded(found)


def test_a_parameter_with_fewer_rows_than_ranks(tmp_path):
    """The positions of "vit" are one row of 16 x 64: on three ranks two hold nothing of it, on two one does.

    What each API saved on three ranks, the other loads on two.
    """
    configs = {api: TrainConfig(model="vit", strategy="fsdp-auto-wrap", api=api) for api in ("fsdp1", "fsdp2")}
    on_ranks(workers.save_under_each, tmp_path, configs, world_size=3)
    for saver, loader in (("fsdp1", "fsdp2"), ("fsdp2", "fsdp1")):
        found = on_ranks(workers.load_each, tmp_path, [saver], configs[loader], world_size=2)[0]
        before, after = found[saver]
        assert "model.positions" in before
        assert after == []


def check_one_file(path, expected):
    """A plain module takes its parameters as they are, and every moment is there."""
    content = torch.load(path, weights_only=True)
    model = build_model("simple")
    model.load_state_dict(content["model"], strict=True)
    for parameter, tensor in model.named_parameters():
        assert torch.equal(tensor, expected[f"model.{parameter}"])
        for kind in ("exp_avg", "exp_avg_sq"):
            moment = content["optimizer"]["state"][parameter][kind]
            assert torch.equal(moment, expected[f"optimizer.{parameter}.{kind}"])


@pytest.mark.parametrize("name", SAVED)
def test_the_one_file_loads_in_a_plain_module(name, saved):
    check_one_file(saved / f"{name}.pt", read_expected(saved, name))


@pytest.mark.parametrize("name", ["fsdp-auto-wrap fsdp1", "fsdp-auto-wrap fsdp2"])
def test_a_plain_process_loads_and_saves(name, saved, tmp_path):
    expected = read_expected(saved, name)
    config = TrainConfig(model="simple", strategy="local")
    for path in (saved / name, tmp_path / "again"):
        model, optimizer = workers.build(config, seed=2)
        assert workers.differences(workers.whole_state(model, optimizer), expected) != []
        load(path, model, optimizer)
        assert workers.differences(workers.whole_state(model, optimizer), expected) == []
        if path == saved / name:
            save(tmp_path / "again", model, optimizer)
            save_full(tmp_path / "again.pt", model, optimizer)
    check_one_file(tmp_path / "again.pt", expected)


# ---------------------------------------------------------------- saving while training goes on


def test_saving_in_the_background_saves_the_state_at_the_call(tmp_path):
    """Of each kind of tensor: plain, as FSDP1 cuts it, a DTensor."""
    configs = {name: CONFIGS[name] for name in ("ddp fsdp2", "fsdp fsdp1", "fsdp fsdp2")}
    found = on_ranks(workers.save_while_training, tmp_path, configs, world_size=2)[0]
    assert found.keys() == configs.keys()
    for name, (trained_on, loaded) in found.items():
        assert len(trained_on) == NUM_TENSORS, name  # by the time of the writing, all of it had changed
        assert loaded == [], name


# ---------------------------------------------------------------- nothing that is loaded can run code


class Evil:
    """A pickle that leaves a mark when it is read."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.fixture
def victim(saved, tmp_path):
    """A checkpoint to be tampered with, and a file that is there once foreign code has run."""
    path = shutil.copytree(saved / "fsdp fsdp2", tmp_path / "checkpoint")
    return path, tmp_path / "mark"


def evils(mark):
    return [Evil(os.system, f"touch '{mark}'"), Evil(exec, f"open({str(mark)!r}, 'w').close()")]


def saved_by_torch(content) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def ran(mark) -> bool:
    """Whether the code has run; the next look starts afresh."""
    was_there = mark.exists()
    mark.unlink(missing_ok=True)
    return was_there


def read_trusting(path):
    return pickle.loads((path / ".metadata").read_bytes())


def describe_anew(path):
    """Whoever changes a file can change what checkpoint.json says of its size."""
    description = json.loads((path / "checkpoint.json").read_text())
    description["files"] = {name: (path / name).stat().st_size for name in description["files"]}
    (path / "checkpoint.json").write_text(json.dumps(description))


def load_it(path):
    describe_anew(path)
    load(path, *workers.build(TrainConfig(model="simple", strategy="local"), seed=2))


def load_trusting(path):
    """As torch itself loads, with a reader that believes the index."""
    model, _ = workers.build(TrainConfig(model="simple", strategy="local"), seed=2)
    with warnings.catch_warnings(action="ignore"):
        dcp.load({"model": model.state_dict()}, storage_reader=dcp.FileSystemReader(path))


@pytest.mark.parametrize("which", [0, 1])
def test_an_index_that_calls_a_function_is_refused(which, victim):
    path, mark = victim
    (path / ".metadata").write_bytes(pickle.dumps(evils(mark)[which]))
    read_trusting(path)
    assert ran(mark)  # so would have been the code of the next lines, were they as trusting
    with pytest.raises(CheckpointError, match=r"\.metadata isn't the index of a sharded checkpoint"):
        SafeReader(path).read_metadata()
    with pytest.raises(CheckpointError, match=r"\.metadata isn't the index of a sharded checkpoint"):
        load_it(path)
    assert not ran(mark)


def test_an_index_that_hides_a_call_inside_is_refused(victim):
    path, mark = victim
    metadata = read_trusting(path)
    metadata.planner_data = evils(mark)[0]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    read_trusting(path)
    assert ran(mark)
    with pytest.raises(CheckpointError, match="which doesn't belong in an index"):
        SafeReader(path).read_metadata()
    assert not ran(mark)


def put_in_place_of(path, name, content: bytes, as_bytes: bool):
    """Let the index say that `name`, or one shard of it, is `content`, at the end of rank 0's file."""
    metadata = read_trusting(path)
    index = next(index for index in metadata.storage_data if index.fqn == name)
    place = metadata.storage_data[index]
    with open(path / place.relative_path, "ab") as file:
        place.offset, place.length = file.tell(), len(content)
        file.write(content)
    if as_bytes:
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        metadata.storage_data = {other: kept for other, kept in metadata.storage_data.items() if other.fqn != name}
        metadata.storage_data[type(index)(name)] = place
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("which", [0, 1])
def test_an_entry_that_is_no_tensor_is_refused(which, victim):
    path, mark = victim
    put_in_place_of(path, "model.layers.7.bias", saved_by_torch(evils(mark)[which]), as_bytes=True)
    load_trusting(path)
    assert ran(mark)
    with pytest.raises(CheckpointError, match=r"lists 'model\.layers\.7\.bias', which isn't a tensor"):
        load_it(path)
    assert not ran(mark)


@pytest.mark.parametrize("which", [0, 1])
def test_a_shard_that_calls_a_function_is_refused(which, victim):
    path, mark = victim
    content = saved_by_torch(evils(mark)[which])
    torch.load(io.BytesIO(content), weights_only=False)
    assert ran(mark)
    put_in_place_of(path, "model.layers.7.bias", content, as_bytes=False)
    with pytest.raises(CheckpointError, match="checkpoint"):
        load_it(path)
    assert not ran(mark)


# ---------------------------------------------------------------- nor change what is loaded later, or read other files


class Builds:
    """Its pickle names a class or function of `module`, and lets BUILD set attributes of it, or of what it returns."""

    def __init__(self, module, name, arguments, state):
        self.module, self.name, self.arguments, self.state = module, name, arguments, state

    def as_pickle(self) -> bytes:
        call = b"" if self.arguments is None else pickle.dumps(self.arguments, protocol=0)[:-1] + b"R"
        named = f"c{self.module}\n{self.name}\n".encode()
        return named + call + pickle.dumps(self.state, protocol=0)[:-1] + b"b."


METADATA, FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
BUILDS = {
    "a class": Builds(METADATA, "Metadata", None, (None, {"tampered": 1})),
    "a class of the storage": Builds(FILES, "_StorageInfo", None, (None, {"tampered": 1})),
    "a class of paths": Builds("pathlib", "PosixPath", None, (None, {"tampered": 1})),
    "a function": Builds("torch.serialization", "_get_layout", None, (None, {"tampered": 1})),
    "a function's dict": Builds("torch.serialization", "_get_layout", None, {"tampered": 1}),
    "a member of an enumeration": Builds(METADATA, "_MEM_FORMAT_ENCODING", (0,), {"tampered": 1}),
}


def tampered(which) -> bool:
    found = getattr(importlib.import_module(BUILDS[which].module), BUILDS[which].name)
    found = found if BUILDS[which].arguments is None else found(*BUILDS[which].arguments)
    if not hasattr(found, "tampered"):
        return False
    del found.tampered
    return True


@pytest.mark.parametrize("which", BUILDS)
def test_an_index_that_changes_a_class_is_refused(which, victim):
    path, _ = victim
    evil = BUILDS[which].as_pickle()
    pickle.loads(evil)
    assert tampered(which)  # so would have been what others load later
    (path / ".metadata").write_bytes(evil)
    with pytest.raises(CheckpointError, match=r"it sets attributes of .*, which isn't a record of an index"):
        read_index(path)
    with pytest.raises(CheckpointError, match="n't a record of an index"):
        read_index_of_anyone(path)
    assert not tampered(which)


def test_a_record_is_given_its_attributes_only_as_a_dict(victim):
    path, _ = victim
    record = Builds(FILES, "_StorageInfo", ("file", 0, 1), (None, {"__class__": 1})).as_pickle()
    (path / ".metadata").write_bytes(record)
    with pytest.raises(CheckpointError, match="n't a record of an index"):
        read_index(path)


def test_an_index_of_an_older_python_is_read(victim):
    """Before 3.11.4 Python pickled a member of an enumeration as `getattr` of its class and its name."""
    path, _ = victim

    class OlderPickler(pickle.Pickler):
        def reducer_override(self, value):
            return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented

    entries = read_index(path)
    with open(path / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    with open(path / ".metadata", "wb") as file:
        OlderPickler(file).dump(metadata)
    assert b"getattr" in (path / ".metadata").read_bytes()
    assert read_index(path) == entries


def test_getattr_is_for_members_alone(victim):
    path, _ = victim
    (path / ".metadata").write_bytes(Builds("builtins", "getattr", (METADATA, "__class__"), (None, {})).as_pickle())
    with pytest.raises(CheckpointError, match="it names builtins.getattr, which doesn't belong in an index"):
        read_index(path)


def test_a_record_of_a_newer_torch_is_named_as_such(victim):
    path, _ = victim
    record = Builds(METADATA, "TensorProperties", (), tuple(range(9))).as_pickle()
    (path / ".metadata").write_bytes(record)
    with pytest.raises(CheckpointError, match="its TensorProperties doesn't match torch .*; a newer version wrote it"):
        read_index(path)


@pytest.mark.parametrize(
    "elsewhere", ["{outside}/__0_0.distcp", "../outside/__0_0.distcp", ".", "..", "a/b", "a\\b", ""]
)
def test_an_index_that_names_a_file_elsewhere_is_refused(elsewhere, victim, tmp_path):
    path, _ = victim
    shutil.copytree(path, tmp_path / "outside")
    metadata = read_trusting(path)
    for place in metadata.storage_data.values():
        if place.relative_path == "__0_0.distcp":
            place.relative_path = elsewhere.format(outside=tmp_path / "outside")
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    if "outside" in elsewhere:
        load_trusting(path)  # and it is read
    out = tmp_path / "model.pt"
    describe_anew(path)
    for read in (load_it, read_index, read_index_of_anyone, lambda path: consolidate(path, out)):
        with pytest.raises(
            CheckpointError, match="names the file .*; a checkpoint's files must be in the same folder as its index"
        ):
            read(path)
    assert not out.exists()


def test_the_index_of_an_honest_checkpoint_is_read_whole(saved):
    for name in SAVED:
        assert SafeReader(saved / name).read_metadata().storage_data == read_trusting(saved / name).storage_data
