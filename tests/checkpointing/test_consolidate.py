"""One file for a plain model, from shards; and what the index says about them."""

import json
import os
import resource
import shutil
import warnings
from pathlib import Path

import checkpoint_workers as workers
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from runs import main_in_process

from fsdp_helpers.checkpointing.checkpoint import load
from fsdp_helpers.checkpointing.consolidate import SAFETENSORS_TYPES, consolidate
from fsdp_helpers.checkpointing.folder import CheckpointError, begin, checkpoint_name, commit
from fsdp_helpers.checkpointing.shard_index import read_index, read_index_of_anyone
from fsdp_helpers.config import TrainConfig
from fsdp_helpers.models.series import build_model
from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.training.worker import train_worker

RUNS = [("ddp", "fsdp2"), ("fsdp-auto-wrap", "fsdp1"), ("fsdp-auto-wrap", "fsdp2")]
READERS = {".pt": lambda path: torch.load(path, weights_only=True), ".safetensors": safetensors.torch.load_file}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[tuple[str, str], Path]:
    """For each strategy the folder of a run on three ranks, with checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("runs")
    always = {"model": "vit", "global_batch_size": 6, "max_steps": 2, "checkpoint_every": 1, "test_images": 6}
    always["data_dir"] = str(folder / "no-mnist")
    folders = {(strategy, api): folder / f"{strategy}-{api}" for strategy, api in RUNS}
    for (strategy, api), own in folders.items():
        config = TrainConfig(strategy=strategy, api=api, checkpoint_dir=str(own), **always)
        launch(train_worker, config, world_size=3, device="cpu")
    return folders


def save_by_hand(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint of one process that holds these parameters."""
    unfinished = begin(folder / checkpoint_name(1))
    dcp.save({"model": tensors}, storage_writer=dcp.FileSystemWriter(unfinished), no_dist=True)
    return commit(unfinished, step=1, world_size=1, settings={})


# ---------------------------------------------------------------- the same model, from either file


@pytest.mark.parametrize("suffix", READERS)
@pytest.mark.parametrize("run", RUNS)
def test_a_plain_module_computes_the_same(run, suffix, runs, tmp_path, monkeypatch):
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: pytest.fail("a process group was started"))
    entries = consolidate(runs[run], tmp_path / f"model{suffix}").tensors
    assert not dist.is_initialized()
    model = build_model("vit").eval()
    model.load_state_dict(READERS[suffix](tmp_path / f"model{suffix}"), strict=True)
    assert {entry.name.removeprefix("model.") for entry in entries} == model.state_dict().keys()

    expected, optimizer = workers.build(TrainConfig(model="vit"), seed=2)
    images = torch.randn(5, 1, 28, 28)
    assert not torch.equal(model(images), expected.eval()(images))  # not yet
    load(runs[run] / checkpoint_name(2), expected, optimizer)
    assert torch.equal(model(images), expected(images))


def test_the_folder_of_a_run_means_its_newest_checkpoint(runs, tmp_path):
    content = {}
    for name, path in [("run", RUNS[0]), ("first", checkpoint_name(1)), ("second", checkpoint_name(2))]:
        folder = runs[RUNS[0]] if name == "run" else runs[RUNS[0]] / path
        consolidate(folder, tmp_path / f"{name}.pt")
        content[name] = READERS[".pt"](tmp_path / f"{name}.pt")
    assert workers.differences(content["run"], content["second"]) == []
    assert workers.differences(content["first"], content["second"]) != []


def test_a_prefix_is_stripped_from_the_beginning_alone(tmp_path):
    path = save_by_hand(tmp_path / "run", {"model.weight": torch.ones(2), "other": torch.ones(1)})
    assert {entry.name for entry in read_index_of_anyone(path)[0]} >= {"model.model.weight"}
    consolidate(path, tmp_path / "model.pt")
    assert READERS[".pt"](tmp_path / "model.pt").keys() == {"model.weight", "other"}


MIXED = {
    "odd": torch.tensor([True, False, True]),  # 3 bytes: what follows a bool is not aligned by itself
    "whole": torch.tensor([-(2**40), 7]),
    "half": torch.tensor([1.5, -2.0, 0.0, 3.0, 1e30]).bfloat16(),
    "other_half": torch.arange(7).half(),
    "nothing": torch.empty(0, 4),
    "one": torch.tensor(0.5),
    "single": torch.randn(3, 5),
    "double": torch.randn(5, dtype=torch.float64),
    "more": torch.tensor([[True], [False]]),
    "int": torch.tensor([1, -1], dtype=torch.int32),
}
# And eight values of each type but bool, the bytes 0 to 63 or fewer of them
NUMBERS = [kind for kind in SAFETENSORS_TYPES if kind is not torch.bool]
MIXED |= {str(kind): torch.arange(8 * kind.itemsize, dtype=torch.uint8).view(kind) for kind in NUMBERS}
# 3 + 16 + 10 + 14 + 0 + 4 + 60 + 40 + 2 + 8, and eight values of 3 types of 8 bytes, 3 of 4, 4 of 2 and 4 of 1
NUM_BYTES = 157 + 8 * (24 + 12 + 8 + 4)


@pytest.mark.parametrize("suffix", READERS)
def test_every_type_comes_back_as_it_was(suffix, tmp_path):
    path = save_by_hand(tmp_path / "run", MIXED)
    entries = consolidate(path, tmp_path / f"model{suffix}").tensors
    found = READERS[suffix](tmp_path / f"model{suffix}")
    assert found.keys() == MIXED.keys()
    for name, tensor in MIXED.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name
    assert sum(entry.num_bytes for entry in entries) == NUM_BYTES


def test_every_tensor_begins_where_its_type_may(tmp_path):
    """A reader that maps the file needs a value of 8 bytes at a multiple of 8, and so on."""
    consolidate(save_by_hand(tmp_path / "run", MIXED), tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    header = json.loads(content[8 : 8 + length])
    for name, tensor in MIXED.items():
        begin, end = header[name]["data_offsets"]
        assert begin % tensor.itemsize == 0, name
        assert end - begin == tensor.nbytes, name
    assert len(content) == 8 + length + NUM_BYTES


def test_a_type_that_safetensors_does_not_know(tmp_path, capfd):
    path = save_by_hand(tmp_path / "run", {"wave": torch.ones(3, dtype=torch.complex64)})
    message = "model.wave has dtype torch.complex64, which safetensors doesn't support; write a .pt file"
    check_refused(path, tmp_path / "model.safetensors", message, capfd)
    consolidate(path, tmp_path / "model.pt")
    assert torch.equal(READERS[".pt"](tmp_path / "model.pt")["wave"], torch.ones(3, dtype=torch.complex64))


@pytest.mark.parametrize("suffix", READERS)
def test_shards_that_are_not_contiguous_find_their_places(suffix, tmp_path):
    """Columns of a matrix, and every way to cut a tensor of three dimensions: rows of a shard lie apart in the file."""
    unfinished = begin(tmp_path / checkpoint_name(1))
    found = launch(workers.save_cut_along_each_dimension, unfinished, world_size=3, device="cpu", timeout_s=240)
    consolidate(commit(unfinished, step=1, world_size=3, settings={}), tmp_path / f"model{suffix}")
    assert workers.differences(READERS[suffix](tmp_path / f"model{suffix}"), found[0]) == []


@pytest.mark.parametrize("suffix", READERS)
def test_a_shard_that_takes_several_reads(suffix, tmp_path, monkeypatch):
    """4,800 bytes in pieces of 1,000: four whole ones and a part."""
    monkeypatch.setattr("fsdp_helpers.checkpointing.consolidate.CHUNK_BYTES", 1_000)
    tensors = {"weight": torch.randn(30, 40)}
    path = save_by_hand(tmp_path / "run", tensors)
    consolidate(path, tmp_path / f"model{suffix}")
    assert workers.differences(READERS[suffix](tmp_path / f"model{suffix}"), tensors) == []


# Torch keeps the order in memory of a tensor that has no gaps, and closes the gaps of the others.
ORDERS = {
    "channels last": torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
    "a part of it": torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)[1:3],
    "transposed": torch.randn(6, 7).T,
    "with gaps": torch.randn(6, 7)[:, ::2],
    "one for all": torch.randn(1, 7).expand(6, 7),
}


@pytest.mark.parametrize("suffix", READERS)
def test_values_in_any_order_in_memory(suffix, tmp_path):
    """In a folder that `dcp.save` wrote, which keeps that order in the file."""
    consolidate(save_by_hand(tmp_path / "run", ORDERS), tmp_path / f"model{suffix}")
    assert workers.differences(READERS[suffix](tmp_path / f"model{suffix}"), ORDERS) == []


# ---------------------------------------------------------------- folders of other people


@pytest.fixture(scope="module")
def foreign(tmp_path_factory) -> tuple[Path, torch.nn.Module]:
    """What `dcp.save` writes of plain state dicts, with a mark that would be left if an entry were unpickled."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    folder = tmp_path_factory.mktemp("foreign") / "checkpoint"
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "mark": Marks()}
    with warnings.catch_warnings(action="ignore"):  # torch says that one process is one process
        dcp.save(state, checkpoint_id=folder)
    return folder, model


class Marks:
    """Its pickle sets a variable when it is read."""

    def __reduce__(self):
        return exec, ("import os; os.environ['MARKED'] = '1'",)


def test_a_folder_of_anyone(foreign, tmp_path, capfd, monkeypatch):
    folder, model = foreign
    monkeypatch.delenv("MARKED", raising=False)
    for suffix, read in READERS.items():
        assert main_in_process("consolidate", folder, tmp_path / f"model{suffix}") == 0
        assert workers.differences(read(tmp_path / f"model{suffix}"), model.state_dict()) == []
        output = capfd.readouterr()
        first, second = output.out.splitlines()
        assert first.endswith("2 tensors, 32 B") and output.err == ""  # (3 x 2 + 2) x 4
        assert second.startswith("skipped (not tensors): ")
        named = second.partition(": ")[2].split(", ")
        assert {"epoch", "mark"} <= set(named) and any(name.startswith("optimizer.param_groups") for name in named)
    assert "MARKED" not in os.environ


def test_a_tensor_whose_pickle_calls_a_function(tmp_path, monkeypatch, capfd):
    """The pickle beside the values is read, for their order in memory, but only as data."""
    monkeypatch.delenv("MARKED", raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", lambda data, file, save=torch.save: save(Marks(), file))
        path = save_by_hand(tmp_path / "run", {"weight": torch.zeros(3)})
    message = "__0_0.distcp is damaged at model.weight: it isn't stored as a plain tensor"
    check_refused(path, tmp_path / "model.pt", message, capfd)
    assert "MARKED" not in os.environ


def test_another_prefix(foreign, tmp_path, capfd):
    folder, model = foreign
    first = "optimizer.state.0."
    assert main_in_process("consolidate", folder, tmp_path / "model.pt", "--prefix", first) == 0
    found = READERS[".pt"](tmp_path / "model.pt")
    assert found.keys() == {"step", "exp_avg", "exp_avg_sq"} and found["exp_avg"].shape == model.weight.shape
    consolidate(folder, tmp_path / "all.pt", prefix="")
    assert {"model.weight", f"{first}exp_avg"} < READERS[".pt"](tmp_path / "all.pt").keys()
    message = "has no tensor whose name starts with 'net.'; it has, for example, model.weight, model.bias; give another prefix"
    capfd.readouterr()
    assert main_in_process("consolidate", folder, tmp_path / "none.pt", "--prefix", "net.") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert message in line and not (tmp_path / "none.pt").exists()


# ---------------------------------------------------------------- what it takes


@pytest.mark.parametrize("suffix, held", [(".safetensors", 1), (".pt", 8)])
def test_memory_holds_one_tensor_at_a_time(suffix, held, tmp_path, monkeypatch):
    """Of eight with 24,000 bytes each; a .pt file is put together in memory."""
    path, allocated = save_by_hand(tmp_path / "run", {str(n): torch.full((60, 100), float(n)) for n in range(8)}), []

    def note_and_allocate(*shape, allocate=torch.empty, **settings):
        tensor = allocate(*shape, **settings)
        allocated.append(0 if tensor.is_meta else tensor.nbytes)
        return tensor

    monkeypatch.setattr(torch, "empty", note_and_allocate)
    consolidate(path, tmp_path / f"model{suffix}")
    assert sum(allocated) == held * 24_000
    monkeypatch.undo()
    found = READERS[suffix](tmp_path / f"model{suffix}")
    assert [found[str(number)].unique().tolist() for number in range(8)] == [[number] for number in range(8)]


# ---------------------------------------------------------------- whole or not there


@pytest.mark.parametrize("suffix", READERS)
def test_a_full_disk_leaves_what_was_there(suffix, runs, tmp_path, capfd):
    """The file may grow to 100,000 bytes, the model has 4 x 204,938 = 819,752: bad output, said in one line."""
    out = tmp_path / f"model{suffix}"
    out.write_text("old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        status = main_in_process("consolidate", runs[RUNS[0]], out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (status, out.read_text(), os.listdir(tmp_path)) == (2, "old", [out.name])
    (line,) = capfd.readouterr().err.splitlines()
    assert str(out) in line


@pytest.mark.parametrize("suffix", READERS)
def test_a_single_changed_byte_is_found_out(suffix, checkpoint, tmp_path, capfd):
    """Its size is right, so nothing but the values' own checksum can tell."""
    file = checkpoint / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    consolidate(checkpoint, tmp_path / "whole.pt")
    values = READERS[".pt"](tmp_path / "whole.pt")["head.weight"][4:8]  # rank 1's rows
    begin = content.find(values.numpy().tobytes())
    assert begin > 0
    content[begin] ^= 1
    file.write_bytes(content)
    check_refused(checkpoint, tmp_path / f"model{suffix}", "__1_0.distcp", capfd)


@pytest.mark.parametrize("suffix", READERS)
def test_a_changed_stride_is_found_out(suffix, tmp_path):
    """Another order of the values fits as well, so nothing but the checksum of what describes them can tell."""
    folder = save_by_hand(tmp_path / "run", {"weight": torch.arange(12.0).view(3, 4)})
    (file,) = folder.glob("*.distcp")
    four_and_one, one_and_three = b"K\x04K\x01\x86", b"K\x01K\x03\x86"  # as pickle writes these tuples
    assert file.read_bytes().count(four_and_one) == 1
    file.write_bytes(file.read_bytes().replace(four_and_one, one_and_three))
    with pytest.raises(CheckpointError, match="Bad CRC-32"):
        consolidate(folder, tmp_path / f"model{suffix}")


# ---------------------------------------------------------------- refused in one line


@pytest.fixture
def checkpoint(runs, tmp_path) -> Path:
    return shutil.copytree(runs[RUNS[2]], tmp_path / "run") / checkpoint_name(2)


def garble(path: Path) -> None:
    path.write_bytes(b"!" * path.stat().st_size)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda path: (path / "__1_0.distcp").unlink(), "__1_0.distcp is missing. Put it back"),
        (lambda path: garble(path / "__1_0.distcp"), "step-00000002"),
        (lambda path: garble(path / ".metadata"), ".metadata isn't the index of a sharded checkpoint"),
        (lambda path: garble(path / "checkpoint.json"), "it has no readable checkpoint.json"),
    ],
)
@pytest.mark.parametrize("suffix", READERS)
def test_a_damaged_checkpoint(suffix, spoil, message, checkpoint, capfd):
    spoil(checkpoint)
    for given in (checkpoint, checkpoint.parent):
        check_refused(given, checkpoint.parent.parent / f"model{suffix}", message, capfd)


def check_refused(given, out, message, capfd):
    before = sorted(os.listdir(out.parent)) if out.parent.is_dir() else None
    capfd.readouterr()
    assert main_in_process("consolidate", given, out) == 2
    output = capfd.readouterr()
    (line,) = output.err.splitlines()
    assert message in line
    assert output.out == ""
    assert before == (sorted(os.listdir(out.parent)) if out.parent.is_dir() else None)


@pytest.mark.parametrize(
    "out, message",
    [
        ("model.bin", "model.bin: choose a name that ends in .safetensors or .pt"),
        ("model", "choose a name that ends in"),
        ("none/model.pt", "none doesn't exist"),
        ("folder.pt", "folder.pt is a folder; give a file"),
    ],
)
def test_an_output_that_cannot_be(out, message, runs, tmp_path, capfd):
    (tmp_path / "folder.pt").mkdir()
    check_refused(runs[RUNS[0]], tmp_path / out, message, capfd)


# ---------------------------------------------------------------- the index


@pytest.mark.parametrize("run", RUNS)
def test_shards_cover_every_tensor_exactly_once(run, runs):
    entries = read_index(runs[run] / checkpoint_name(2))
    parameters = dict(build_model("vit").named_parameters())
    names = [entry.name for entry in entries]
    assert len(set(names)) == len(names)
    # Each parameter, its two moments and its step counter, and the random state of three ranks
    assert len(names) == 4 * len(parameters) + 3
    for entry in entries:
        painted = torch.zeros(entry.shape)
        for part in entry.shards:
            painted[tuple(slice(o, o + s) for o, s in zip(part.offsets, part.sizes, strict=True))] += 1
        assert (painted == 1).all(), entry.name
        assert sum(torch.Size(part.sizes).numel() for part in entry.shards) == torch.Size(entry.shape).numel()
        if entry.name.startswith("model."):
            parameter = parameters[entry.name.removeprefix("model.")]
            assert (entry.shape, entry.dtype) == (parameter.shape, parameter.dtype)
            assert entry.num_bytes == parameter.nbytes


@pytest.mark.parametrize("run", RUNS)
def test_a_file_is_one_ranks_and_says_so(run, runs):
    checkpoint = runs[run] / checkpoint_name(2)
    parts = [part for entry in read_index(checkpoint) for part in entry.shards]
    assert {(part.file, part.rank) for part in parts} == {(f"__{rank}_0.distcp", rank) for rank in range(3)}
    assert {part.file for part in parts} == {path.name for path in checkpoint.glob("*.distcp")}


def test_which_rank_wrote_which_rows(runs):
    entries = {entry.name: entry for entry in read_index(runs["fsdp-auto-wrap", "fsdp2"] / checkpoint_name(2))}
    # 10 rows over three ranks, rounded up: 4, 4 and the 2 that are left
    head = entries["model.head.weight"]
    assert sorted((part.rank, part.offsets, part.sizes) for part in head.shards) == [
        (0, (0, 0), (4, 64)),
        (1, (4, 0), (4, 64)),
        (2, (8, 0), (2, 64)),
    ]
    # One row: rank 0 has it, the others nothing
    positions = entries["model.positions"].shards
    assert [(part.rank, part.sizes) for part in positions if part.sizes[0]] == [(0, (1, 16, 64))]
