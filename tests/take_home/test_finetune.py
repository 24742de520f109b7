"""finetune.py: a model of a different shape, a text of one's own, two ranks, then three; read back by the package."""

import json
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from programs import Killed
from take_home_workers import load_script, run_main
from torch import nn
from torch.distributed import HashStore, TCPStore

from fsdp_helpers.checkpointing.hugging_face import load_hugging_face, read_config, save_hugging_face
from fsdp_helpers.models.llama import IGNORED, Llama
from fsdp_helpers.models.shapes import LlamaShape, RopeScaling, config_of_llama, llama_from_config
from fsdp_helpers.ranks.launching.launch import launch

SHAPE = LlamaShape(
    width=24, depth=3, num_heads=6, num_kv_heads=2, mlp_width=40, vocabulary=256, context=64, rope_base=500.0
)


def run(world_size: int, *arguments) -> dict[int, float]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = tuple(map(str, arguments))
    found = launch(run_main, "finetune.py", store.port, words, world_size=world_size, device="cpu", timeout_s=240)
    assert found[1:] == [""] * (world_size - 1)  # rank 0 alone prints
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+)  loss (\S+)$", found[0], re.MULTILINE)}


LIKE_LLAMA_32 = replace(
    SHAPE,
    tied=True,
    rope_scaling=RopeScaling(factor=32.0, low_freq_factor=0.1, high_freq_factor=4.0, original_context=64),
)


@pytest.mark.parametrize("shape", [SHAPE, LIKE_LLAMA_32], ids=["plain", "tied and stretched"])
def test_two_ranks_then_three(shape, tmp_path):
    """The one that is tied is the harder to save and to load, so it alone is stopped and goes on, on three ranks."""
    torch.manual_seed(0)
    model = Llama(shape)
    save_hugging_face(model, tmp_path / "model", config_of_llama(shape), num_files=2)
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Line {number}: " + "so it goes. " * (number % 5) for number in range(40)))

    newest = tmp_path / "run"
    right = run(2, tmp_path / "model", text, newest, 6)
    if shape.tied:
        newest = tmp_path / "again"
        first = run(2, tmp_path / "model", text, newest, 4)
        rest = run(3, tmp_path / "model", text, newest, 6)
        assert sorted(first) == [0, 1, 2, 3] and sorted(rest) == [4, 5]
        assert first | rest == pytest.approx(right, abs=1e-5)

    numbers, targets = batch_of_script(text)
    mean = model(numbers, targets) / (targets != IGNORED).sum()
    assert right[0] == pytest.approx(mean.item(), abs=1e-5)  # the package's Llama says the same of the first batch
    assert read_config(newest / "model")["dtype"] == "float32"
    tuned = Llama(llama_from_config(read_config(newest / "model")))
    load_hugging_face(tuned, newest / "model")
    assert (tuned(numbers, targets) / (targets != IGNORED).sum()).item() < right[0]


def batch_of_script(text):
    script = load_script("finetune.py")
    return script.load_batch(script.read_documents(text.parent, text, SHAPE.vocabulary), 0)


def test_the_gradient_is_clipped_before_the_update(tmp_path, monkeypatch):
    """To a length of 0: only AdamW's decay is left then. Losses do not tell, since Adam divides by the length."""
    model, text = Llama(SHAPE), tmp_path / "text.txt"
    save_hugging_face(model, tmp_path / "model", config_of_llama(SHAPE))
    text.write_text("So it goes.\n\nAnd so on.")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "init_process_group", lambda backend: None)  # by the script
    script = load_script("finetune.py")
    script.MAX_NORM = 0.0
    script.main(torch.device("cpu"), *map(str, (tmp_path / "model", text, tmp_path / "run", 1)))
    tuned = Llama(SHAPE)
    load_hugging_face(tuned, tmp_path / "run" / "model")
    for own, first in zip(tuned.parameters(), model.parameters(), strict=True):
        assert torch.allclose(own, first, rtol=0, atol=1e-5)  # a step moves a value by the learning rate, 3e-4


def test_a_kill_during_a_save_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    """Some files are written then; the next start must not take them for a checkpoint."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    script, model = load_script("finetune.py"), nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    script.save(model, optimizer, tmp_path / "step-00000004")

    def save_half(state: dict, checkpoint_id) -> None:
        checkpoint_id.mkdir()
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(dcp, "save", save_half)
        script.save(model, optimizer, tmp_path / "step-00000008")
    assert script.load_newest(model, optimizer, tmp_path) == 4
    script.save(model, optimizer, tmp_path / "step-00000008")  # over what is left
    assert script.load_newest(model, optimizer, tmp_path) == 8


CONFIG = {"model_type": "llama", "hidden_size": 24, "num_attention_heads": 6, "rms_norm_eps": 1e-6, "vocab_size": 256}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "gemma"}, "knows Llamas with plain positions"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "knows Llamas with plain positions"),
        ({"head_dim": 8}, "head_dim"),
        ({"attention_bias": True}, "biases"),
        ({}, "no safetensors files"),
    ],
)
def test_a_folder_that_it_cannot_read_is_refused(changes, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    if changes:
        (tmp_path / "model.safetensors").touch()
    with pytest.raises(SystemExit, match=message):
        load_script("finetune.py").read_config(tmp_path)


def test_a_vocabulary_beyond_bytes_needs_its_tokenizer(tmp_path):
    (tmp_path / "text.txt").write_text("one\n\ntwo")
    with pytest.raises(SystemExit, match="no tokenizer.json, and a vocabulary of 300"):
        load_script("finetune.py").read_documents(tmp_path, tmp_path / "text.txt", 300)
