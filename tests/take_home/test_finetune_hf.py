"""finetune_hf.py: models of `transformers`, made on the spot, trained on shared ranks and in one process."""

import fcntl
import functools
import json
import math
import os
import random
import re
import signal
import sys
from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import killed_at
import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[tools]'")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from faked_hosts import CHOICES, check_choice, flock_of_nfs
from finetune_workers import Poison
from hf_models import CONTEXT, END, WORDS, config_of, make_model, make_tokenizer, write_chats, write_text
from hf_workers import CHUNK, STOP, Seen, run_each
from leftovers import PROJECT
from programs import has_ended, shares_a_lock, wait_until
from runs import main_in_process
from safetensors.torch import load_file, save_file
from take_home_workers import FOLDER, load_script
from torch.distributed import HashStore, TCPStore
from torchrun_jobs import one_agent, torchrun_job, wait_for_output
from transformers import AutoModelForCausalLM

from fsdp_helpers.data.text import docstring_documents
from fsdp_helpers.ranks.launch import launch

pytestmark = pytest.mark.tools
SCRIPT = load_script("finetune_hf.py")
STEPS = 10
SETTINGS = ["--batch", 4, "--steps", STEPS, "--lr", 2e-3, "--warmup", 3, "--decay", 0.1, "--save-every", 4]
SETTINGS += ["--test-every", 5]
KINDS = {"nan": math.nan, "inf": math.inf}
MOMENTS = {"first": {"step": 0}, "middle": {"step": 5}, "last": {"step": STEPS - 1}}
MOMENTS["SIGTERM"] = {"step": 6, "with_sigterm": True}
POISONS = {
    f"{base}, {kind} {moment}": Poison(value, **where)
    for base in ("llama", "lora")
    for kind, value in KINDS.items()
    for moment, where in MOMENTS.items()
}
FAST_POISONS = ("llama, nan first", "llama, inf last", "llama, inf SIGTERM", "lora, nan middle", "lora, inf last")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tiny tensors are computed faster by one, above all where the cores are in use."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def launch_runs(runs: dict[str, list], world_size: int, *, traced: bool = False) -> dict[str, list[Seen]]:
    """Name -> what each rank saw of that run; all of them in one launch."""
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in runs]
    ports = [store.port for store in stores]
    lines = [list(map(str, words)) for words in runs.values()]
    changes = [
        {
            "stop": name.startswith("stopped"),
            "padded": name == "padded",
            "traced": traced,
            "poison": POISONS.get(name),
            "judged": name == "judged",
        }
        for name in runs
    ]
    found = launch(run_each, ports, lines, changes, world_size=world_size, device="cpu", timeout_s=400)
    return {name: list(seen) for name, seen in zip(runs, zip(*found, strict=True), strict=True)}


def notes(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    return [note["loss"] for note in notes(run)]


# ---------------------------------------------------------------- one process, one document at a time


def train_alone(folder: Path, run: Path, words: list, model=None) -> tuple[list[float], torch.nn.Module]:
    """The losses and the model of one process that computes one document at a time: the answer of a page of code."""
    rows = rows_of(
        words, packed=not run.name.startswith(PADDED)
    )  # which documents a step has; their tokens are looked at
    arguments = SCRIPT.read_arguments(list(map(str, words)))
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


def rows_of(words: list, *, packed: bool = True):
    """The rows of a run that is done."""
    arguments = SCRIPT.read_arguments(list(map(str, words)))
    arguments.packed, arguments.length = packed, CONTEXT
    return SCRIPT.Rows(arguments)


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
    "opt": ("opt", torch.float32, {}),
    "phi3": ("phi3", torch.bfloat16, {"tie_word_embeddings": False}),
}
PADDED = ("padded", "opt")  # OPT's attention doesn't keep the documents of a row apart
LONG = ("gemma2", "phi3")  # part of the long evidence
FAST = [name for name in MODELS if name not in LONG]


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


def poisoned_runs(home: Path, names: Iterable[str]) -> dict[str, list]:
    """Each run with its poison, and the run after it in the same folder."""
    runs = {}
    for name in names:
        base, flags = ("llama", []) if name.startswith("llama") else ("qwen3", ["--lora-rank", 4])
        words = words_of(home, base, name.replace(", ", "-").replace(" ", "-"), "text.txt", *flags)
        runs |= {name: words, f"after {name}": words}
    return runs


@pytest.fixture(scope="module")
def on_two(home) -> dict[str, list[Seen]]:
    runs = {name: words_of(home, name, f"{name}-2") for name in FAST}
    runs["padded"] = words_of(home, "llama", "padded", "text.txt", "--micro-batch", 2)
    runs["chats"] = words_of(home, "llama", "chats", "chats.jsonl")
    runs["lora"] = words_of(home, "qwen3", "lora", "text.txt", "--lora-rank", 4)
    runs["lora gpt2"] = words_of(home, "gpt2", "lora-gpt2", "text.txt", "--lora-rank", 2)
    runs["stopped"] = words_of(home, "llama", "again-on-2")
    runs["stopped, for 3"] = words_of(home, "llama", "again-on-3")
    runs["stopped, with lora"] = words_of(home, "qwen3", "lora-again", "text.txt", "--lora-rank", 4)
    runs["again on 2"] = words_of(home, "llama", "again-on-2")
    runs |= poisoned_runs(home, FAST_POISONS)
    runs["judged"] = words_of(home, "llama", "judged")
    runs["a new rate"] = words_of(home, "llama", "again-on-2", "text.txt", "--lr", 1e-3, "--steps", 11)
    return launch_runs(runs, 2)


@pytest.fixture(scope="module")
def others_on_two(home) -> dict[str, list[Seen]]:
    return launch_runs({name: words_of(home, name, f"{name}-2") for name in LONG}, 2)


@pytest.fixture(scope="module")
def on_three(home, on_two) -> dict[str, list[Seen]]:
    runs = {name: words_of(home, name, f"{name}-3") for name in ("llama", "opt")}
    runs |= {"again": words_of(home, "llama", "again-on-3")}
    runs["lora"] = words_of(home, "qwen3", "lora-again", "text.txt", "--lora-rank", 4)
    return launch_runs(runs, 3)


@pytest.fixture(scope="module")
def alone(home) -> Callable[[str], tuple[list[float], torch.nn.Module]]:
    """A model's name -> its losses and the trained model in one process, computed once."""
    return functools.cache(lambda name: train_alone(home / name, home / f"{name}-2", words_of(home, name, f"{name}-2")))


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_ten_steps_equal_those_of_one_process(name, home, alone, request):
    request.getfixturevalue("on_two" if name in FAST else "others_on_two")
    right, _ = alone(name)
    assert right[-1] < right[0] - 0.1
    assert_trained_as_alone(name, home, home / f"{name}-2", alone)


def assert_trained_as_alone(name: str, home: Path, run: Path, alone: Callable) -> None:
    """The losses, and what `transformers` loads: the same logits, the files' dtype, and all other files."""
    right, model = alone(name)
    assert losses(run) == pytest.approx(right, rel=0, abs=1e-6)
    _, dtype, _ = MODELS[name]
    tuned = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
    if dtype == torch.bfloat16:
        model = deepcopy(model).to(dtype).float()
    assert torch.allclose(logits_of(tuned), logits_of(model), atol=1e-4 if dtype == torch.float32 else 0.05)
    files = list((run / "model").iterdir())
    tensors = [one for path in files if path.suffix == ".safetensors" for one in load_file(path).values()]
    assert {tensor.dtype for tensor in tensors} == {dtype}
    side = {path.name for path in (home / name).iterdir() if ".safetensors" not in path.name}
    assert side == {path.name for path in files if ".safetensors" not in path.name}


def test_padded_rows_equal_one_document_at_a_time(home, on_two):
    """Two rows at a time, so that the shorter one is filled up; as many documents as rows."""
    right, _ = train_alone(home / "llama", home / "padded", words_of(home, "llama", "padded"))
    assert losses(home / "padded") == pytest.approx(right, abs=1e-5)
    assert "117 rows to train on, 3 held out, padded" in on_two["padded"][0].printed
    packed = int(re.search(r"(\d+) rows to train on, 1 held out, packed", on_two["llama"][0].printed)[1])
    assert packed < 40


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_three_ranks_equal_two(name, home, on_three):
    assert losses(home / f"{name}-3") == pytest.approx(losses(home / f"{name}-2"), rel=0, abs=1e-6)


def test_the_levers_are_there(home, on_two):
    seen = on_two["llama"][0]
    assert seen.units == ["LlamaDecoderLayer"] * 3 + ["TokenLoss"]  # and no unit for the head
    assert max(seen.chunks) == CHUNK and min(seen.chunks) < CHUNK  # tokens whose logits exist at a time
    micro_batches = STEPS * 2  # each rank has two of the four rows
    assert 4 * micro_batches <= seen.recomputed <= 5 * micro_batches  # three layers, and the one or two chunks of a row
    assert seen.saves == [1, 4, 8, 10]
    assert [path.name for path in sorted((home / "llama-2").glob("step-*"))] == ["step-00000008", "step-00000010"]
    assert not list((home / "llama-2").glob("unfinished*"))


def test_what_is_logged(home, on_two):
    printed = on_two["llama"][0].printed
    assert printed.startswith("2 ranks on CPU, computing in float32\n")
    assert "4 units: 3 of LlamaDecoderLayer, and the root" in printed
    model = AutoModelForCausalLM.from_pretrained(home / "llama")
    num_parameters = sum(one.numel() for one in model.parameters())
    assert f"{num_parameters:,} parameters, {num_parameters:,} trained" in printed
    kept = f"rank 0 keeps {16 * num_parameters / 2 / 1e6:.2f} MB of parameters, gradients and moments"
    assert f"{kept}; shards in float32\n" in printed
    assert on_two["llama"][1].printed == ""
    found = notes(home / "llama-2")
    assert [note["step"] for note in found] == list(range(1, STEPS + 1))
    assert [note["step"] for note in found if "held_out_loss" in note] == [5, 10]
    assert found[-1]["held_out_loss"] < found[4]["held_out_loss"]
    assert all(note["tokens_per_s"] > 0 and note["peak_bytes"] > 1e8 and note["gradient_norm"] > 0 for note in found)


# ---------------------------------------------------------------- stopped, and started again


def test_a_run_that_was_asked_to_end_goes_on(home, on_two, on_three):
    """Bitwise on as many ranks, up to rounding on one more."""
    right = losses(home / "llama-2")
    assert "ended by a signal" in on_two["stopped"][0].printed and on_two["stopped"][0].saves == [1, 4, STOP]
    assert "continuing after step 5" in on_two["again on 2"][0].printed
    assert losses(home / "again-on-2")[: len(right)] == right
    assert losses(home / "again-on-3") == pytest.approx(right, abs=1e-5)
    one, other = (load_file(next((home / name / "model").glob("*.safetensors"))) for name in ("llama-2", "again-on-3"))
    assert all(torch.allclose(one[name], other[name], atol=1e-5) for name in one)
    assert losses(home / "lora-again") == pytest.approx(losses(home / "lora"), abs=1e-5)


def test_settings_that_change_are_obeyed(home, on_two):
    printed = on_two["a new rate"][0].printed
    assert "lr was 0.002 until now, and is 0.001 from here on" in printed and "steps was 10 until now" in printed
    assert notes(home / "again-on-2")[-1]["lr"] == pytest.approx(
        1e-3 * 0.1 + 1e-3 * 0.45 * (1 + math.cos(math.pi * 7 / 8))
    )


@pytest.mark.parametrize(
    "name, old, new",
    [("batch", 4, 8), ("length", 64, 32), ("seed", 0, 1), ("digest", "a", "b"), ("packed", True, False)],
)
def test_settings_that_change_are_refused(name, old, new, tmp_path, capsys):
    words = ["llama", "text.txt", "--out", tmp_path, *SETTINGS, "--length", CONTEXT]
    arguments = SCRIPT.read_arguments(list(map(str, words)))
    arguments.packed, arguments.digest = True, "a"
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    SCRIPT.check_resumed(arguments)
    before = (tmp_path / "settings.json").read_text()
    (tmp_path / "step-00000004").mkdir()
    setattr(arguments, name, new)
    is_data = name == "digest"
    told = "a different model, tokenizer or data" if is_data else f"started with {name} {old}, not {new}"
    message = refused(capsys, SCRIPT.check_resumed, arguments)
    assert told in message and ("--micro-batch" in message) is (name == "packed")
    assert (tmp_path / "settings.json").read_text() == before


# ---------------------------------------------------------------- values that aren't finite


@pytest.mark.parametrize("name", FAST_POISONS)
def test_a_gradient_that_is_not_finite_ends_the_run_and_harms_nothing(name, home, on_two):
    assert_harmless(name, home, on_two)


def assert_harmless(name: str, home: Path, seen: dict[str, list[Seen]]) -> None:
    """One line, status 1; what was saved stays, a save under way is completed, and the next run continues from there."""
    poison, undisturbed = POISONS[name], home / ("llama-2" if name.startswith("llama") else "lora")
    run = home / name.replace(", ", "-").replace(" ", "-")
    saved = [step for step in (1, 4, 8) if step <= poison.step]
    saved = saved[-2:] if len(saved) == 3 else saved[-1:]  # step 1 is removed when there's a newer one
    assert [one.status for one in seen[name]] == [1, 1]
    (line,) = (line for line in seen[name][0].printed.splitlines() if line.startswith("finetune_hf.py: "))
    said = rf"finetune_hf.py: step {poison.step + 1}: the loss is \d\.\d+, and the gradient's norm is {poison.value}"
    newest = run / f"step-{saved[-1]:08d}" if saved else None
    assert re.fullmatch(f"{said}; the newest good checkpoint is {newest}", line), line
    assert seen[name][1].printed == ""
    folders = [one for one in seen[name][0].left if "." not in one]
    assert folders == [f"step-{step:08d}" for step in saved]
    again = seen[f"after {name}"][0]
    assert again.status == 0 and ("continuing after" in again.printed) is bool(saved)
    right = losses(undisturbed)
    assert losses(run) == right[: poison.step] + right[saved[-1] if saved else 0 :]
    assert_the_same_export(run, undisturbed)


def assert_the_same_export(run: Path, undisturbed: Path) -> None:
    (path,) = (
        undisturbed.glob("model/*.safetensors") if (undisturbed / "model").exists() else undisturbed.glob("adapter/*s")
    )
    one, right = load_file(run / path.relative_to(undisturbed)), load_file(path)
    assert all(torch.equal(one[key], right[key]) and right[key].isfinite().all() for key in right)


@pytest.mark.long
def test_no_moment_and_no_value_harms_anything(home, on_two):
    others = [name for name in POISONS if name not in FAST_POISONS]
    seen = launch_runs(poisoned_runs(home, others), 2)
    for name in others:
        assert_harmless(name, home, seen)


def test_nothing_is_exported_after_a_held_out_loss_that_is_not_finite(home, on_two):
    judged = on_two["judged"]
    assert [one.status for one in judged] == [1, 1] and not (home / "judged" / "model").exists()
    newest = home / "judged" / "step-00000004"
    assert (
        f"finetune_hf.py: step 5: the held-out loss is nan; the newest good checkpoint is {newest}" in judged[0].printed
    )


# ---------------------------------------------------------------- saves


def checkpoints_of(run: Path, **changes) -> object:
    """Without a model: a checkpoint holds one tensor. In a group of one rank."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    script = load_script("finetune_hf.py")
    script.state_of = lambda *_: ({"model": {"weight": torch.ones(2)}}, {})
    settings = {"out": run, "keep": 2, "offload": False, "save_every": (None, 1200.0)} | changes
    return script.Checkpoints(SimpleNamespace(**settings), dist.group.WORLD)


def test_the_first_save_comes_after_step_1_and_then_by_the_clock(tmp_path, monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(SCRIPT.time, "monotonic", lambda: now_s[0])
    checkpoints = checkpoints_of(tmp_path)
    due = []
    for now_s[0], step in ((0.0, 1), (1199.0, 2), (1200.0, 3)):
        due.append(checkpoints.is_due(step))
    checkpoints.begin(None, None, 3)
    due.append(checkpoints.is_due(4))
    checkpoints.finish()
    assert due == [True, False, True, False]


def test_keep_does_not_count_the_first_save(tmp_path):
    checkpoints, found = checkpoints_of(tmp_path), []
    for step in (1, 5, 9, 12):
        checkpoints.begin(None, None, step)
        assert {path.name for path in tmp_path.glob("unfinished*")} <= {f"unfinished-step-{step:08d}"}
        checkpoints.finish()
        found.append(sorted(int(path.name[-8:]) for path in tmp_path.glob("step-*")))
    assert found == [[1], [5], [5, 9], [9, 12]]


def test_an_offloaded_state_is_saved_without_a_copy(tmp_path, monkeypatch):
    """In the background, torch saves a copy, which would double what host memory has to hold."""
    monkeypatch.setattr(dcp, "async_save", None)
    checkpoints_of(tmp_path, offload=True).begin(None, None, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_the_newest_checkpoint_is_the_one_that_rank_0_finds(tmp_path, monkeypatch):
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    (tmp_path / "step-00000008").mkdir()
    monkeypatch.setattr(dist, "broadcast_object_list", lambda found: found.__setitem__(0, None))  # rank 0 sees none
    assert SCRIPT.load_newest(None, None, tmp_path) == 0


def test_the_digest_is_that_of_data_and_length_and_for_adapters_of_the_weights(home, tmp_path):
    data = write_text(tmp_path / "text.txt")

    def digest(*more) -> str:
        words = [
            home / "llama" if "--lora-rank" not in more else changed,
            data,
            "--out",
            tmp_path,
            "--length",
            32,
            *more,
        ]
        return SCRIPT.digest_of(SCRIPT.read_arguments(list(map(str, words))))

    changed = tmp_path / "changed"
    make_model("llama", changed, tie_word_embeddings=False)
    found = [digest(), digest("--length", 64), digest("--lora-rank", 4)]
    (path,) = changed.glob("*.safetensors")
    save_file({name: one + 1e-3 for name, one in load_file(path).items()}, path, metadata={"format": "pt"})
    found.append(digest("--lora-rank", 4))
    data.write_text(data.read_text() + " w1")
    assert len({*found, digest()}) == 5


# ---------------------------------------------------------------- conversations


def test_prompts_have_no_loss(home, on_two, tmp_path):
    right, _ = train_alone(home / "llama", home / "chats", words_of(home, "llama", "chats", "chats.jsonl"))
    assert losses(home / "chats") == pytest.approx(right, abs=1e-5)
    found = []
    for seed in (0, 1):
        data = write_chats(tmp_path / f"{seed}.jsonl", prompt_seed=seed)
        arguments = SCRIPT.read_arguments([str(home / "llama"), str(data), "--out", str(tmp_path)])
        arguments.length, arguments.packed, arguments.digest = CONTEXT, True, str(seed)
        SCRIPT.tokenize_once(arguments, make_tokenizer(), 64)
        rows = SCRIPT.Rows(arguments)
        found.append([rows.read(row) for row in rows.learned])
    (tokens, _, targets), (others, _, same) = found[0][0], found[1][0]
    assert not torch.equal(tokens, others) and torch.equal(targets, same)  # other prompts, the same targets


def test_an_answer_is_learned_with_its_end_and_nothing_else():
    messages = [("user", "w1 w2"), ("assistant", "w3"), ("user", "w4"), ("assistant", "w5 w6")]
    document = {"messages": [{"role": role, "content": content} for role, content in messages]}
    tokenizer = make_tokenizer()
    tokens, learned = SCRIPT.encode(SCRIPT.document_of(document, tokenizer), tokenizer)
    assert tokens == [62, 1, 2, 63, 3, END, 62, 4, 63, 5, 6, END]
    assert [token for token, own in zip(tokens, learned, strict=True) if own] == [3, END, 5, 6, END]
    document = {"prompt": "w1 w2", "completion": "w3 w4"}
    tokens, learned = SCRIPT.encode(SCRIPT.document_of(document, tokenizer), tokenizer)
    assert (tokens, learned) == ([1, 2, 3, 4, END], [False, False, True, True, True])
    tokens, learned = SCRIPT.encode(SCRIPT.document_of({"text": "w7 w8"}, tokenizer), tokenizer)
    assert (tokens, learned) == ([7, 8, END], [True] * 3)


@pytest.mark.parametrize(
    "entry, learned",
    [
        ({"messages": [("user", "w1"), ("assistant", "w2"), ("user", "w3")]}, [2, END]),  # nobody answers the last turn
        ({"messages": [("user", "w1"), ("assistant", "w2", 0), ("user", "w3"), ("assistant", "w4", 1)]}, [4, END]),
        (
            {"prompt": [("user", "w1"), ("assistant", "w2"), ("user", "w3")], "completion": [("assistant", "w4")]},
            [4, END],
        ),
        ({"messages": [("user", "w1"), ("assistant", "w2")], "tools": [{"name": "w5"}]}, [2, END]),
    ],
)
def test_what_the_data_mark_as_not_to_be_learned_is_not(entry, learned):
    def message(role, content, *weight):
        return {"role": role, "content": content, **({"weight": weight[0]} if weight else {})}

    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool.name }} {% endfor %}" + tokenizer.chat_template
    document = {name: [message(*turn) for turn in turns] if name != "tools" else turns for name, turns in entry.items()}
    tokens, own = SCRIPT.encode(SCRIPT.document_of(document, tokenizer), tokenizer)
    assert [token for token, is_own in zip(tokens, own, strict=True) if is_own] == learned
    assert (5 in tokens) == ("tools" in entry)


@pytest.mark.parametrize(
    "line, said",
    [
        ('{"text": 5}', '"text" is 5'),
        ('{"prompt": "w1", "completion": {}}', "two texts, or two lists of messages"),
        ('{"completion": "w1"}', "two texts, or two lists of messages"),
        ('{"prompt": "w1"}', "it has ['prompt']"),
        ('["w1"]', "it's a list"),
        ('{"messages": [{"role": "assistant", "content": "w1", "weight": 0.5}]}', "the weight 0.5"),
        ('{"text": "w1"', "Expecting"),
    ],
)
def test_bad_entries_are_named_by_their_line(line, said, tmp_path, capsys):
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"text": "w1"}}\n\n{line}\n')
    message = refused(capsys, list, SCRIPT.read_documents(path, make_tokenizer()))
    assert f"{path}, line 3: " in message and said in message


def test_a_template_that_rewrites_earlier_turns_is_told(tmp_path, capsys):
    """As those do that drop the thoughts of all answers except the last; the others aren't trained on."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ m.content }}", "{% if m.role == 'user' or loop.last %}w9 {% endif %}{{ m.content }}"
    )
    write_chats(tmp_path / "chats.jsonl", num_chats=3)
    arguments = SCRIPT.read_arguments(["model", str(tmp_path / "chats.jsonl"), "--out", str(tmp_path)])
    arguments.length, arguments.digest = CONTEXT, "digest"
    SCRIPT.tokenize_once(arguments, tokenizer, 64)
    said = capsys.readouterr().out
    assert "the chat template rewrites 3 of the assistant's earlier turns; we don't train on these" in said


# ---------------------------------------------------------------- adapters


@pytest.mark.parametrize("name, model, dtype_bytes", [("lora", "qwen3", 2), ("lora gpt2", "gpt2", 4)])
def test_adapters_equal_those_of_peft_in_one_process(name, model, dtype_bytes, home, on_two):
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install '.[tools]'")
    run = home / name.replace(" ", "-")
    adapter = run / "adapter"
    assert sorted(path.name for path in adapter.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    config = peft.LoraConfig.from_pretrained(adapter)
    assert config.lora_alpha / config.r == SCRIPT.SCALE
    config.inference_mode = False
    alone = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(home / model, dtype=torch.float32), config)
    with torch.no_grad():
        random = torch.Generator().manual_seed(0)
        for key, parameter in alone.named_parameters():
            if "lora_A" in key:
                torch.nn.init.kaiming_uniform_(parameter, a=math.sqrt(5), generator=random)
    right, alone = train_alone(home / model, run, words_of(home, model, run.name), alone)
    assert losses(run) == pytest.approx(right, abs=1e-5)
    base = AutoModelForCausalLM.from_pretrained(home / model, dtype=torch.float32)
    before = logits_of(base)
    loaded = peft.PeftModel.from_pretrained(base, adapter).eval()
    assert torch.allclose(logits_of(loaded), logits_of(alone), atol=1e-4)
    assert not torch.allclose(logits_of(loaded), before, atol=1e-2)
    tensors = load_file(adapter / "adapter_model.safetensors")
    num_trained = sum(tensor.numel() for tensor in tensors.values())
    num_frozen = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(home / model).parameters())
    for seen in on_two[name]:
        assert seen.frozen_kept
        assert seen.own_bytes == pytest.approx((dtype_bytes * num_frozen + 12 * num_trained) / 2, rel=0.02)  # padding
    saved = dcp.FileSystemReader(run / "step-00000010").read_metadata().state_dict_metadata
    assert saved and all(".lora_" in key for key in saved)  # nothing frozen


# ---------------------------------------------------------------- refused, in one line


def refused(capsys, call, *arguments) -> str:
    with pytest.raises(SystemExit) as ended:
        call(*arguments)
    message = capsys.readouterr().err
    assert ended.value.code == 2 and message.count("\n") == 1, message
    return message


def test_models_that_do_not_fit(tmp_path, capsys, home):
    experts = make_model("mixtral", tmp_path / "experts")
    capsys.readouterr()
    assert "mixture of experts" in refused(capsys, SCRIPT.read_config, experts)
    assert "no config.json" in refused(capsys, SCRIPT.read_config, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "none such"}')
    assert "none such" in refused(capsys, SCRIPT.read_config, tmp_path)
    arguments = SCRIPT.read_arguments([str(home / "llama"), "data", "--out", "out"])
    model = SCRIPT.build(SCRIPT.read_config(home / "llama"), arguments)
    files = SCRIPT.tensors_in_files(home / "llama")
    assert len(SCRIPT.match_files(model, home / "llama", files)) == len(files)
    lacking = {name: one for name, one in files.items() if name != "model.norm.weight"} | {
        "odd": files["model.norm.weight"]
    }
    message = refused(capsys, SCRIPT.match_files, model, home / "llama", lacking)
    assert "lack 1 tensors (model.norm.weight)" in message and "have 1 that the model lacks (odd)" in message
    odd = files | {"model.norm.weight": SCRIPT.FileTensor(file=1, name="model", dtype=torch.float32, shape=(31,))}
    assert "(31,), but (32,)" in refused(capsys, SCRIPT.match_files, model, home / "llama", odd)
    assert "no such class" in refused(capsys, SCRIPT.find_units, model, "Layer")
    assert list(SCRIPT.find_units(model, "LlamaMLP")) == [f"model.layers.{index}.mlp" for index in range(3)]


def test_a_head_that_is_tied_by_the_config_but_different_in_the_files_is_refused(home, tmp_path, capsys):
    """transformers wouldn't tie it; it isn't said which of the two is right."""
    folder = make_model("qwen3", tmp_path, tie_word_embeddings=True)
    (path,) = folder.glob("*.safetensors")
    model = SCRIPT.build(SCRIPT.read_config(folder), SCRIPT.read_arguments([str(folder), "data", "--out", "out"]))
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone()
    save_file(tensors, path)
    assert "lm_head.weight" not in SCRIPT.match_files(model, folder, SCRIPT.tensors_in_files(folder))
    tensors["lm_head.weight"][-1, -1] += 1e-3
    save_file(tensors, path)
    capsys.readouterr()
    message = refused(capsys, SCRIPT.match_files, model, folder, SCRIPT.tensors_in_files(folder))
    assert "config.json ties model.embed_tokens.weight and lm_head.weight, but they differ in the files" in message


def test_a_tensor_in_two_files_is_refused(tmp_path, capsys):
    """torch's reader would read both; which one wins depends on the order of files in the folder."""
    for name in ("model-00001-of-00001.safetensors", "older.safetensors"):
        save_file({"weight": torch.ones(2)}, tmp_path / name)
    twice = f"{tmp_path}: weight is in older.safetensors and in another file; move the wrong one out of the folder"
    assert twice in refused(capsys, SCRIPT.tensors_in_files, tmp_path)
    index = {"weight_map": {"weight": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert twice in refused(capsys, SCRIPT.tensors_in_files, tmp_path)
    save_file({"other": torch.ones(2)}, tmp_path / "older.safetensors")  # as some models have them, under other names
    assert list(SCRIPT.tensors_in_files(tmp_path)) == ["weight"]


@pytest.mark.parametrize("local_rank, num_lines", [("0", 1), ("1", 0)])
def test_each_machine_tells_why_it_ends(local_rank, num_lines, monkeypatch, capsys):
    """The second of two machines, each with two ranks; only there, something may be missing."""
    monkeypatch.setenv("RANK", str(2 + int(local_rank)))
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(SCRIPT.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(SCRIPT.signal, "signal", lambda number, handler: None)
    with pytest.raises(SystemExit) as ended:
        SCRIPT.refuse("text.txt isn't a file")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "finetune_hf.py: text.txt isn't a file\n" * num_lines


def test_tokenizers_that_lack_something(tmp_path, capsys):
    assert "no tokenizer" in refused(capsys, SCRIPT.read_tokenizer, tmp_path, 64)
    assert SCRIPT.read_tokenizer(tmp_path, 256)("ab").input_ids == [97, 98]  # bytes
    make_tokenizer(end=False).save_pretrained(tmp_path)
    assert "no end-of-text token" in refused(capsys, SCRIPT.read_tokenizer, tmp_path, 64)
    data = tmp_path / "chats.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "w1"}]}')
    message = refused(capsys, list, SCRIPT.read_documents(data, make_tokenizer(chat=False)))
    assert "line 1" in message and "chat template" in message
    data.write_text('{"messages": [{"role": "assistant"}]}')
    assert "line 1" in refused(capsys, list, SCRIPT.read_documents(data, make_tokenizer()))  # the template's own error
    data.write_text('{"text": "w1"}\n{"story": "w2"}')
    assert "line 2: it has ['story']" in refused(capsys, list, SCRIPT.read_documents(data, make_tokenizer()))


def test_empty_and_long_documents(tmp_path, capsys):
    data = tmp_path / "text.txt"
    data.write_text("\ufeffw1 w2\n\n\n\n  \n\t\n" + " ".join(f"w{index}" for index in range(20)))
    arguments = SCRIPT.read_arguments(["model", str(data), "--out", str(tmp_path), "--length", "8", "--held-out", "0"])
    arguments.packed, arguments.digest = True, "first"
    SCRIPT.tokenize_once(arguments, make_tokenizer(), 64)
    assert "1 texts are split and 0 conversations are cut" in capsys.readouterr().out
    rows = SCRIPT.Rows(arguments)
    pairs = [tokens_of(rows, document) for document in range(len(rows.ends) - 1)]
    assert [len(tokens) for tokens, _ in pairs] == [2, 8, 8, 4]  # every pair of a token and the next one, once
    assert torch.cat([targets for _, targets in pairs[1:]]).tolist() == [*range(1, 20), END]
    SCRIPT.tokenize_once(arguments, None, 64)  # what is there is not made again
    data.write_text(" \n\n ")
    arguments.digest = "second"
    assert "nothing to train on" in refused(capsys, SCRIPT.tokenize_once, arguments, make_tokenizer(), 64)


def test_a_conversation_that_is_too_long_is_cut(tmp_path, capsys):
    data = tmp_path / "chats.jsonl"
    long, short = " ".join(["w1"] * 20), "w2"
    lines = [{"prompt": short, "completion": long}, {"prompt": long, "completion": short}]
    data.write_text("\n".join(map(json.dumps, lines)))
    arguments = SCRIPT.read_arguments(["model", str(data), "--out", str(tmp_path), "--length", "8"])
    arguments.digest = "digest"
    SCRIPT.tokenize_once(arguments, make_tokenizer(), 64)
    said = capsys.readouterr().out
    assert "1 with nothing to train on are left out" in said and "2 conversations are cut" in said


# ---------------------------------------------------------------- rows


def test_rows_hold_each_document_once_and_are_nearly_full():
    draw = random.Random(0)
    sizes = [draw.randint(1, 64) for _ in range(500)]
    rows = SCRIPT.pack(sizes, 64)
    assert sorted(document for row in rows for document in row) == list(range(500))
    filled = [sum(sizes[document] for document in row) for row in rows]
    assert max(filled) <= 64 and sum(filled) > 0.97 * 64 * len(rows)


def test_each_epoch_has_each_row_once(home, on_two):
    rows = rows_of(words_of(home, "llama", "llama-2"))
    stream = [tuple(row) for step in range(2 * len(rows.learned)) for row in rows.of_step(step, 3)]
    size = len(rows.learned)
    epochs = [stream[first : first + size] for first in range(0, len(stream), size)]
    assert all(sorted(epoch) == sorted(map(tuple, rows.learned)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_a_model_that_mixes_documents_is_padded():
    class Mixes(torch.nn.Module):
        def forward(self, tokens, positions):
            return tokens.cumsum(1)[..., None]

        def reshard(self):
            pass

    class Separates(Mixes):
        def forward(self, tokens, positions):
            return (tokens + positions)[..., None]

    class Decoder:
        def forward(self, position_ids):
            pass

    class SeparatesOneRow(Separates):  # as flash attention does
        def forward(self, tokens, positions):
            return (super() if len(tokens) == 1 else Mixes()).forward(tokens, positions)

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    for kind, answers in ((Mixes, (False, False)), (Separates, (True, True)), (SeparatesOneRow, (True, False))):
        loss = kind()
        loss.model = SimpleNamespace(config=config_of("llama"), get_decoder=lambda: Decoder)
        found = [SCRIPT.documents_are_apart(loss, torch.device("cpu"), num_rows) for num_rows in (1, 2)]
        assert tuple(found) == answers, kind


@pytest.mark.parametrize(
    "kind, own, said",
    [
        ("llama", {}, None),
        ("bert", {}, "BertLMHeadModel isn't causal: a token's output depends on later tokens"),
        ("roberta", {}, "RobertaForCausalLM: the loss in chunks is "),  # its positions begin at 2
        ("llama", {"values": math.nan}, "LlamaForCausalLM: the loss of its own logits is nan"),
        ("llama", {"vocab_size": 4}, "this script can't train LlamaForCausalLM: IndexError: "),
    ],
)
def test_a_model_is_trained_only_if_the_loss_is_that_of_its_own_logits(kind, own, said, capsys, monkeypatch):
    torch.manual_seed(0)
    loss = SCRIPT.TokenLoss(AutoModelForCausalLM.from_config(config_of(kind)))
    if "vocab_size" in own:  # a model whose own code fails
        loss.model.set_input_embeddings(torch.nn.Embedding(4, 32))
    if "values" in own:
        loss.model.get_output_embeddings().weight.data[0] = own["values"]
    loss.reshard = lambda: None
    monkeypatch.setattr(os, "_exit", sys.exit)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    if said:
        assert said in refused(capsys, SCRIPT.check_model, loss, torch.device("cpu"))
    else:
        SCRIPT.check_model(loss, torch.device("cpu"))
        assert loss.training


def test_the_model_is_tried_with_as_many_rows_as_a_micro_batch(home, on_two):
    assert (on_two["padded"][0].num_rows_tried, on_two["llama"][0].num_rows_tried) == (2, 1)


def test_settings_as_words():
    assert SCRIPT.read_interval("500") == (500, None) and SCRIPT.read_interval("20m") == (None, 1200.0)
    assert SCRIPT.read_arguments(["m", "d", "--out", "r", "--lr", "0"]).lr == 0.0
    found = SCRIPT.read_arguments(["m", "d", "--out", "r", "--lora-rank", "4"])
    assert (found.lr, found.save_every, found.device) == (2e-4, (None, 1200.0), "auto")
    for words in (["--batch", "0"], ["--held-out", "1"], ["--save-every", "soon"], ["--lora-rank", "-1"]):
        with pytest.raises(SystemExit) as ended:
            SCRIPT.read_arguments(["m", "d", "--out", "r", *words])
        assert ended.value.code == 2


@pytest.mark.parametrize("wanted, hosts, found", CHOICES)
def test_all_hosts_have_a_gpu_for_each_rank_or_none_has_any(wanted, hosts, found, monkeypatch, capsys):
    check_choice(SCRIPT, lambda: SCRIPT.choose_device(wanted), wanted, hosts, found, monkeypatch, capsys)


def test_the_learning_rate_worked_by_hand():
    arguments = SCRIPT.read_arguments(["m", "d", "--out", "r", "--lr", "1", "--warmup", "4", "--steps", "104"])
    found = [SCRIPT.learning_rate(step, arguments) for step in (0, 3, 4, 54, 104)]
    assert found == pytest.approx([0.25, 1, 1, 0.55, 0.1])


# ---------------------------------------------------------------- one run at a time


def test_the_lock_is_held_until_the_last_rank_ends(tmp_path, capsys):
    rank_0, rank_1, other = ((tmp_path / ".lock").open("a") for _ in range(3))
    SCRIPT.take(rank_0, tmp_path, fcntl.LOCK_EX)
    SCRIPT.take(rank_0, tmp_path, fcntl.LOCK_SH)
    SCRIPT.take(rank_1, tmp_path, fcntl.LOCK_SH)
    rank_0.close()  # rank 0 is dead, rank 1 lives on
    assert "another run is writing" in refused(capsys, SCRIPT.take, other, tmp_path, fcntl.LOCK_EX, 0.2)
    rank_1.close()
    SCRIPT.take(other, tmp_path, fcntl.LOCK_EX)
    other.close()


def test_what_a_killed_removal_left_is_removed_at_the_start(tmp_path, monkeypatch):
    """The lock is taken under NFS's rules."""
    leftovers = ("unfinished-removal-of-step-00000004", "unfinished-removal-of-model", "unfinished-step-00000012")
    for name in (*leftovers, "step-00000008", "unfinished-mine"):
        (tmp_path / name / "sharded").mkdir(parents=True)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(dist, "rendezvous", lambda url: iter([(HashStore(), 0, 1)]))
    monkeypatch.setattr(SCRIPT.fcntl, "flock", flock_of_nfs)
    lock, device = SCRIPT.join(tmp_path, "cpu")
    lock.close()
    assert device == torch.device("cpu")
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "step-00000008", "unfinished-mine"}


def hf_job(folder: Path, words: list, num_ranks: int, name: str = "job", **variables):
    program = [FOLDER / "finetune_hf.py"]
    return torchrun_job(one_agent(num_ranks), words, folder, name=name, program=program, **variables)


def test_a_second_start_is_refused_and_ranks_end_with_torchrun(home, tmp_path):
    words = [home / "llama", home / "text.txt", "--out", tmp_path / "run", "--batch", 2, "--steps", 1_000_000]
    with hf_job(tmp_path, words, 2) as job:
        wait_for_output("step (1) ", job)
        ranks = job.workers().values()
        assert len(ranks) == 2 and all(map(shares_a_lock, ranks))  # so that it is held until the last one ends
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)  # it holds the lock, and leaves the cores to the second start
        in_use = tmp_path / "run" / "unfinished-removal-of-step-00000001"
        in_use.mkdir()
        with hf_job(tmp_path, words, 2, "second") as second:
            assert second.wait() != 0
            assert second.output.count("another run is writing to") == 1
        assert in_use.exists()  # a start that is refused removes nothing
        for rank in ranks:
            os.kill(rank, signal.SIGCONT)
        job.kill_agent()
        assert wait_until(lambda: all(map(has_ended, ranks)), 10)
    with (tmp_path / "run" / ".lock").open("a") as lock:  # as the next run does: a busy machine frees it a moment later
        SCRIPT.take(lock, tmp_path, fcntl.LOCK_EX, patience_s=5)


def test_a_full_disk_ends_the_run_in_one_line(home, tmp_path):
    """In the third save: the second stays."""
    words = [home / "llama", home / "text.txt", "--out", tmp_path / "run", *SETTINGS]
    with hf_job(tmp_path, words, 1, **killed_at.variables(tmp_path, (killed_at.WRITE, 3, "disk"))) as job:
        assert job.wait() != 0
        assert_one_line(job, "step 8 can't be saved (No space left on device)")
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-00000004"]


def assert_one_line(job, expected: str) -> None:
    said = [line for line in job.output.splitlines() if line.startswith("finetune_hf.py: ")]
    assert len(said) == 1 and expected in said[0], job.output
    assert 'finetune_hf.py", line' not in job.output, job.output  # no traceback but torchrun's own


# ---------------------------------------------------------------- the long evidence


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 3, 5, 7, 9])
def test_other_numbers_of_ranks_equal_one_process(num_ranks, home, on_two, others_on_two, alone):
    """Every model; a batch has four rows, so that there are fewer rows than ranks on most of them."""
    runs = {name: words_of(home, name, f"{name}-on-{num_ranks}") for name in MODELS}
    launch_runs(runs, num_ranks)
    for name in runs:
        assert_trained_as_alone(name, home, home / f"{name}-on-{num_ranks}", alone)


LARGE = {"vocab_size": 4096, "tie_word_embeddings": True, "num_hidden_layers": 6, "max_position_embeddings": 256}
LARGE |= {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8, "num_key_value_heads": 4}
PLANNED = {
    "llama": LARGE,
    "qwen3": LARGE | {"head_dim": 32},
    "phi3": LARGE,
}  # GPT-2's GELU is written out in transformers, and keeps what the plan's one kernel does not


@pytest.mark.long
def test_the_plan_is_within_3_percent_of_the_measured_peak(tmp_path):
    """Of whole rows, with heads that are tied: the planner makes units of an embedding and a head that are not."""
    for name in PLANNED:
        make_model(name, tmp_path / name, **PLANNED[name])
    draw = random.Random(0)
    documents = [" ".join(f"w{draw.randrange(WORDS)}" for _ in range(256)) for _ in range(24)]
    (tmp_path / "text.txt").write_text("\n\n".join(documents))
    runs = {name: words_of(tmp_path, name, f"run-{name}", "text.txt", "--steps", 3) for name in PLANNED}
    flags = "--world-size 2 --tokens 256 --context 256 --micro-batches 2 --activation-checkpointing units"
    flags += f" --loss-chunks {256 // CHUNK} --device-memory-gb 80"
    for name, seen in launch_runs(runs, 2, traced=True).items():
        path = tmp_path / f"{name}.json"
        assert main_in_process("plan", "--config", tmp_path / name, *flags.split(), "--json", path) == 0
        planned_bytes = json.loads(path.read_text())["peak"]["bytes"]
        assert seen[0].peak_bytes == pytest.approx(planned_bytes, rel=0.03), name


@pytest.mark.long
def test_compiled_layers_learn_the_same(home, on_two, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # torch leaves its compiled headers there
    launch_runs({"compiled": words_of(home, "llama", "compiled", "text.txt", "--compile")}, 2)
    assert losses(home / "compiled") == pytest.approx(losses(home / "llama-2"), abs=1e-4)


@pytest.mark.long
def test_the_saved_run_of_13(tmp_path):
    """notebooks/reference/finetune_hf.txt, which 13 prints: the same command, on the same docstrings, the same losses."""
    saved = (PROJECT / "notebooks" / "reference" / "finetune_hf.txt").read_text()
    command = saved.replace("\\\n", " ").splitlines()[0].split()
    documents = [text for index, text in enumerate(docstring_documents(longest=128)) if index % 20]
    text = tmp_path / "docstrings.txt"
    text.write_text("\n\n".join(document.replace("\n\n", "\n") for document in documents))
    words = [PROJECT / "notebooks" / "reference" / "language", text, "--out", tmp_path / "run"]
    (seen, _) = launch_runs({"saved": [*words, *command[command.index("run") + 1 :]]}, 2)["saved"]
    if seen.printed.splitlines()[1] not in saved:
        pytest.skip("this Python has other docstrings")
    kept = [float(loss) for loss in re.findall(r"^step \d+  loss (\S+)", saved, re.MULTILINE)]
    assert losses(tmp_path / "run") == pytest.approx(kept, abs=1e-4)
    assert seen.printed.splitlines()[:6] == saved.replace("\\\n", " ").splitlines()[1:7]


@pytest.mark.long
@pytest.mark.parametrize(
    "moment, expected",
    [
        (("^open .*/unfinished-settings.json", 1, "disk"), "No space left on device"),
        (("^open .*/log.jsonl", 3, "disk"), "No space left on device"),
        ((killed_at.JOIN, 1, "disk"), "No space left on device"),
        ((killed_at.COPY, 1, "disk"), "No space left on device"),
    ],
)
def test_a_full_disk_elsewhere(moment, expected, home, tmp_path):
    """And when there is room again, the same command continues."""
    words = [home / "llama", home / "text.txt", "--out", tmp_path / "run", *SETTINGS]
    with hf_job(tmp_path, words, 2, **killed_at.variables(tmp_path, moment)) as job:
        assert job.wait() != 0
        assert_one_line(job, expected)
    with hf_job(tmp_path, words, 1, "again") as job:
        assert job.wait() == 0, job.output


@pytest.fixture(scope="module")
def undisturbed(home, tmp_path_factory) -> dict[str, torch.Tensor]:
    """The weights of a run on 2 ranks under torchrun."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with hf_job(folder, [home / "llama", home / "text.txt", "--out", folder / "run", *SETTINGS], 2) as job:
        assert job.wait() == 0, job.output
    return load_file(next((folder / "run" / "model").glob("*.safetensors")))


@pytest.mark.long
@pytest.mark.parametrize("when", killed_at.KILLS)
def test_ten_kills_change_nothing(when, home, undisturbed, tmp_path):
    """In the loop, in a save and in the export; bitwise nothing, where all starts have two ranks."""
    words = [home / "llama", home / "text.txt", "--out", tmp_path / "run", *SETTINGS]
    same = when == "on 2 ranks"
    killed_at.survive(
        lambda num_ranks, name, variables: hf_job(tmp_path, words, num_ranks, name, **variables),
        when,
        tmp_path,
    )
    found = load_file(next((tmp_path / "run" / "model").glob("*.safetensors")))
    assert all(torch.allclose(found[name], one, rtol=0, atol=0 if same else 1e-5) for name, one in undisturbed.items())
    assert not list((tmp_path / "run").glob("unfinished*"))
