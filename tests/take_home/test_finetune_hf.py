"""finetune_hf.py: models of `transformers`, made on the spot, trained on shared ranks and in one process."""

import json
import math
import re
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[tools]'")

import torch
import torch.nn.functional as F
from hf_models import CONTEXT, END, make_model, write_chats, write_text
from hf_workers import Seen, run_each
from safetensors import safe_open
from safetensors.torch import load_file
from take_home_workers import load_script
from torch.distributed import TCPStore
from transformers import AutoModelForCausalLM

from fsdp_helpers.ranks.launching.launch import launch

pytestmark = pytest.mark.tools
SCRIPT = load_script("finetune_hf.py")
STEPS = 10
SETTINGS = ["--batch", 6, "--steps", STEPS, "--lr", 2e-3, "--warmup", 3, "--decay", 0.1, "--save-every", 4]
SETTINGS += ["--chunk", 40, "--test-every", 5]


def launch_runs(runs: dict[str, list], world_size: int) -> dict[str, list[Seen]]:
    """Name -> what each rank saw of that run; all of them in one launch."""
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in runs]
    ports = [store.port for store in stores]
    lines = [list(map(str, words)) for words in runs.values()]
    found = launch(run_each, ports, lines, world_size=world_size, device="cpu", timeout_s=400)
    return {name: list(seen) for name, seen in zip(runs, zip(*found, strict=True), strict=True)}


def notes(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    return [note["loss"] for note in notes(run)]


# ---------------------------------------------------------------- one process, one document at a time


def train_alone(folder: Path, run: Path, words: list, model=None) -> tuple[list[float], torch.nn.Module]:
    """The losses and the model of one process that computes one document at a time: the answer of a page of code."""
    arguments = SCRIPT.read_arguments(list(map(str, words)))
    arguments.packed, arguments.length = not arguments.padded, arguments.length or CONTEXT
    rows = SCRIPT.Rows(run / "tokens.safetensors", arguments)  # which documents a step has; their tokens are looked at
    model = model or AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train()
    matrices = [one for one in model.parameters() if one.requires_grad and one.dim() > 1]
    vectors = [one for one in model.parameters() if one.requires_grad and one.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": arguments.decay}, {"params": vectors, "weight_decay": 0.0}]
    )
    found = []
    for step in range(arguments.steps):
        documents = [document for row in rows.of_step(step, arguments.batch) for document in row]
        pairs = [tokens_of(rows, document) for document in documents]
        num_learned = sum((targets != -100).sum().item() for _, targets in pairs)
        total = 0.0
        for tokens, targets in pairs:
            logits = model(tokens[None]).logits[0].float()
            loss = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / num_learned
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        up = min(1.0, (step + 1) / arguments.warmup)
        done = max(0.0, (step - arguments.warmup) / (arguments.steps - arguments.warmup))
        down = 0.1 + 0.45 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = arguments.lr * (up if step < arguments.warmup else down)
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return found, model.eval()


def tokens_of(rows, document: int) -> tuple[torch.Tensor, torch.Tensor]:
    first, last = rows.ends[document : document + 2]
    tokens = rows.file.get_tensor("tokens")[first:last].long()
    learned = rows.file.get_tensor("learned")[first:last]
    return tokens[:-1], torch.where(learned[1:], tokens[1:], -100)


@torch.no_grad()
def logits_of(model: torch.nn.Module) -> torch.Tensor:
    return model(torch.arange(1, 33).view(2, 16)).logits


# ---------------------------------------------------------------- the runs that the fast tests share

MODELS = {
    "llama": ("llama", torch.float32, {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", torch.bfloat16, {"tie_word_embeddings": True}),
    "gemma3": ("gemma3", torch.float32, {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", torch.float32, {"tie_word_embeddings": True}),
    "gpt2": ("gpt2", torch.float32, {}),
    "phi3": ("phi3", torch.bfloat16, {"tie_word_embeddings": False}),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    for name, (kind, dtype, own) in MODELS.items():
        make_model(kind, folder / name, dtype, **own)
    write_text(folder / "text.txt")
    write_chats(folder / "chats.jsonl")
    return folder


def words_of(home: Path, model: str, run: str, data: str = "text.txt", *more) -> list:
    return [home / model, home / data, "--out", home / run, *SETTINGS, *more]


@pytest.fixture(scope="module")
def on_two(home) -> dict[str, list[Seen]]:
    runs = {name: words_of(home, name, f"{name}-2") for name in MODELS}
    runs["padded"] = words_of(home, "llama", "padded", "text.txt", "--padded", "--micro-batch", 2)
    runs["chats"] = words_of(home, "llama", "chats", "chats.jsonl")
    runs["lora"] = words_of(home, "qwen3", "lora", "text.txt", "--lora-rank", 4)
    runs["lora gpt2"] = words_of(home, "gpt2", "lora-gpt2", "text.txt", "--lora-rank", 2, "--lora-alpha", 3)
    return launch_runs(runs, 2)


@pytest.mark.parametrize("name", MODELS)
def test_ten_steps_equal_those_of_one_process(name, home, on_two):
    right, model = train_alone(home / name, home / f"{name}-2", words_of(home, name, f"{name}-2"))
    assert losses(home / f"{name}-2") == pytest.approx(right, abs=1e-5)
    assert right[-1] < right[0] - 0.1
    kind, dtype, own = MODELS[name]
    exported = home / f"{name}-2" / "model"
    tuned = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    if dtype == torch.bfloat16:
        model = model.to(dtype).float()
    assert torch.allclose(logits_of(tuned), logits_of(model), atol=1e-4 if dtype == torch.float32 else 0.05)
    assert {tensor.dtype for path in exported.glob("*.safetensors") for tensor in load_file(path).values()} == {dtype}
    side = {path.name for path in (home / name).iterdir() if ".safetensors" not in path.name}
    assert side == {path.name for path in exported.iterdir() if ".safetensors" not in path.name}
