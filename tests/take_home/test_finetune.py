"""finetune.py: a model of a different shape, a text of one's own, two ranks, then three; read back by the package."""

import contextlib
import functools
import io
import json
import math
import os
import re
import runpy
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import killed_at
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from faked_hosts import CHOICES, check_choice, flock_of_nfs
from finetune_workers import Ended, Poison, run_each
from pretrained import config_of_llama, load_hugging_face, read_config, save_hugging_face
from programs import Killed, has_ended, shares_a_lock, wait_until
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from take_home_workers import FOLDER, load_script
from torch import nn
from torch.distributed import HashStore, TCPStore
from torch.distributed.fsdp import MixedPrecisionPolicy
from torchrun_jobs import one_agent, torchrun_job, wait_for_output

from fsdp_helpers.models.llama import IGNORED, Llama
from fsdp_helpers.models.shapes import LlamaShape, RopeScaling, llama_from_config
from fsdp_helpers.ranks.launch import launch

SHAPE = LlamaShape(
    width=24, depth=3, num_heads=6, num_kv_heads=2, mlp_width=40, vocabulary=256, context=64, rope_base=500.0
)


LIKE_LLAMA_32 = replace(
    SHAPE,
    tied=True,
    rope_scaling=RopeScaling(factor=32.0, low_freq_factor=0.1, high_freq_factor=4.0, original_context=64),
)


CPU = torch.device("cpu")
LOSS_DIFFERENCE, WEIGHT_DIFFERENCE = 1e-6, 1e-6  # of fp32 sums in another order
SHAPES = {"plain": SHAPE, "tied": LIKE_LLAMA_32}
STEPS, SAVE_EVERY = 6, 2
KINDS = {"nan": math.nan, "inf": math.inf}
MOMENTS = {
    "first": {"step": 0},
    "middle": {"step": 3},
    "last": {"step": STEPS - 1},
    "SIGTERM": {"step": 2, "with_sigterm": True},
}
FAST = ("nan first", "inf middle", "nan last", "inf SIGTERM")
POISONS = {
    f"{kind} {moment}": Poison(value, **where) for kind, value in KINDS.items() for moment, where in MOMENTS.items()
}


def launch_runs(world_size: int, runs: dict[str, tuple[list, Poison | None]]) -> dict[str, list[Ended]]:
    """Name -> what each rank saw of that run; all of them in one launch, with a save in every other step."""
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in runs]
    ports = [store.port for store in stores]
    words = [(list(map(str, arguments)), poison) for arguments, poison in runs.values()]
    settings = {"SAVE_EVERY": SAVE_EVERY}
    found = launch(run_each, ports, words, settings, world_size=world_size, device="cpu", timeout_s=400)
    return {name: list(seen) for name, seen in zip(runs, zip(*found, strict=True), strict=True)}


def losses(seen: list[Ended]) -> dict[int, float]:
    assert [one.output for one in seen[1:]] == [""] * (len(seen) - 1)  # rank 0 alone prints
    found = re.findall(r"^step (\d+)  loss (\S+)$", seen[0].output, re.MULTILINE)
    return {int(step) - 1: float(loss) for step, loss in found}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A model of each shape, in two files, and a text with a document that's longer than the limit."""
    folder = tmp_path_factory.mktemp("finetune")
    for name, shape in SHAPES.items():
        torch.manual_seed(0)
        config = config_of_llama(shape) | {"torch_dtype": "bfloat16"}
        save_hugging_face(Llama(shape), folder / name, config, num_files=2)
    documents = [f"Line {number}:\n" + "so it goes. " * (number % 5) for number in range(38)]
    (folder / "text.txt").write_text("\n\n".join([*documents, "A long one. " * 30, "a" * 256]))
    return folder


def words_of(home: Path, model: str, run: str, steps: int = STEPS) -> list:
    return [home / model, home / "text.txt", home / run, steps]


@pytest.fixture(scope="module")
def on_two(home) -> dict[str, list[Ended]]:
    runs = {name: (words_of(home, name, name), None) for name in SHAPES}
    runs |= {"stopped": (words_of(home, "tied", "again"), Poison(None, 2, with_sigterm=True))}
    runs |= {name: (words_of(home, "plain", name), POISONS[name]) for name in FAST}
    runs |= {f"after {name}": (words_of(home, "plain", name), None) for name in FAST}
    return launch_runs(2, runs)


@functools.cache
def train_alone(home: Path, name: str) -> tuple[list[float], nn.Module]:
    """The losses and the model of a plain loop: the package's Llama in one process, a document at a time."""
    shape = SHAPES[name]
    model = Llama(shape)
    load_hugging_face(model, home / name)
    documents = [list(text.encode())[:256] for text in (home / "text.txt").read_text().split("\n\n")]
    orders = [torch.randperm(40, generator=torch.Generator().manual_seed(epoch)) for epoch in range(4)]
    stream = [documents[index] for index in torch.cat(orders)]
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    for step, rate in enumerate([0.75e-4, 1.5e-4, 2.25e-4, 3e-4, 3e-4, 1.65e-4]):  # half of 2 steps down to a tenth
        batch = stream[24 * step : 24 * (step + 1)]
        num_tokens = sum(len(document) - 1 for document in batch)
        optimizer.zero_grad()
        total = 0.0
        for document in batch:
            tokens = torch.tensor([document])
            loss = model(tokens[:, :-1], tokens[:, 1:]) / num_tokens
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        found.append(total)
    return found, model


# ---------------------------------------------------------------- equal to a plain loop


@pytest.mark.parametrize("name", SHAPES)
def test_two_ranks_equal_a_plain_loop(name, home, on_two):
    right, model = train_alone(home, name)
    assert losses(on_two[name]) == pytest.approx(dict(enumerate(right)), rel=0, abs=LOSS_DIFFERENCE)
    assert_exported(home / name, home / name / "model", model)
    assert "\n40 documents; 1 of them are cut at 256 tokens\n" in on_two[name][0].output


def assert_exported(folder: Path, exported: Path, model: nn.Module) -> None:
    """In files that hold the same tensors as those that training began with."""
    config = read_config(exported)
    assert config["dtype"] == "float32" and "torch_dtype" not in config
    tuned = Llama(llama_from_config(config))
    load_hugging_face(tuned, exported)
    for (key, own), right in zip(tuned.named_parameters(), model.parameters(), strict=True):
        assert torch.allclose(own, right, rtol=0, atol=WEIGHT_DIFFERENCE), key
    index = "model.safetensors.index.json"
    listed = [json.loads((one / index).read_text())["weight_map"] for one in (folder, exported)]
    assert listed[0] == listed[1] and len(set(listed[0].values())) == 2


def test_a_run_of_which_one_rank_is_asked_to_end_continues_on_three(home, on_two):
    """Tied, which is harder to save and to load."""
    assert [one.status for one in on_two["stopped"]] == [0, 0]
    assert on_two["stopped"][0].left == [".lock", "step-00000002", "step-00000003"]
    rest = launch_runs(3, {"again": (words_of(home, "tied", "again"), None)})["again"]
    found = losses(on_two["stopped"]) | losses(rest)
    assert sorted(losses(rest)) == [3, 4, 5]
    assert found == pytest.approx(dict(enumerate(train_alone(home, "tied")[0])), rel=0, abs=LOSS_DIFFERENCE)


# ---------------------------------------------------------------- a gradient that isn't finite


@pytest.mark.parametrize("name", FAST)
def test_a_gradient_that_is_not_finite_ends_the_run_and_harms_nothing(name, home, on_two):
    assert_harmless(name, home, on_two)


def assert_harmless(name: str, home: Path, seen: dict[str, list[Ended]]) -> None:
    """One line, status 1; what was saved stays, and the next run continues as if nothing had happened."""
    poison, ended, run = POISONS[name], seen[name], home / name
    saved = list(range(SAVE_EVERY, poison.step + 1, SAVE_EVERY))
    newest = run / f"step-{saved[-1]:08d}" if saved else None
    assert [one.status for one in ended] == [1, 1]
    assert sorted(losses(ended)) == list(range(poison.step))
    (line,) = ended[0].errors.splitlines()
    said = rf"finetune.py: step {poison.step + 1}: the loss is \d\.\d+, and the gradient's norm is {poison.value}"
    assert re.fullmatch(f"{said}; the newest good checkpoint is {newest}", line), line
    assert ended[1].errors == ""
    assert ended[0].left == [".lock", *(f"step-{step:08d}" for step in saved)]
    resumed, right = seen[f"after {name}"], losses(seen["plain"])
    assert losses(resumed) == {step: right[step] for step in range(saved[-1] if saved else 0, STEPS)}
    assert [one.status for one in resumed] == [0, 0]
    for path in (run / "model").glob("*.safetensors"):
        one, undisturbed = load_file(path), load_file(home / "plain" / "model" / path.name)
        assert all(torch.equal(one[key], undisturbed[key]) for key in undisturbed)


@pytest.mark.long
def test_no_moment_and_no_value_harms_anything(home, on_two):
    others = [name for name in POISONS if name not in FAST]
    runs = {name: (words_of(home, "plain", name), POISONS[name]) for name in others}
    runs |= {f"after {name}": (words_of(home, "plain", name), None) for name in others}
    seen = launch_runs(2, runs)
    for name in others:
        assert_harmless(name, home, seen | {"plain": on_two["plain"]})


# ---------------------------------------------------------------- hosts and their GPUs


@pytest.mark.parametrize("wanted, hosts, found", CHOICES)
def test_all_hosts_have_a_gpu_for_each_rank_or_none_has_any(wanted, hosts, found, monkeypatch, capsys):
    script = load_script("finetune.py")
    script.DEVICE = wanted
    check_choice(script, script.choose_device, wanted, hosts, found, monkeypatch, capsys)


# ---------------------------------------------------------------- one rank, in this process


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """The script, to be run by one rank in this process, with a model and a text: (script, its arguments)."""
    save_hugging_face(Llama(SHAPE), tmp_path / "model", config_of_llama(SHAPE))
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"So it goes, {number} times." for number in range(30)))
    monkeypatch.setenv("RANK", "0")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    script = load_script("finetune.py")
    script.join = lambda: CPU
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)  # by the script
    handler = signal.getsignal(signal.SIGTERM)
    yield script, tuple(map(str, (tmp_path / "model", text, tmp_path / "run")))
    signal.signal(signal.SIGTERM, handler)
    monkeypatch.undo()


def test_units_recomputation_and_chunks(alone, monkeypatch):
    """Losses do not tell: they are the same in one unit, and with nothing recomputed."""
    script, arguments = alone
    units, recomputed, saved = [], [], []
    shard, checkpoint, save = script.fully_shard, script.checkpoint, script.save

    def note_unit(module, **settings):
        units.append((type(module).__name__, settings["mp_policy"]))
        return shard(module, **settings)

    def note_recomputed(function, *inputs, **settings):
        assert settings == {"use_reentrant": False}
        recomputed.append(getattr(function, "__name__", type(function).__name__))
        return checkpoint(function, *inputs, **settings)

    def note_save(model, optimizer, path):
        saved.append((path.name, len(recomputed)))
        save(model, optimizer, path)

    script.fully_shard, script.checkpoint, script.save = note_unit, note_recomputed, note_save
    script.main(*arguments, "5")
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    assert units == [("Layer", policy)] * 3 + [("Llama", policy)]  # and no unit for the head
    per_step = 3 + script.CHUNKS
    assert recomputed[:per_step] == ["FSDPLayer"] * 3 + ["loss_of"] * 4 and len(recomputed) == 5 * per_step
    assert saved == [("step-00000004", 4 * per_step), ("step-00000005", 5 * per_step)]  # in the middle, too
    assert script.compute_dtype(torch.device("cuda")) == torch.bfloat16


def test_layers_get_all_their_inputs_in_bf16(alone):
    """As on a GPU, and as with a torch that doesn't cast a layer's inputs when it's recomputed: here it never does."""
    script, arguments = alone
    in_fp32 = _losses_of(script, arguments)
    script.compute_dtype = lambda device: torch.bfloat16
    script.MixedPrecisionPolicy = functools.partial(MixedPrecisionPolicy, cast_forward_inputs=False)
    in_bf16 = _losses_of(script, [*arguments[:2], f"{arguments[2]}-bf16"])
    assert in_bf16 != in_fp32 and in_bf16 == pytest.approx(in_fp32, abs=0.02)


def _losses_of(script, arguments) -> list[float]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        script.main(*arguments, "3")
    return [float(loss) for loss in re.findall(r"^step \d+  loss (\S+)$", output.getvalue(), re.MULTILINE)]


def test_the_loss_is_computed_in_fp32():
    script = load_script("finetune.py")
    model = script.Llama(CONFIG | SMALL).to(torch.bfloat16)
    assert (
        model.loss_of(torch.ones(2, 24, dtype=torch.bfloat16), torch.ones(2, dtype=torch.long)).dtype == torch.float32
    )


def test_each_epoch_has_each_document_once(alone):
    script, (folder, text, _) = alone
    documents = script.read_documents(Path(folder), Path(text), 256)
    batches = [script.load_batch(documents, step) for step in range(5)]  # 120 rows: four epochs of 30 documents
    rows = [tuple(row.tolist()) for numbers, _ in batches for row in numbers[:, :21]]
    epochs = [rows[first : first + 30] for first in range(0, 120, 30)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs) and len(set(epochs[0])) == 30
    assert epochs[0] != epochs[1]
    script.LONGEST = 8
    assert script.load_batch([torch.arange(50)], 0)[0].shape == (24, 7)
    _, targets = script.load_batch([torch.tensor([1, 2, 3]), torch.arange(50)], 0)
    assert set(map(tuple, targets.tolist())) == {
        (1, 2, 3, 4, 5, 6, 7),
        (2, 3, *[IGNORED] * 5),
    }  # padding counts nothing


def test_the_learning_rate_rises_falls_and_obeys_an_edit(alone, monkeypatch):
    script, arguments = alone
    assert [script.learning_rate(step, 104) / 3e-4 for step in (0, 3, 4, 54, 104)] == pytest.approx(
        [0.25, 1.0, 1.0, 0.55, 0.1]
    )
    script.main(*arguments, "4")
    used, step = [], torch.optim.AdamW.step

    def note_rate(self, **settings):
        used.append(self.param_groups[0]["lr"])
        return step(self, **settings)

    monkeypatch.setattr(torch.optim.AdamW, "step", note_rate)
    script.LEARNING_RATE = 1e-5
    script.main(*arguments, "6")
    assert used[-2:] == [script.learning_rate(4, 6), script.learning_rate(5, 6)] and max(used[-2:]) <= 1e-5


def test_two_checkpoints_stay_and_side_files_come_along(alone):
    script, arguments = alone
    script.SAVE_EVERY = 1
    script.main(*arguments, "4")
    run = Path(arguments[2])
    assert sorted(path.name for path in run.iterdir()) == [".lock", "model", "step-00000003", "step-00000004"]
    assert (run / "model" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_a_killed_export_leaves_nothing_in_the_next_one(alone):
    """torch joins every file that it finds in `sharded`; a dead run's rows, of another number of ranks, are among them."""
    script, arguments = alone
    consolidate = script.shutil.rmtree

    def killed(path, **settings):
        if Path(path).name == "sharded":
            raise Killed
        consolidate(path, **settings)

    script.shutil.rmtree = killed
    with pytest.raises(Killed):
        script.main(*arguments, "2")
    script.shutil.rmtree = consolidate
    run = Path(arguments[2])
    assert not (run / "model").exists()
    for path in (run / "unfinished-model" / "sharded").iterdir():  # as if a rank of many had left it
        tensors = {name: torch.full_like(tensor, 7.0) for name, tensor in load_file(path).items()}
        with safe_open(path, "pt") as file:
            save_file(tensors, path.with_name(f"shard-00009-{path.name}"), metadata=file.metadata())
    script.main(*arguments, "2")
    assert sorted(path.name for path in run.glob("*model*")) == ["model"]
    tuned = Llama(SHAPE)
    load_hugging_face(tuned, run / "model")
    assert all(parameter.abs().max() < 2 for parameter in tuned.parameters())


def test_what_a_killed_run_left_is_removed_at_the_start(alone):
    """Not only by a save or a removal of the same step, which may never come again."""
    script, arguments = alone
    run = Path(arguments[2])
    for name in ("unfinished-step-00000003", "unfinished-removal-of-step-00000002", "unfinished-mine"):
        (run / name).mkdir(parents=True)
        (run / name / "__0_0.distcp").touch()
    script.main(*arguments, "1")
    assert sorted(path.name for path in run.iterdir()) == [".lock", "model", "step-00000001", "unfinished-mine"]


def test_a_signal_ends_an_export_at_once(alone):
    """Everything is saved by then, and torchrun's next start repeats the export."""
    script, arguments = alone
    heeded = []
    script.export = lambda *_: heeded.append(signal.getsignal(signal.SIGTERM))
    script.main(*arguments, "1")
    assert heeded == [signal.SIG_DFL]


def test_a_signal_ends_the_run_after_its_step(alone, monkeypatch, capsys):
    script, arguments = alone
    load_batch = script.load_batch

    def interrupted(documents, step):
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return load_batch(documents, step)

    script.load_batch = interrupted
    script.main(*arguments, "6")
    assert capsys.readouterr().out.startswith("1 ranks on cpu, computing in float32; shards in float32\n")
    run = Path(arguments[2])
    assert [path.name for path in run.glob("step-*")] == ["step-00000002"] and not (run / "model").exists()


@pytest.mark.parametrize(
    "variables, words, told",
    [
        *(({"WORLD_SIZE": n}, 4, f"{n} ranks can't split 24 documents evenly") for n in ("5", "7", "9")),
        ({"WORLD_SIZE": "2"}, 3, "start it with `torchrun --nproc-per-node 2 finetune.py FOLDER TEXT RUN STEPS`"),
        ({}, 4, "start it with `torchrun --nproc-per-node 2 finetune.py FOLDER TEXT RUN STEPS`"),
    ],
)
def test_a_start_that_cannot_work_is_one_line(variables, words, told, monkeypatch, capsys):
    """On the first rank of a host; the others wait until torchrun stops them."""
    monkeypatch.setattr(sys, "argv", ["finetune.py", *["word"] * words])
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    for local_rank in ("0", "1") if variables else ("",):
        for name, value in (variables | {"LOCAL_RANK": local_rank} if variables else {}).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(FOLDER / "finetune.py", run_name="__main__")
        said = capsys.readouterr().err
        assert ended.value.code == 2
        assert said == "" if local_rank == "1" else (told in said and said.count("\n") == 1)


def test_a_second_start_is_refused_and_ranks_end_with_torchrun(alone, tmp_path):
    arguments = [*alone[1], 1_000_000]
    program = [FOLDER / "finetune.py"]
    with torchrun_job(one_agent(2), arguments, tmp_path, program=program) as job:
        wait_for_output("step (1) ", job)
        ranks = job.workers().values()
        assert len(ranks) == 2 and all(map(shares_a_lock, ranks))  # so that it is held until the last one ends
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)  # it holds the lock, and leaves the cores to the second start
        with torchrun_job(one_agent(2), arguments, tmp_path, program=program, name="second") as second:
            assert second.wait() != 0
            assert "another run is writing to" in second.output
        for rank in ranks:
            os.kill(rank, signal.SIGCONT)
        job.kill_agent()
        assert wait_until(lambda: all(map(has_ended, ranks)), 10)


def test_the_gradient_is_clipped_before_the_update(alone):
    """To a length of 0: only AdamW's decay is left then. Losses do not tell, since Adam divides by the length."""
    script, (folder, text, run) = alone
    script.MAX_NORM = 0.0
    script.main(folder, text, run, "1")
    model, tuned = Llama(SHAPE), Llama(SHAPE)
    load_hugging_face(model, folder)
    load_hugging_face(tuned, f"{run}/model")
    for own, first in zip(tuned.parameters(), model.parameters(), strict=True):
        assert torch.allclose(own, first, rtol=0, atol=1e-5)  # a step moves a value by the learning rate


def test_a_kill_during_a_save_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    """Some files are written then; the next start must not take them for a checkpoint."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    script, model = load_script("finetune.py"), nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    script.save(model, optimizer, tmp_path / "step-00000004")

    def save_half(state: dict, checkpoint_id) -> None:
        checkpoint_id.mkdir()
        (checkpoint_id / "__9_0.distcp").touch()  # by a rank that the next run doesn't have
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(dcp, "save", save_half)
        script.save(model, optimizer, tmp_path / "step-00000008")
    assert script.load_newest(model, optimizer, tmp_path) == 4
    script.save(model, optimizer, tmp_path / "step-00000008")  # over what is left
    assert script.load_newest(model, optimizer, tmp_path) == 8
    assert not (tmp_path / "step-00000008" / "__9_0.distcp").exists()


CONFIG = {"model_type": "llama", "hidden_size": 24, "num_attention_heads": 6, "rms_norm_eps": 1e-6, "vocab_size": 256}
SMALL = {"num_key_value_heads": 6, "intermediate_size": 24, "num_hidden_layers": 1, "tie_word_embeddings": True}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "gemma"}, "supports only Llamas with plain"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "supports only Llamas with plain"),
        ({"head_dim": 8}, "head_dim"),
        ({"attention_bias": True}, "biases"),
        ({}, "no safetensors files"),
    ],
)
def test_a_folder_that_it_cannot_read_is_refused(changes, message, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    if changes:
        (tmp_path / "model.safetensors").touch()
    assert message in refused(capsys, load_script("finetune.py").read_config, tmp_path)


def refused(capsys, call, *arguments) -> str:
    with pytest.raises(SystemExit) as ended:
        call(*arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    return line


def test_a_file_that_the_index_does_not_list_is_refused(alone, capsys):
    """torch's reader would read it too, and take its tensors for the model's."""
    script, (folder, _, _) = alone
    script.read_config(Path(folder))
    listed = next(Path(folder).glob("*.safetensors"))
    save_file(load_file(listed), Path(folder, "older.safetensors"))
    line = refused(capsys, script.read_config, Path(folder))
    assert "older.safetensors isn't in the index" in line and line.endswith("move it out of the folder")


def test_a_vocabulary_beyond_bytes_needs_its_tokenizer(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("one\n\ntwo")
    told = refused(capsys, load_script("finetune.py").read_documents, tmp_path, tmp_path / "text.txt", 300)
    assert "no tokenizer.json, and a vocabulary of 300" in told


# ---------------------------------------------------------------- a shared folder that other hosts see differently


def test_the_lock_may_be_shared_where_flock_is_emulated(alone, monkeypatch):
    script, arguments = alone
    monkeypatch.setattr(script.fcntl, "flock", flock_of_nfs)
    script.main(*arguments, "1")


def test_the_newest_checkpoint_is_the_one_that_rank_0_finds(alone, monkeypatch):
    script, arguments = alone
    script.SAVE_EVERY = 1
    script.main(*arguments, "2")
    model = script.start(script.read_config(Path(arguments[0])), Path(arguments[0]), CPU)
    optimizer = torch.optim.AdamW(model.parameters())
    run = Path(arguments[2])

    def broadcast(found: list) -> None:  # this rank's host still sees an older folder
        assert found == [run / "step-00000002"]
        found[0] = run / "step-00000001"

    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    assert script.load_newest(model, optimizer, run) == 1


# ---------------------------------------------------------------- the long evidence


def job(home: Path, folder: Path, num_ranks: int, name: str = "job", **variables):
    arguments = [home / "tied", home / "text.txt", folder / "run", 10]
    program = [FOLDER / "finetune.py"]
    return torchrun_job(one_agent(num_ranks), arguments, folder, name=name, program=program, **variables)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return {name: one for path in (run / "model").glob("*.safetensors") for name, one in load_file(path).items()}


@pytest.fixture(scope="module")
def undisturbed(home, tmp_path_factory) -> dict[str, torch.Tensor]:
    """The weights after ten steps on 2 ranks."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with job(home, folder, 2) as one:
        assert one.wait() == 0, one.output
    return weights(folder / "run")


@pytest.mark.long
@pytest.mark.parametrize("when", killed_at.KILLS)
def test_ten_kills_change_nothing(when, home, undisturbed, tmp_path):
    """In the loop, in a save and in the export; bitwise nothing, where all starts have two ranks."""
    same = when == "on 2 ranks"
    killed_at.survive(
        lambda num_ranks, name, variables: job(home, tmp_path, num_ranks, name, **variables),
        when,
        tmp_path,
    )
    found = weights(tmp_path / "run")
    assert all(torch.allclose(found[name], one, rtol=0, atol=0 if same else 1e-5) for name, one in undisturbed.items())
    assert not list((tmp_path / "run").glob("unfinished*"))
