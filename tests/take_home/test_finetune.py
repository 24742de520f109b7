"""finetune.py: a model of a different shape, a text of one's own, two ranks, then three; read back by the package."""

import json
import os
import re
import runpy
import signal
import sys
from dataclasses import replace
from pathlib import Path

import killed_at
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pretrained import config_of_llama, load_hugging_face, read_config, save_hugging_face
from programs import Killed, has_ended, shares_a_lock, wait_until
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from take_home_workers import FOLDER, load_script, run_main
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
    assert {path.name for path in newest.glob("step-*")} == {"step-00000004", "step-00000006"}
    assert not list(newest.glob("unfinished*"))
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
    monkeypatch.setattr(dist, "init_process_group", lambda backend: None)  # by the script
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    handler = signal.getsignal(signal.SIGTERM)
    yield script, tuple(map(str, (tmp_path / "model", text, tmp_path / "run")))
    signal.signal(signal.SIGTERM, handler)
    monkeypatch.undo()


CPU = torch.device("cpu")


def test_units_recomputation_and_chunks(alone, monkeypatch):
    """Losses do not tell: they are the same in one unit, and with nothing recomputed."""
    script, arguments = alone
    units, recomputed, saved = [], [], []
    shard, checkpoint, save = script.fully_shard, script.checkpoint, script.save

    def note_unit(module, **settings):
        units.append((type(module).__name__, settings["mp_policy"]))
        return shard(module, **settings)

    def note_recomputed(function, *inputs, **settings):
        recomputed.append(getattr(function, "__name__", type(function).__name__))
        return checkpoint(function, *inputs, **settings)

    def note_save(model, optimizer, path):
        saved.append((path.name, len(recomputed)))
        save(model, optimizer, path)

    script.fully_shard, script.checkpoint, script.save = note_unit, note_recomputed, note_save
    script.main(CPU, *arguments, "5")
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    assert units == [("Layer", policy)] * 3 + [("Llama", policy)]  # and no unit for the head
    per_step = 3 + script.CHUNKS
    assert recomputed[:per_step] == ["FSDPLayer"] * 3 + ["loss_of"] * 4 and len(recomputed) == 5 * per_step
    assert saved == [("step-00000004", 4 * per_step), ("step-00000005", 5 * per_step)]  # in the middle, too
    assert script.compute_dtype(torch.device("cuda")) == torch.bfloat16


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
    script.main(CPU, *arguments, "4")
    used, step = [], torch.optim.AdamW.step

    def note_rate(self, **settings):
        used.append(self.param_groups[0]["lr"])
        return step(self, **settings)

    monkeypatch.setattr(torch.optim.AdamW, "step", note_rate)
    script.LEARNING_RATE = 1e-5
    script.main(CPU, *arguments, "6")
    assert used[-2:] == [script.learning_rate(4, 6), script.learning_rate(5, 6)] and max(used[-2:]) <= 1e-5


def test_two_checkpoints_stay_and_side_files_come_along(alone):
    script, arguments = alone
    script.SAVE_EVERY = 1
    script.main(CPU, *arguments, "4")
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
        script.main(CPU, *arguments, "2")
    script.shutil.rmtree = consolidate
    run = Path(arguments[2])
    assert not (run / "model").exists()
    for path in (run / "unfinished-model" / "sharded").iterdir():  # as if a rank of many had left it
        tensors = {name: torch.full_like(tensor, 7.0) for name, tensor in load_file(path).items()}
        with safe_open(path, "pt") as file:
            save_file(tensors, path.with_name(f"shard-00009-{path.name}"), metadata=file.metadata())
    script.main(CPU, *arguments, "2")
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
    script.main(CPU, *arguments, "1")
    assert sorted(path.name for path in run.iterdir()) == [".lock", "model", "step-00000001", "unfinished-mine"]


def test_a_signal_ends_the_run_after_its_step(alone, monkeypatch, capsys):
    script, arguments = alone
    load_batch = script.load_batch

    def interrupted(documents, step):
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return load_batch(documents, step)

    script.load_batch = interrupted
    script.main(CPU, *arguments, "6")
    assert capsys.readouterr().out.startswith("1 ranks on cpu, computing in float32; shards in float32\n")
    run = Path(arguments[2])
    assert [path.name for path in run.glob("step-*")] == ["step-00000002"] and not (run / "model").exists()


def test_a_number_of_ranks_that_does_not_divide_the_batch_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["finetune.py", "folder", "text", "run", "4"])
    monkeypatch.setenv("WORLD_SIZE", "5")
    with pytest.raises(SystemExit, match="^5 ranks can't split 24 documents evenly"):
        runpy.run_path(FOLDER / "finetune.py", run_name="__main__")


@pytest.mark.long
def test_a_second_start_is_refused_and_ranks_end_with_torchrun(alone, tmp_path):
    arguments = [*alone[1], 1_000_000]
    program = [FOLDER / "finetune.py"]
    with torchrun_job(one_agent(2), arguments, tmp_path, program=program) as job:
        wait_for_output("step (0) ", job)
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
    script.main(CPU, folder, text, run, "1")
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
        ({"model_type": "gemma"}, "supports only Llamas with plain"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "supports only Llamas with plain"),
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


def test_a_file_that_the_index_does_not_list_is_refused(alone):
    """torch's reader would read it too, and take its tensors for the model's."""
    script, (folder, _, _) = alone
    script.read_config(Path(folder))
    listed = next(Path(folder).glob("*.safetensors"))
    save_file(load_file(listed), Path(folder, "older.safetensors"))
    with pytest.raises(SystemExit, match="older.safetensors isn't in the index.*; move it out of the folder$"):
        script.read_config(Path(folder))


def test_a_vocabulary_beyond_bytes_needs_its_tokenizer(tmp_path):
    (tmp_path / "text.txt").write_text("one\n\ntwo")
    with pytest.raises(SystemExit, match="no tokenizer.json, and a vocabulary of 300"):
        load_script("finetune.py").read_documents(tmp_path, tmp_path / "text.txt", 300)


# ---------------------------------------------------------------- the long evidence


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with a tied model of three layers, and a text."""
    folder = tmp_path_factory.mktemp("finetune")
    torch.manual_seed(0)
    save_hugging_face(Llama(LIKE_LLAMA_32), folder / "model", config_of_llama(LIKE_LLAMA_32))
    documents = (f"Line {number}: " + "so it goes. " * (number % 5) for number in range(40))
    (folder / "text.txt").write_text("\n\n".join(documents))
    return folder


def job(home: Path, folder: Path, num_ranks: int, name: str = "job", **variables):
    arguments = [home / "model", home / "text.txt", folder / "run", 10]
    program = [FOLDER / "finetune.py"]
    return torchrun_job(one_agent(num_ranks), arguments, folder, name=name, program=program, **variables)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model-00001-of-00001.safetensors")


@pytest.fixture(scope="module")
def undisturbed(home, tmp_path_factory) -> dict[str, torch.Tensor]:
    """The weights after ten steps on 2 ranks."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with job(home, folder, 2) as one:
        assert one.wait() == 0, one.output
    return weights(folder / "run")


@pytest.mark.long
def test_one_rank_three_and_eight_equal_two(home, undisturbed, tmp_path):
    for num_ranks in (1, 3, 8):
        folder = tmp_path / str(num_ranks)
        folder.mkdir()
        with job(home, folder, num_ranks) as one:
            assert one.wait() == 0, one.output
        found = weights(folder / "run")
        assert all(torch.allclose(found[name], tensor, rtol=0, atol=1e-5) for name, tensor in undisturbed.items())


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
