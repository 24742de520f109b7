"""The kept language model: small, whole, and what its record says."""

import json
import shlex
from dataclasses import fields

import pytest
import torch
from leftovers import PROJECT

from fsdp_helpers.__main__ import build_parser
from fsdp_helpers.checkpointing.hugging_face import load_hugging_face, read_config
from fsdp_helpers.config import TrainConfig
from fsdp_helpers.data import evaluation_batches
from fsdp_helpers.llama import Llama
from fsdp_helpers.shapes import BYTE_LLAMA, llama_from_config
from fsdp_helpers.text import read_text, text_dataset
from fsdp_helpers.training.loop import evaluate

FOLDER = PROJECT / "notebooks" / "reference" / "language"
WHERE = {"checkpoint_dir", "checkpoint_every", "keep_last", "resume", "export"}  # do not change what is learned


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads((FOLDER / "record.json").read_text())


def test_it_is_small_and_in_several_files():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 8_000_000
    index = json.loads((FOLDER / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in FOLDER.glob("*.safetensors")}
    assert len(set(index["weight_map"].values())) == 3


def test_the_command_is_that_of_the_record(record):
    (command,) = [line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("python -m ")]
    options = vars(build_parser().parse_args(shlex.split(command)[3:]))
    given = {field.name: options[field.name] for field in fields(TrainConfig) if field.name not in WHERE}
    assert given == {name: value for name, value in record["config"].items() if name not in WHERE}
    assert options["world_size"] == record["world_size"] == 2
    assert record["sample"].startswith("The ")
    readme = (FOLDER / "README.md").read_text()
    assert f"Python {record['versions']['python']}" in readme and record["data_source"].removeprefix("text ") in readme
    assert f"{record['epochs'][-1]['test_loss']:.4f}" in readme


def test_it_predicts_as_its_record_says(record):
    """On the text of the record, which other versions of Python do not have."""
    text = read_text()
    if text.source != record["data_source"]:
        pytest.skip(f"this Python has {text.source}; the record is of {record['data_source']}")
    model = Llama(llama_from_config(read_config(FOLDER)))
    assert model.shape == BYTE_LLAMA
    load_hugging_face(model, FOLDER)
    test = text_dataset(text, context=BYTE_LLAMA.context).test
    with torch.no_grad():
        loss, correct, count = evaluate(model, evaluation_batches(test, rank=0, world_size=1, batch_size=50)).tolist()
    last = record["epochs"][-1]
    assert (loss / count, correct / count) == pytest.approx((last["test_loss"], last["test_accuracy"]), abs=1e-4)
