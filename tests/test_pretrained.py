"""The kept language model: small, whole, and what its record says."""

import json
import shlex
from dataclasses import fields

import pytest
import torch
from leftovers import PROJECT
from pretrained import load_hugging_face, read_config
from runs import main_in_process

from fsdp_helpers.__main__ import build_parser
from fsdp_helpers.config import TrainConfig
from fsdp_helpers.data.images import evaluation_batches
from fsdp_helpers.data.text import read_text, text_dataset
from fsdp_helpers.models.llama import Llama
from fsdp_helpers.models.shapes import BYTE_LLAMA, llama_from_config
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


def the_command() -> list[str]:
    """Return the arguments of the one command in the README that makes the model."""
    (command,) = [line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("python -m ")]
    return shlex.split(command)[3:]


def test_the_command_is_that_of_the_record(record):
    options = vars(build_parser().parse_args(the_command()))
    given = {field.name: options[field.name] for field in fields(TrainConfig) if field.name not in WHERE}
    # The record says in full what was then the default; with one micro-batch there is nothing to hold back.
    recorded = record["config"] | {"sync_micro_batches": None}
    assert given == {name: value for name, value in recorded.items() if name not in WHERE}
    assert options["world_size"] == record["world_size"] == 2
    assert record["sample"].startswith("The ")
    readme = (FOLDER / "README.md").read_text()
    assert f"Python {record['versions']['python']}" in readme and record["data_source"].removeprefix("text ") in readme
    assert f"{record['epochs'][-1]['test_loss']:.4f}" in readme


@pytest.mark.long  # the sample takes half a minute: 400 forwards, each with its gathers
def test_one_command_trains_speaks_and_exports(record, tmp_path, monkeypatch, capsys):
    """The README's command, ended after four steps: the record's losses, the sample printed, a folder that is whole."""
    if read_text().source != record["data_source"]:
        pytest.skip(f"this Python has {read_text().source}; the record is of {record['data_source']}")
    monkeypatch.chdir(tmp_path)
    assert main_in_process(*the_command(), "--max-steps", "4", "--test-images", "2") == 0
    made = json.loads((tmp_path / "record.json").read_text())
    assert made["step_losses"] == pytest.approx(record["step_losses"][:4], abs=1e-3)
    assert made["sample"].startswith("The ") and made["sample"] in capsys.readouterr().out
    model = Llama(llama_from_config(read_config(tmp_path / "language")))
    load_hugging_face(model, tmp_path / "language")
    kept = {path.name for path in FOLDER.iterdir()} - {"README.md", "record.json", "transformers.json"}
    assert {path.name for path in (tmp_path / "language").iterdir()} == kept
    test = text_dataset(read_text(), context=BYTE_LLAMA.context, test_sequences=2).test
    with torch.no_grad():
        loss, _, count = evaluate(model, evaluation_batches(test, rank=0, world_size=1, batch_size=2)).tolist()
    assert loss / count == pytest.approx(made["epochs"][-1]["test_loss"], abs=1e-5)  # the model after those steps


@pytest.mark.tools
def test_transformers_reads_it_as_the_kept_record_says():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[tools]'")
    kept = json.loads((FOLDER / "transformers.json").read_text())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(FOLDER).eval()
    ours = Llama(llama_from_config(read_config(FOLDER)))
    load_hugging_face(ours, FOLDER)
    numbers = torch.tensor([list(kept["text"].encode())])
    with torch.no_grad():
        assert torch.allclose(theirs(numbers).logits, ours(numbers), rtol=0, atol=1e-5)
        said = theirs.generate(numbers, max_new_tokens=60, do_sample=False, pad_token_id=0)[0].tolist()
    assert bytes(said).decode(errors="replace") == kept["continued"]


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
