"""An index is read as data: nothing that is loaded can run code, change what is loaded later, or read other files."""

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
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from fsdp_helpers.checkpointing.checkpoint import load, save
from fsdp_helpers.checkpointing.consolidate import consolidate
from fsdp_helpers.checkpointing.folder import CheckpointError
from fsdp_helpers.checkpointing.shard_index import SafeReader, read_index, read_index_of_anyone

# ---------------------------------------------------------------- nothing that is loaded can run code


class Evil:
    """A pickle that leaves a mark when it is read."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch '{self.mark}'",)


def model_and_optimizer():
    model = workers.small_model()
    return model, torch.optim.Adam(model.parameters())


@pytest.fixture
def victim(tmp_path):
    """A checkpoint to be tampered with, and a file that is there once foreign code has run."""
    save(tmp_path / "checkpoint", *model_and_optimizer())
    return tmp_path / "checkpoint", tmp_path / "mark"


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
    load(path, *model_and_optimizer())


def load_trusting(path):
    """As torch itself loads, with a reader that believes the index."""
    model, _ = model_and_optimizer()
    with warnings.catch_warnings(action="ignore"):
        dcp.load({"model": model.state_dict()}, storage_reader=dcp.FileSystemReader(path))


def test_an_index_that_calls_a_function_is_refused(victim):
    path, mark = victim
    (path / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
    read_trusting(path)
    assert ran(mark)  # so would have been the code of the next lines, were they as trusting
    with pytest.raises(CheckpointError, match=r"\.metadata isn't the index of a sharded checkpoint"):
        SafeReader(path).read_metadata()
    with pytest.raises(CheckpointError, match=r"\.metadata isn't the index of a sharded checkpoint"):
        load_it(path)
    with pytest.raises(CheckpointError, match=r"\.metadata isn't the index of a sharded checkpoint"):
        consolidate(path, path.with_name("model.pt"))
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


def test_an_entry_that_is_no_tensor_is_refused(victim):
    path, mark = victim
    put_in_place_of(path, "model.0.bias", saved_by_torch(Evil(mark)), as_bytes=True)
    load_trusting(path)
    assert ran(mark)
    with pytest.raises(CheckpointError, match=r"lists 'model\.0\.bias', which isn't a tensor"):
        load_it(path)
    assert not ran(mark)


def test_a_shard_that_calls_a_function_is_refused(victim):
    path, mark = victim
    content = saved_by_torch(Evil(mark))
    torch.load(io.BytesIO(content), weights_only=False)
    assert ran(mark)
    put_in_place_of(path, "model.0.bias", content, as_bytes=False)
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


@pytest.mark.parametrize("elsewhere", ["{outside}/__0_0.distcp", "../outside/__0_0.distcp", "..", "a\\b", ""])
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
