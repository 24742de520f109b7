"""Folders in Hugging Face's layout: written by any strategy, read by ranks that keep rows, refused if they do not fit."""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import workers_for_tests as workers
from pretrained import load_hugging_face, read_config
from programs import Killed
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from fsdp_helpers.checkpointing.folder import CheckpointError
from fsdp_helpers.checkpointing.pretrained_folder import save_hugging_face
from fsdp_helpers.config import TrainConfig
from fsdp_helpers.models.llama import Llama
from fsdp_helpers.models.shapes import BYTE_LLAMA, config_of_llama, llama_from_config
from fsdp_helpers.ranks.launch import launch

SETTINGS = {"model": "llama", "global_batch_size": 6, "train_images": 18, "test_images": 4, "clip_norm": 1.0}
RUNS = [("local", "fsdp2", 1), ("fsdp-auto-wrap", "fsdp1", 2), ("fsdp-auto-wrap", "fsdp2", 3)]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Runs of three strategies: losses, units, the folder each has written, and what the model says."""
    folder = tmp_path_factory.mktemp("exported")
    runs = []
    for number, (strategy, api, world_size) in enumerate(RUNS):
        out = folder / f"run-{number}"
        config = TrainConfig(
            strategy=strategy, api=api, export=str(out), sample="x" if not number else None, **SETTINGS
        )
        worker = (workers.with_constants, "fsdp_helpers.training.worker", {"SAMPLE_BYTES": 8}, workers.train_worker)
        record = launch(*worker, config, world_size=world_size, device="cpu")[0]
        runs.append((record, out))
    return runs


def test_every_strategy_learns_the_same_and_writes_it(exported):
    (first, folder), *others = exported
    values = read_all(folder)
    assert len(first.step_losses) == 3 and first.step_losses[-1] < first.step_losses[0] - 0.4  # it learns
    assert first.sample.startswith("x") and len(first.sample) > 1
    for record, other in others:
        assert record.step_losses == pytest.approx(first.step_losses, abs=1e-4)
        assert (record.data_source, record.epochs[0].test_images) == (first.data_source, 4 * BYTE_LLAMA.context)
        found = read_all(other)
        assert found.keys() == values.keys()
        assert all(torch.allclose(found[name], values[name], atol=1e-4) for name in values)


def test_units_leave_the_tied_table_to_the_root(exported):
    """Of each layer attention and the hidden layer, both above 20,000 parameters; the table has 32,768, but is tied."""
    assert exported[1][0].ranks[0].num_units == exported[2][0].ranks[0].num_units == 4 * 6 + 1


def test_the_layout(exported):
    _, folder = exported[2]
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", *names, "model.safetensors.index.json"]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(names)
    assert index["metadata"]["total_size"] == 1_214_080 * 4
    assert "lm_head.weight" not in index["weight_map"] and len(index["weight_map"]) == 6 * 9 + 2
    with safe_open(folder / names[0], framework="pt") as file:
        assert file.keys()
    assert llama_from_config(read_config(folder)) == BYTE_LLAMA
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == []


def test_ranks_read_their_own_rows(exported):
    _, folder = exported[0]
    found = launch(workers.load_llama, str(folder), world_size=3, device="cpu")
    for differences, shard_values in found:
        assert differences == []
        assert shard_values < 1_214_080 / 3 + 5_000  # rows are cut evenly, but for the last rank's


def test_an_existing_folder_is_left_alone(tmp_path):
    with pytest.raises(CheckpointError, match="already exists; give the name of a new folder"):
        save_hugging_face(Llama(BYTE_LLAMA), tmp_path, config_of_llama(BYTE_LLAMA))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_appears_when_it_is_whole(tmp_path, monkeypatch):
    """What a killed process leaves is not taken for a model, and does not hinder the next save."""
    model, config = Llama(BYTE_LLAMA), config_of_llama(BYTE_LLAMA)

    def save_half(tensors, storage_writer) -> None:
        (storage_writer.path.parent / "half.safetensors").write_bytes(b"half")
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(dcp, "save", save_half)
        save_hugging_face(model, tmp_path / "model", config)
    assert not (tmp_path / "model").exists()
    save_hugging_face(model, tmp_path / "model", config)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert "half.safetensors" not in os.listdir(tmp_path / "model")


@pytest.mark.parametrize(
    "part",
    [
        # Torch raises a BaseException here, which no `except Exception` of a caller would stop.
        (HuggingFaceStorageWriter, "write_data"),
        (Path, "mkdir"),
        (Path, "write_text"),
    ],
)
def test_a_failed_export_says_why_and_leaves_nothing(part, tmp_path, monkeypatch):

    def full(*args, **kwargs) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(*part, full)
    with pytest.raises(CheckpointError, match="model: rank 0 couldn't write the model: no space left"):
        save_hugging_face(Llama(BYTE_LLAMA), tmp_path / "model", config_of_llama(BYTE_LLAMA))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("method", ["mkdir", "rename"])
def test_if_rank_0_cannot_begin_or_finish_no_rank_waits_for_it(method, tmp_path):
    said = launch(workers.export_in_vain, str(tmp_path / "model"), method, world_size=2, device="cpu", timeout_s=60)
    assert said[0] == said[1] and said[0].endswith("rank 0 couldn't write the model: no space left")
    assert os.listdir(tmp_path) == []


@pytest.mark.tools
def test_transformers_reads_the_folder(exported):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[tools]'")
    _, folder = exported[2]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ours = Llama(BYTE_LLAMA)
    load_hugging_face(ours, folder)
    numbers = torch.arange(64).view(2, 32)
    assert torch.allclose(ours(numbers), theirs(numbers).logits, atol=1e-5)


def read_all(folder) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
